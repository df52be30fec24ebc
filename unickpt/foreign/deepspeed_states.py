"""What all checkpoints of DeepSpeed share, whatever form their masters have: the files of model states.

What is in them: deepspeed/runtime/engine.py (``_common_checkpoint_state``): the module's weights and buffers, names of tied
parameters, shapes of the trained ones, parts of the frozen ones under ZeRO 3, counters, scheduler and the caller's state.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unickpt import __version__, objects
from unickpt.converting import Part, Reading, Regions
from unickpt.errors import FormatError, NotACheckpointError
from unickpt.foreign.deepspeed_files import MODEL, File, is_deepspeed, read_file
from unickpt.foreign.huggingface import configuration
from unickpt.foreign.located import Files, Located
from unickpt.foreign.pickles import Record
from unickpt.fragments import Box, split_flat_range
from unickpt.index import TensorInfo
from unickpt.language.facts import Model
from unickpt.manifest import OptimizerRecord, ParameterGroup, Writer
from unickpt.translated import HUGGINGFACE

MODEL_FILE_WHOLE = re.compile(r"(?P<data>(?!))?mp_rank_(?P<model>\d+)_model_states\.pt")  # of ZeRO 0 to 2
# As in ds_unickpt/capture.py: switches of the implementation, and DeepSpeed's own bookkeeping.
_NOT_HYPERPARAMETERS = frozenset(
    {"params", "foreach", "fused", "capturable", "differentiable", "name", "moe", "step", "_ds_source_param_group_id"}
)
# What DeepSpeed itself puts beside the caller's state (``_common_checkpoint_state``).
OWN_KEYS = frozenset(
    {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
     "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps", "global_steps",
     "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version",
     "universal_checkpoint_info", "num_experts", "ds_autoep_layers", "autoep_layers"}
)  # fmt: skip
_OPTIMIZERS = (({"exp_avg", "exp_avg_sq"}, "AdamW"), ({"exp_avg"}, "Lion"), ({"momentum_buffer"}, "SGD"), ({"sum"}, "Adagrad"))


@dataclass
class Parameters:
    """What the parameters are, of all files together.

    Attributes:
        shapes: of all.
        dtypes: of their weights.
        masters: where they are, in boxes.
    """

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    masters: dict[str, list[tuple[Box, Located]]] = field(default_factory=dict)

    def info(self, name: str, state: str, dtype: str) -> TensorInfo:
        """A tensor of one of them."""
        kind = "parameter" if state in ("weight", "master") else "optimizer"
        return TensorInfo(name, state, dtype, self.shapes[name], kind)


def read_files(folder: Path, pattern: re.Pattern[str], files: Files, also: Sequence[str]) -> dict[tuple[int, int], File]:
    """Files of a name by (rank of model parallelism, rank of data parallelism). Raises as ``read_file``."""
    found = {}
    for path in sorted(folder.iterdir()):
        match = pattern.fullmatch(path.name)
        if match:
            found[int(match["model"]), int(match["data"] or 0)] = read_file(path, files, also)
    return found


class Described:
    """What is told of a checkpoint, and what it is to become.

    Attributes:
        folder: of the checkpoint.
        first: the file that describes the job.
        parts: of the checkpoint to be, by the file that they are in.
        listed: tensors that have no parts.
        left_out: what is not taken, and why.
    """

    def __init__(self, folder: Path, first: File) -> None:
        self.folder, self.first = folder, first
        self.parts: dict[Path, list[Part]] = {}
        self.listed: list[TensorInfo] = []
        self.left_out: list[str] = []

    def number(self, key: str) -> int:
        """One of DeepSpeed's counters; 0 if it is not there."""
        found: int = self.first.get(key, int, 0)
        return found

    def writer(self, topology: Mapping[str, Any], dialect: str = HUGGINGFACE, model: Model | None = None) -> Writer:
        """Who wrote it, of what shape; in which dialect, and what it tells of its model beyond a configuration beside it."""
        config = configuration(self.folder) or configuration(self.folder.parent)
        version = self.first.get("ds_version", str, "")
        told = Model.of_config(config).with_more(model or Model(), str(self.folder)).as_json()
        return Writer("deepspeed", version, __version__, torch.__version__, dialect, dict(topology), told)

    def add(self, path: Path, part: Part) -> None:
        """A part that is in a file."""
        if part.box.numel:
            self.parts.setdefault(path, []).append(part)
        else:
            self.listed.append(part.tensor)

    def described(
        self, groups: Sequence[Mapping[str, Any]], scalars: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]],
        states: Mapping[str, Any], per_parameter: Sequence[Sequence[str]] | None = None,
    ) -> OptimizerRecord:  # fmt: skip
        """Hyperparameters and steps by name. Of ZeRO 3 a group of the optimizer has several flat groups."""
        if per_parameter is None and len(groups) != len(names):
            owners = [at for at, group in enumerate(groups) for _ in group.get("params", ())]
            if len(owners) != len(names):
                raise FormatError(f"{self.folder}: {len(groups)} groups of parameters for {len(names)} flat ones")
        else:
            owners = list(range(len(groups)))
        joined: list[list[str]] = [[] for _ in groups]
        for owner, listed in zip(owners, names, strict=True):
            joined[owner] += listed
        described = tuple(
            ParameterGroup(encoded({k: v for k, v in group.items() if k not in _NOT_HYPERPARAMETERS}), tuple(listed))
            for group, listed in zip(groups, joined, strict=True)
        )
        merged: dict[str, tuple[dict[str, Any], list[str]]] = {}
        steps = [groups[owner].get("step", states.get("base_optimizer_state_step")) for owner in owners]
        for at, listed in enumerate(per_parameter or names):
            values = {key: value for key, value in scalars[at].items() if value is not None}
            step = steps[at] if per_parameter is None else None
            plain = encoded({"step": step} | values if step is not None else values)
            merged.setdefault(repr(sorted(plain.items())), (plain, []))[1].extend(listed)
        return OptimizerRecord(
            self._optimizer_name(), described,
            tuple(ParameterGroup(values, tuple(listed)) for values, listed in merged.values() if values),
        )  # fmt: skip

    def _optimizer_name(self) -> str:
        config = self.first.get("ds_config", dict, {}).get("optimizer")
        if isinstance(config, dict) and isinstance(config.get("type"), str):
            return str(config["type"])
        held = {part.tensor.state for parts in self.parts.values() for part in parts if part.tensor.kind == "optimizer"}
        return next((name for states, name in _OPTIMIZERS if states <= held), "unknown")

    def objects(self, scaler: Any) -> dict[str, Any]:
        """What is no tensor: the caller's state, counters, configuration, scheduler, and the scaler of losses (a record)."""
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
        """The same with tensors that are read, and without what only its own code can read."""
        if isinstance(value, Located):
            return value.read().view(value.shape)
        if isinstance(value, dict):
            return {
                key: self._readable(each, f"{where}.{key}" if where else str(key))
                for key, each in value.items() if not self._foreign(each, f"{where}.{key}")
            }  # fmt: skip
        if isinstance(value, (list, tuple)):
            return type(value)(
                None if self._foreign(each, f"{where}.{at}") else self._readable(each, f"{where}.{at}")
                for at, each in enumerate(value)
            )
        return value

    def _foreign(self, value: Any, where: str) -> bool:
        if isinstance(value, Record):
            self.left_out.append(f"{where.lstrip('.')}: an object of {value.kind}, which is for its own code")
        return isinstance(value, Record)


class States(Described):
    """Whole model states of one rank, or of the ranks of ZeRO 3; whoever knows the masters extends it.

    Attributes:
        files: of model states, by (rank of model parallelism, rank of data parallelism).
        model: what the parameters are.
    """

    def __init__(self, folder: Path, files: Files, also: Sequence[str], pattern: re.Pattern[str] = MODEL) -> None:
        if not is_deepspeed(folder):
            raise NotACheckpointError(f"{folder}: no mp_rank_*_model_states.pt is there")
        self.files = read_files(folder, pattern, files, also)
        super().__init__(folder, self.files[min(self.files)])
        self.model = Parameters()

    def topology(self, stage: int) -> dict[str, Any]:
        """Of the job that wrote it."""
        return {
            "world_size": self.number("dp_world_size") * max(self.number("mp_world_size"), 1),
            "zero_stage": stage,
            "weight_dtypes": sorted(set(self.model.dtypes.values())),
        }

    def aliases(self) -> dict[str, str]:
        """Further names of tied parameters."""
        told = self.first.get("shared_params", dict, {})
        aliases = {str(alias): str(name) for alias, name in told.items()}
        seen: dict[tuple[Any, ...], str] = {}
        for name, found in self.first.get("module", dict, {}).items():  # without ZeRO, nothing tells but where they lie
            if isinstance(found, Located) and found.numel and name not in aliases:
                place = (found.path, found.begin_byte, found.shape, found.strides, found.dtype)
                if place in seen:
                    aliases[name] = seen[place]
                seen.setdefault(place, name)
        return aliases

    # ---------------------------------------------------------------- weights and buffers

    def weights(self, aliases: Mapping[str, str], *, whole: bool) -> None:
        """The module's weights and buffers.

        Args:
            aliases: further names, which are left out.
            whole: the module has whole tensors; of ZeRO 3 it has empty ones, and parts of those that are not trained.
        """
        buffers = set(self.first.get("buffer_names", (list, tuple), ()))
        for name, found in self.first.get("module", dict, {}).items():
            if name in aliases:
                continue
            if not isinstance(found, Located):
                self.left_out.append(f"{name}: extra state of a module, which is for its own code")
            elif name in buffers:
                info = TensorInfo(name, "weight", found.dtype, found.shape, "buffer")
                self.add(self.first.path, Part(info, Box.whole(found.shape), found.read))
            elif name in self.model.masters:
                self._derived(name, found, whole=whole)
            elif whole:
                self.model.shapes[name], self.model.dtypes[name] = found.shape, found.dtype
                self.add(
                    self.first.path, Part(self.model.info(name, "weight", found.dtype), Box.whole(found.shape), found.read)
                )
        if not whole:
            self._frozen()

    def _derived(self, name: str, found: Located, *, whole: bool) -> None:
        """A weight that its master tells; what differs of it is stored."""
        self.model.dtypes[name] = found.dtype
        shape, masters = self.model.shapes[name], self.model.masters[name]
        info = TensorInfo(name, "weight", found.dtype, shape, "parameter", derived_from="master")
        self.listed.append(info)
        if not whole or not found.numel:
            return
        if found.shape != shape:
            raise FormatError(f"{self.first.path}: {name} has shape {found.shape}, its master {shape}")
        master = Regions(masters[0][1].dtype, [(box, reader(box, located)) for box, located in masters])
        self.add(self.first.path, Part(info, Box.whole(shape), found.read, unless=master.read))

    def _frozen(self) -> None:
        """Of ZeRO 3: every rank's part of the parameters that are not trained."""
        world = len(self.files)
        for rank, (_, file) in enumerate(sorted(self.files.items())):
            shapes = file.get("frozen_param_shapes", dict, {})
            for name, found in file.get("frozen_param_fragments", dict, {}).items():
                shape, part = tuple(shapes.get(name, ())), tensor_in(file, found, name)
                self.model.shapes[name], self.model.dtypes[name] = shape, part.dtype
                self.add_flat(file, self.model.info(name, "weight", part.dtype), part.flat(), rank, world)

    def add_flat(self, file: File, info: TensorInfo, data: Located, rank: int, world: int) -> int:
        """A rank's part of a tensor under ZeRO 3, from the beginning of some elements. Returns how many are its."""
        length = -(-info.numel // world)
        lo, hi = min(rank * length, info.numel), min((rank + 1) * length, info.numel)
        for box, part in boxes(info.shape, lo, hi, data.narrow(0, hi - lo)):
            self.add(file.path, Part(info, box, reader(box, part)))
            if info.state == "master":
                self.model.masters.setdefault(info.name, []).append((box, part))
        return length

    def add_range(self, file: File, info: TensorInfo, lo: int, data: Located) -> None:
        """Elements of a tensor from the ``lo``-th on."""
        if lo + data.numel > info.numel:
            raise FormatError(f"{file.path}: {info.name} has {info.numel:,} elements, and {lo + data.numel:,} are there")
        for box, part in boxes(info.shape, lo, lo + data.numel, data):
            self.add(file.path, Part(info, box, reader(box, part)))
            if info.state == "master":
                self.model.masters.setdefault(info.name, []).append((box, part))

    def group_shapes(self, file: File | None = None) -> list[dict[str, tuple[int, ...]]]:
        """The parameters of every group, in the order in which they lie there, as a file (the first if not given) has it."""
        told = (file or self.first).get("param_shapes", (list, tuple), ())
        return [{str(name): tuple(shape) for name, shape in group.items()} for group in told]


def reader(whole: Box, data: Located, scale: float = 1.0) -> Reading:
    """How boxes within a box are read, of a tensor that has its shape and holds its elements times ``scale``."""
    if scale == 1.0:
        return lambda wanted: data.read(wanted.within(whole))
    return lambda wanted: data.read(wanted.within(whole)) / scale


def boxes(shape: Sequence[int], lo: int, hi: int, data: Located) -> Iterator[tuple[Box, Located]]:
    """A flat range of a tensor as boxes, each with where its elements lie."""
    at = 0
    for box in split_flat_range(shape, lo, hi):
        yield box, data.narrow(at, at + box.numel).view(box.shape)
        at += box.numel


def tensor_in(file: File, value: Any, what: str) -> Located:
    """What has to be a tensor. Raises FormatError if it is none."""
    if not isinstance(value, Located):
        raise FormatError(f"{file.path}: {what} is {type(value).__name__}, not a tensor")
    return value


def is_flat(value: Any) -> bool:
    """Whether it is a tensor of one dimension."""
    return isinstance(value, Located) and len(value.shape) == 1


def number_in(value: Any) -> Any:
    """A number: of a tensor, of an enumeration."""
    if isinstance(value, Located):
        return value.read().item() if value.numel == 1 else value
    if isinstance(value, Record):
        return value.arguments[0] if len(value.arguments) == 1 else str(value)
    return value


def encoded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters or scalars as a manifest has them."""
    found: dict[str, Any] = objects.encode({key: number_in(value) for key, value in values.items()}, prefix="optimizer").value
    return found
