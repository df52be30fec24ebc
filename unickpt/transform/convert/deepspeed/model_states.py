"""Model state files, which native and universal checkpoints of DeepSpeed have in common.

Their content is defined by ``_common_checkpoint_state`` in deepspeed/runtime/engine.py: weights and buffers of the module,
names of tied parameters, shapes of the trained parameters, parts of the frozen ones under ZeRO 3, counters, scheduler and
client state.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from unickpt import __version__
from unickpt.base.errors import FormatError, NotACheckpointError
from unickpt.checkpoint.format.boxes import Box, split_flat_range
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import OptimizerRecord, ParameterGroup, Writer, merge_groups
from unickpt.checkpoint.state.optimizer_record import encoded
from unickpt.transform.convert.deepspeed.files import MODEL, File, is_deepspeed, read_file
from unickpt.transform.convert.huggingface.files import configuration
from unickpt.transform.convert.optimizers import class_of_states
from unickpt.transform.convert.pickles.lazy_tensor import Located, OpenFiles
from unickpt.transform.convert.pickles.safe_pickle import Record
from unickpt.transform.convert.pipeline import SourcePart
from unickpt.transform.convert.readings import BoxOf, Reading, Regions
from unickpt.transform.dialects.model_facts import Model
from unickpt.transform.dialects.translated_checkpoint import HUGGINGFACE

MODEL_FILE_WHOLE = re.compile(r"(?P<data>(?!))?mp_rank_(?P<model>\d+)_model_states\.pt")  # ZeRO 0 to 2
# As in ds_unickpt/saving/capture.py: options of the implementation, and internal values of DeepSpeed.
_NOT_HYPERPARAMETERS = frozenset(
    {"params", "foreach", "fused", "capturable", "differentiable", "name", "moe", "step", "_ds_source_param_group_id"}
)
# Keys that DeepSpeed itself adds to the client state (``_common_checkpoint_state``).
OWN_KEYS = frozenset(
    {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
     "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps", "global_steps",
     "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version",
     "universal_checkpoint_info", "num_experts", "ds_autoep_layers", "autoep_layers"}
)  # fmt: skip


@dataclass
class Parameters:
    """The parameters of all files.

    Attributes:
        shapes: shapes by name.
        dtypes: dtypes of the weights by name.
        masters: positions of the masters by name, as boxes.
    """

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    masters: dict[str, list[tuple[Box, Located]]] = field(default_factory=dict)

    def info(self, name: str, state: str, dtype: str) -> TensorInfo:
        """Return the description of one tensor of a parameter."""
        kind = "parameter" if state in ("weight", "master") else "optimizer"
        return TensorInfo(name, state, dtype, self.shapes[name], kind)


def read_files(folder: Path, pattern: re.Pattern[str], files: OpenFiles, also: Sequence[str]) -> dict[tuple[int, int], File]:
    """Read the files that match a pattern, by (model parallel rank, data parallel rank). Raises as ``read_file``."""
    found = {}
    for path in sorted(folder.iterdir()):
        match = pattern.fullmatch(path.name)
        if match:
            found[int(match["model"]), int(match["data"] or 0)] = read_file(path, files, also)
    return found


class SourceBuilder:
    """Collector of the parts of a source, and of the state that is described by one model state file.

    Attributes:
        folder: folder of the checkpoint.
        first: model state file that describes the job.
        parts: parts of the source, by input file.
        listed: tensors without parts.
        left_out: state that is not converted, with the reason.
    """

    def __init__(self, folder: Path, first: File) -> None:
        self.folder, self.first = folder, first
        self.parts: dict[Path, list[SourcePart]] = {}
        self.listed: list[TensorInfo] = []
        self.left_out: list[str] = []

    def number(self, key: str) -> int:
        """Return a counter of DeepSpeed, or 0 if it is missing."""
        found: int = self.first.get(key, int, 0)
        return found

    def writer(self, topology: Mapping[str, Any], dialect: str = HUGGINGFACE, model: Model | None = None) -> Writer:
        """Return the writer record. Facts about the model come from a ``config.json`` in the folder and from ``model``."""
        config = configuration(self.folder) or configuration(self.folder.parent)
        version = self.first.get("ds_version", str, "")
        facts = Model.of_config(config).with_more(model or Model(), str(self.folder)).as_json()
        return Writer("deepspeed", version, __version__, torch.__version__, dialect, dict(topology), facts)

    def add(self, path: Path, part: SourcePart) -> None:
        """Add a part that is read from a file."""
        if part.box.numel:
            self.parts.setdefault(path, []).append(part)
        else:
            self.listed.append(part.tensor)

    def optimizer_record(
        self, groups: Sequence[Mapping[str, Any]], scalars: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]],
        states: Mapping[str, Any], per_parameter: Sequence[Sequence[str]] | None = None,
    ) -> OptimizerRecord:  # fmt: skip
        """Return hyperparameters and steps by parameter name. Under ZeRO 3 a group can have several flat groups.

        Args:
            groups: parameter groups with hyperparameters.
            scalars: scalar states of each flat group, or of each entry of ``per_parameter``.
            names: names of the parameters of each flat group.
            states: optimizer states, which may contain a common step.
            per_parameter: names that share one entry of ``scalars``, if steps are stored per parameter.
        """
        if per_parameter is None and len(groups) != len(names):
            owners = [at for at, group in enumerate(groups) for _ in group.get("params", ())]
            if len(owners) != len(names):
                raise FormatError(f"{self.folder}: {len(groups)} parameter groups do not match {len(names)} flat groups")
        else:
            owners = list(range(len(groups)))
        joined: list[list[str]] = [[] for _ in groups]
        for owner, listed in zip(owners, names, strict=True):
            joined[owner] += listed
        hyperparameters = tuple(
            group_of({k: v for k, v in group.items() if k not in _NOT_HYPERPARAMETERS}, listed)
            for group, listed in zip(groups, joined, strict=True)
        )
        counts: list[ParameterGroup] = []
        steps = [groups[owner].get("step", states.get("base_optimizer_state_step")) for owner in owners]
        for at, listed in enumerate(per_parameter or names):
            values = {key: value for key, value in scalars[at].items() if value is not None}
            step = steps[at] if per_parameter is None else None
            counts.append(group_of({"step": step} | values if step is not None else values, listed))
        return OptimizerRecord(
            self._optimizer_name(), hyperparameters, merge_groups(group for group in counts if group.hyperparameters)
        )

    def _optimizer_name(self) -> str:
        config = self.first.get("ds_config", dict, {}).get("optimizer")
        if isinstance(config, dict) and isinstance(config.get("type"), str):
            return str(config["type"])
        return class_of_states(
            {part.tensor.state for parts in self.parts.values() for part in parts if part.tensor.kind == "optimizer"}
        )

    def objects(self, scaler: Any) -> dict[str, Any]:
        """Return the non-tensor state: client state, counters, configuration, scheduler, and the loss scaler (a record)."""
        client = {key: value for key, value in self.first.content.items() if key not in OWN_KEYS}
        config = self.first.get("ds_config", dict, {})
        scheduler = self.first.get("lr_scheduler", dict)
        kind = config.get("scheduler", {}).get("type") if isinstance(config.get("scheduler"), dict) else None
        found = {
            "client_state": client,
            "engine": {key: self.number(key) for key in ("global_steps", "global_samples", "skipped_steps")},
            "ds_config": config,
            "lr_scheduler": None if scheduler is None else {"class": kind or "", "state": scheduler},
            "loss_scaler": dict(scaler.state) if isinstance(scaler, Record) else None,
        }
        kept: dict[str, Any] = self._readable(found, "")
        return kept

    def _readable(self, value: Any, where: str) -> Any:
        """Return a value with its tensors read, and without objects that only their own code can interpret."""
        if isinstance(value, Located):
            return value.read().view(value.shape)
        if isinstance(value, dict):
            return {
                key: self._readable(each, f"{where}.{key}" if where else str(key))
                for key, each in value.items()
                if not self._foreign(each, f"{where}.{key}")
            }
        if isinstance(value, (list, tuple)):
            return type(value)(
                None if self._foreign(each, f"{where}.{at}") else self._readable(each, f"{where}.{at}")
                for at, each in enumerate(value)
            )
        return value

    def _foreign(self, value: Any, where: str) -> bool:
        if isinstance(value, Record):
            self.left_out.append(f"{where.lstrip('.')}: an object of {value.kind}, which only its own code can read")
        return isinstance(value, Record)


class ModelStates(SourceBuilder):
    """Model states of a checkpoint whose module is complete on one rank, or partitioned by ZeRO 3.

    A subclass adds the masters and calls ``weights``.

    Attributes:
        files: model state files, by (model parallel rank, data parallel rank).
        model: the parameters.
    """

    def __init__(self, folder: Path, files: OpenFiles, also: Sequence[str], pattern: re.Pattern[str] = MODEL) -> None:
        if not is_deepspeed(folder):
            raise NotACheckpointError(f"{folder}: has no file mp_rank_*_model_states.pt")
        self.files = read_files(folder, pattern, files, also)
        super().__init__(folder, self.files[min(self.files)])
        self.model = Parameters()

    def topology(self, stage: int) -> dict[str, Any]:
        """Return the topology of the job that wrote the checkpoint."""
        return {
            "world_size": self.number("dp_world_size") * max(self.number("mp_world_size"), 1),
            "zero_stage": stage,
            "weight_dtypes": sorted(set(self.model.dtypes.values())),
        }

    def aliases(self) -> dict[str, str]:
        """Return the further names of tied parameters, mapped to the stored name."""
        module = self.first.get("module", dict, {})
        return tied_names(self.first, {name: found for name, found in module.items() if isinstance(found, Located)})

    # ---------------------------------------------------------------- weights and buffers

    def weights(self, aliases: Mapping[str, str], *, whole: bool) -> None:
        """Add the weights and buffers of the module.

        Args:
            aliases: further names of tied parameters, which are skipped.
            whole: the module has complete tensors. Under ZeRO 3 it has empty tensors, and parts of frozen parameters.
        """
        buffers = self.first.buffers()
        for name, found in self.first.get("module", dict, {}).items():
            if name in aliases:
                continue
            if not isinstance(found, Located):
                self.left_out.append(f"{name}: extra state of a module, which only its own code can read")
            elif name in buffers:
                info = TensorInfo(name, "weight", found.dtype, found.shape, "buffer")
                self.add(self.first.path, SourcePart.whole(info, found))
            elif name in self.model.masters:
                self._derived(name, found, whole=whole)
            elif whole:
                self.model.shapes[name], self.model.dtypes[name] = found.shape, found.dtype
                self.add(
                    self.first.path,
                    SourcePart.whole(self.model.info(name, "weight", found.dtype), found),
                )
        if not whole:
            self._frozen()

    def _derived(self, name: str, found: Located, *, whole: bool) -> None:
        """Add a weight that is derived from its master; fragments that differ from the cast are stored."""
        self.model.dtypes[name] = found.dtype
        shape, masters = self.model.shapes[name], self.model.masters[name]
        info = TensorInfo(name, "weight", found.dtype, shape, "parameter", derived_from="master")
        self.listed.append(info)
        if not whole or not found.numel:
            return
        if found.shape != shape:
            raise FormatError(f"{self.first.path}: {name} has shape {found.shape}, its master has shape {shape}")
        master = Regions(masters[0][1].dtype, [(box, box_reader(box, located)) for box, located in masters])
        self.add(self.first.path, replace(SourcePart.whole(info, found), unless=master.read))

    def _frozen(self) -> None:
        """Add the parts of frozen parameters of all ranks under ZeRO 3."""
        world = len(self.files)
        for rank, (_, file) in enumerate(sorted(self.files.items())):
            shapes = file.get("frozen_param_shapes", dict, {})
            for name, found in file.get("frozen_param_fragments", dict, {}).items():
                shape, part = tuple(shapes.get(name, ())), require_tensor(file, found, name)
                self.model.shapes[name], self.model.dtypes[name] = shape, part.dtype
                info = self.model.info(name, "weight", part.dtype)
                lo, hi = range_of_rank(info.numel, rank, world)
                self.add_range(file, info, lo, part.flat().narrow(0, hi - lo))

    def add_range(self, file: File, info: TensorInfo, lo: int, data: Located) -> None:
        """Add the elements of a tensor from flat position ``lo`` on."""
        if lo + data.numel > info.numel:
            raise FormatError(f"{file.path}: {info.name} has {lo + data.numel:,} elements, expected {info.numel:,}")
        for box, part in flat_range_boxes(info.shape, lo, lo + data.numel, data):
            self.add(file.path, SourcePart(info, box, box_reader(box, part)))
            if info.state == "master":
                self.model.masters.setdefault(info.name, []).append((box, part))


def tied_names(first: File, tensors: Mapping[str, Located]) -> dict[str, str]:
    """Return the further names of tied parameters, mapped to the stored name.

    DeepSpeed lists them under ZeRO. Otherwise names are tied if they have the same bytes in the file.

    Args:
        first: model state file that describes the job.
        tensors: tensors of the module, by name.
    """
    aliases = {str(alias): str(name) for alias, name in first.get("shared_params", dict, {}).items()}
    seen: dict[tuple[Any, ...], str] = {}
    for name, found in tensors.items():
        if found.numel and name not in aliases:
            place = (found.path, found.begin_byte, found.shape, found.strides, found.dtype)
            if place in seen:
                aliases[name] = seen[place]
            seen.setdefault(place, name)
    return aliases


def box_reader(whole: Box, data: Located, scale: float = 1.0) -> Reading:
    """Return the function that reads boxes within ``whole`` from a tensor of its shape with the elements times ``scale``."""
    if scale == 1.0:
        return BoxOf(whole, data)
    return lambda wanted: data.read(wanted.within(whole)) / scale


def range_of_rank(numel: int, rank: int, world: int) -> tuple[int, int]:
    """Return the range of a flat tensor that a rank has under ZeRO 3. The last ranks may have less."""
    length = -(-numel // world)
    return min(rank * length, numel), min((rank + 1) * length, numel)


def flat_range_boxes(shape: Sequence[int], lo: int, hi: int, data: Located) -> Iterator[tuple[Box, Located]]:
    """Yield the boxes of the flat range ``[lo, hi)`` of a tensor, each with its elements in ``data``."""
    at = 0
    for box in split_flat_range(shape, lo, hi):
        yield box, data.narrow(at, at + box.numel).view(box.shape)
        at += box.numel


def require_tensor(file: File, value: Any, what: str) -> Located:
    """Return ``value`` if it is a tensor; raise FormatError otherwise."""
    if not isinstance(value, Located):
        raise FormatError(f"{file.path}: {what} is a {type(value).__name__}, expected a tensor")
    return value


def is_flat(value: Any) -> bool:
    """Return whether a value is a 1-D tensor."""
    return isinstance(value, Located) and len(value.shape) == 1


def as_number(value: Any) -> Any:
    """Return the number in a one-element tensor or in a member of an enumeration; other values are returned unchanged."""
    if isinstance(value, Located):
        return value.read().item() if value.numel == 1 else value
    if isinstance(value, Record):
        return value.arguments[0] if len(value.arguments) == 1 else str(value)
    return value


def group_of(values: Mapping[str, Any], parameters: Iterable[str]) -> ParameterGroup:
    """Return the hyperparameters or scalar states of parameters."""
    return encoded({key: as_number(value) for key, value in values.items()}, parameters, typed=False)
