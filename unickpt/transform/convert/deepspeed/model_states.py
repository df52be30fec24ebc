"""Model state files, which native and universal checkpoints of DeepSpeed have in common.

Their content is defined by ``_common_checkpoint_state`` in deepspeed/runtime/engine.py: weights and buffers of the module,
names of tied parameters, shapes of the trained parameters, parts of the frozen ones under ZeRO 3, counters, scheduler and
client state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from unickpt import __version__
from unickpt.base.errors import FormatError
from unickpt.checkpoint.format.boxes import Box, split_flat_range
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import OptimizerRecord, ParameterGroup, Writer, merge_groups
from unickpt.checkpoint.state.optimizer_record import encoded
from unickpt.transform.convert.deepspeed.files import File
from unickpt.transform.convert.huggingface.files import configuration
from unickpt.transform.convert.optimizers import class_of_states
from unickpt.transform.convert.pickles.lazy_tensor import Located
from unickpt.transform.convert.pickles.safe_pickle import Record
from unickpt.transform.convert.pipeline import SourcePart
from unickpt.transform.convert.readings import BoxOf, Reading
from unickpt.transform.dialects.model_facts import Model
from unickpt.transform.dialects.translated_checkpoint import HUGGINGFACE

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


_STAGES = ("disabled", "optimizer_states", "gradients", "weights")  # ``ZeroStageEnum`` (runtime/zero/config.py)


def zero_stage_of(value: Any) -> Any:
    """Return the ZeRO stage of a file, -1 and 0 to 3; other values are returned as ``as_number`` does.

    Some releases of Python 3.11 store the name of the member (``pickle_callables``).
    """
    found = as_number(value)
    return _STAGES.index(found) if found in _STAGES else found


def group_of(values: Mapping[str, Any], parameters: Iterable[str]) -> ParameterGroup:
    """Return the hyperparameters or scalar states of parameters."""
    return encoded({key: as_number(value) for key, value in values.items()}, parameters, typed=False)
