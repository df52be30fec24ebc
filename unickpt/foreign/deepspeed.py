"""DeepSpeed's own checkpoints: ``mp_rank_*_model_states.pt`` and ``*zero_pp_rank_*_optim_states.pt``.

What is in them: deepspeed/runtime/engine.py (``_save_checkpoint``), zero/stage_1_and_2.py, zero/stage3.py, bf16_optimizer.py
and fp16/unfused_optimizer.py (``state_dict``). Masters and states of ZeRO 1 and 2 are flat tensors per group, in which
``param_slice_mappings`` says what lies where; of ZeRO 3 every rank holds the n-th part of each parameter, one after the other
in the order of ``param_shapes``; without ZeRO they are whole, by number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unickpt import __version__, objects
from unickpt.converting import Part, Portion, Regions, Source
from unickpt.errors import FormatError, NotACheckpointError
from unickpt.foreign.huggingface import configuration
from unickpt.foreign.located import Files, Located
from unickpt.foreign.matching import NoOrderError, matched
from unickpt.foreign.pickles import Record, load
from unickpt.fragments import Box, split_flat_range
from unickpt.index import TensorInfo
from unickpt.language.facts import Model
from unickpt.manifest import OptimizerRecord, ParameterGroup, Writer
from unickpt.translated import HUGGINGFACE

MODEL_FILE = re.compile(r"(?:zero_pp_rank_(?P<data>\d+)_)?mp_rank_(?P<model>\d+)_model_states\.pt")
OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<data>\d+)_mp_rank_(?P<model>\d+)_optim_states\.pt")
# As in ds_unickpt/capture.py: switches of the implementation, and DeepSpeed's own bookkeeping.
_NOT_HYPERPARAMETERS = frozenset(
    {"params", "foreach", "fused", "capturable", "differentiable", "name", "moe", "step", "_ds_source_param_group_id"}
)
# What DeepSpeed itself puts beside the caller's state (``_common_checkpoint_state``).
_OWN_KEYS = frozenset(
    {"module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
     "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps", "global_steps",
     "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version",
     "universal_checkpoint_info", "num_experts", "ds_autoep_layers", "autoep_layers"}
)  # fmt: skip
_OPTIMIZERS = (({"exp_avg", "exp_avg_sq"}, "AdamW"), ({"exp_avg"}, "Lion"), ({"momentum_buffer"}, "SGD"), ({"sum"}, "Adagrad"))


@dataclass(frozen=True)
class _File:
    """A file, and what is in it."""

    path: Path
    content: Mapping[str, Any]

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        found = self.content.get(key)
        if found is None:
            return default
        if not isinstance(found, kind):
            raise FormatError(f"{self.path}: {key} is {type(found).__name__}, expected {kind}")
        return found


@dataclass
class _Model:
    """What the parameters are, of all files together."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    masters: dict[str, list[tuple[Box, Located]]] = field(default_factory=dict)
    trained: list[str] = field(default_factory=list)

    def info(self, name: str, state: str, dtype: str) -> TensorInfo:
        kind = "parameter" if state in ("weight", "master") else "optimizer"
        return TensorInfo(name, state, dtype, self.shapes[name], kind)


def is_deepspeed(folder: Path) -> bool:
    """Whether it is a tag of DeepSpeed's."""
    return folder.is_dir() and any(MODEL_FILE.fullmatch(path.name) for path in folder.iterdir())


def deepspeed(folder: Path, files: Files, *, also: Sequence[str] = ()) -> Source:
    """A checkpoint that DeepSpeed has written, of ZeRO 0 to 3, fp32, bf16 or fp16.

    Args:
        folder: of the tag (``global_step1000``).
        files: through which it is read.
        also: as of ``pickles.load``.

    Raises:
        NotACheckpointError: it is not such a folder.
        FormatError: it is damaged, a file is missing, or it holds what is not known.
    """
    return _Reader(folder, files, also).source()


class _Reader:
    def __init__(self, folder: Path, files: Files, also: Sequence[str]) -> None:
        self.folder, self.left_out = folder, []  # type: Path, list[str]
        if not is_deepspeed(folder):
            raise NotACheckpointError(f"{folder}: no mp_rank_*_model_states.pt is there")
        self._models = self._read(MODEL_FILE, files, also)
        self._optimizers = self._read(OPTIMIZER_FILE, files, also)
        self.first = self._models[min(self._models)]
        self.model = _Model()
        self.parts: dict[Path, list[Part]] = {}
        self.listed: list[TensorInfo] = []

    def _read(self, pattern: re.Pattern[str], files: Files, also: Sequence[str]) -> dict[tuple[int, int], _File]:
        """Files by (rank of model parallelism, rank of data parallelism)."""
        found = {}
        for path in sorted(self.folder.iterdir()):
            match = pattern.fullmatch(path.name)
            if match:
                content = load(path, files, also=also)
                if not isinstance(content, dict):
                    raise FormatError(f"{path}: holds a {type(content).__name__}, not a dictionary")
                found[int(match["model"]), int(match["data"] or 0)] = _File(path, content)
        return found

    # ---------------------------------------------------------------- the whole

    def source(self) -> Source:
        if len({model for model, _ in self._models}) > 1:
            raise FormatError(f"{self.folder}: of tensor or pipeline parallel ranks")
        stage = self._stage()
        aliases = self._aliases()
        optimizer = self._zero() if self._optimizers else self._whole()
        self._weights(stage, aliases)
        portions = [Portion(path.name, parts, self._inputs(path, parts)) for path, parts in sorted(self.parts.items()) if parts]
        return Source(
            f"DeepSpeed ZeRO-{stage}", portions, self._writer(stage), step=self._number("global_steps"), tensors=self.listed,
            optimizer=optimizer, aliases=aliases, objects=self._objects(), left_out=self.left_out,
        )  # fmt: skip

    def _inputs(self, path: Path, parts: Sequence[Part]) -> list[Path]:
        """Of a portion: weights are compared with their masters, in whatever file those are."""
        masters = [file.path for file in self._optimizers.values()] if any(part.unless is not None for part in parts) else []
        return sorted({path, *masters})

    def _stage(self) -> int:
        if not self._optimizers:
            return 0
        stages = {int(_plain(self._states(file).get("zero_stage", 1))) for file in self._optimizers.values()}
        if len(stages) != 1:
            raise FormatError(f"{self.folder}: files of several stages of ZeRO ({sorted(stages)})")
        return stages.pop()

    def _states(self, file: _File) -> Mapping[str, Any]:
        found: Mapping[str, Any] = file.get("optimizer_state_dict", dict, {})
        return found

    def _number(self, key: str) -> int:
        found: int = self.first.get(key, int, 0)
        return found

    def _writer(self, stage: int) -> Writer:
        config = configuration(self.folder) or configuration(self.folder.parent)
        topology = {
            "world_size": self._number("dp_world_size") * max(self._number("mp_world_size"), 1),
            "zero_stage": stage,
            "weight_dtypes": sorted(set(self.model.dtypes.values())),
        }
        version = self.first.get("ds_version", str, "")
        model = Model.of_config(config).as_json()
        return Writer("deepspeed", version, __version__, torch.__version__, HUGGINGFACE, topology, model)

    def _aliases(self) -> dict[str, str]:
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

    def _add(self, path: Path, part: Part) -> None:
        if part.box.numel:
            self.parts.setdefault(path, []).append(part)
        else:
            self.listed.append(part.tensor)

    def _tensor(self, file: _File, value: Any, what: str) -> Located:
        if not isinstance(value, Located):
            raise FormatError(f"{file.path}: {what} is {type(value).__name__}, not a tensor")
        return value

    # ---------------------------------------------------------------- weights and buffers

    def _weights(self, stage: int, aliases: Mapping[str, str]) -> None:
        buffers = set(self.first.get("buffer_names", (list, tuple), ()))
        for name, found in self.first.get("module", dict, {}).items():
            if name in aliases:
                continue
            if not isinstance(found, Located):
                self.left_out.append(f"{name}: extra state of a module, which is for its own code")
            elif name in buffers:
                info = TensorInfo(name, "weight", found.dtype, found.shape, "buffer")
                self._add(self.first.path, Part(info, Box.whole(found.shape), found.read))
            elif name in self.model.masters:
                self._derived(name, found, whole=stage < 3)
            elif stage < 3:
                self.model.shapes[name], self.model.dtypes[name] = found.shape, found.dtype
                self._add(
                    self.first.path, Part(self.model.info(name, "weight", found.dtype), Box.whole(found.shape), found.read)
                )
        if stage == 3:
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
        master = Regions(masters[0][1].dtype, [(box, _reader(box, located)) for box, located in masters])
        self._add(self.first.path, Part(info, Box.whole(shape), found.read, unless=master.read))

    def _frozen(self) -> None:
        """Of ZeRO 3: every rank's part of the parameters that are not trained."""
        world = len(self._models)
        for rank, (_, file) in enumerate(sorted(self._models.items())):
            shapes = file.get("frozen_param_shapes", dict, {})
            for name, found in file.get("frozen_param_fragments", dict, {}).items():
                shape, part = tuple(shapes.get(name, ())), self._tensor(file, found, name)
                self.model.shapes[name], self.model.dtypes[name] = shape, part.dtype
                self._flat_parts(file, self.model.info(name, "weight", part.dtype), part.flat(), rank, world)

    def _flat_parts(self, file: _File, info: TensorInfo, data: Located, rank: int, world: int) -> int:
        """A rank's part of a tensor under ZeRO 3, from the beginning of some elements. Returns how many are its."""
        length = -(-info.numel // world)
        lo, hi = min(rank * length, info.numel), min((rank + 1) * length, info.numel)
        for box, part in _boxes(info.shape, lo, hi, data.narrow(0, hi - lo)):
            self._add(file.path, Part(info, box, _reader(box, part)))
            if info.state == "master":
                self.model.masters.setdefault(info.name, []).append((box, part))
        return length

    # ---------------------------------------------------------------- masters and states

    def _zero(self) -> OptimizerRecord:
        ranks = sorted(self._optimizers.items())
        missing = set(range(ranks[-1][0][1] + 1)) - {data for (_, data), _ in ranks}
        told = self._number("dp_world_size")
        if missing or (told and told != len(ranks)):
            raise FormatError(
                f"{self.folder}: {len(ranks)} files of optimizer states are there of {told or len(ranks) + len(missing)}"
            )
        described: OptimizerRecord | None = None
        done: dict[str, int] = {}
        for rank, (_, file) in enumerate(ranks):
            states = self._states(file)
            if "fp32_flat_groups" in states:
                found = self._partitioned_parameters(file, states, rank, len(ranks))
            elif "single_partition_of_fp32_groups" in states:
                found = self._partitioned_groups(file, states, done)
            else:
                raise FormatError(f"{file.path}: holds masters in a form that is not known ({', '.join(sorted(states))})")
            described = described or found
        if done:
            short = [name for name, count in done.items() if count != Box.whole(self.model.shapes[name]).numel]
            if short:
                raise FormatError(f"{self.folder}: the files hold {done[short[0]]:,} elements of {short[0]}, whose shape is "
                                  f"{self.model.shapes[short[0]]}")  # fmt: skip
        assert described is not None  # there are files
        return described

    def _group_shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """The parameters of every group, in the order in which they lie there."""
        told = self.first.get("param_shapes", (list, tuple), ())
        return [{str(name): tuple(shape) for name, shape in group.items()} for group in told]

    def _partitioned_groups(self, file: _File, states: Mapping[str, Any], done: dict[str, int]) -> OptimizerRecord:
        """ZeRO 1 and 2, and BF16_Optimizer: a rank's range of every group, as it was laid flat."""
        inner = states.get("base_optimizer_state")
        if not isinstance(inner, dict):
            raise FormatError(f"{file.path}: written with elastic_checkpoint, whose states do not tell what they are of")
        shapes = self._group_shapes()
        module = self.first.get("module", dict, {})
        names: list[list[str]] = [list(group) for group in shapes]
        flats = states["single_partition_of_fp32_groups"]
        mappings = states.get("param_slice_mappings") or []
        if len(mappings) != len(flats):
            raise FormatError(f"{file.path}: {len(flats)} groups, but param_slice_mappings of {len(mappings)}")
        scalars: list[Mapping[str, Any]] = []
        for at, (flat, mapping) in enumerate(zip(flats, mappings, strict=True)):
            held = {"master": flat, **inner.get("state", {}).get(at, {})}
            tensors = {key: each.flat() for key, each in held.items() if _is_flat(each)}
            scalars.append({key: each for key, each in held.items() if key not in tensors})
            if at >= len(names):
                names.append([])
            for name, address in mapping.items():
                if name not in self.model.shapes:
                    shape = shapes[at].get(name) if at < len(shapes) else None
                    self.model.shapes[name] = shape or self._tensor(self.first, module.get(name), name).shape
                if name not in names[at]:
                    names[at].append(name)
                start, count = int(address.state["start"]), int(address.state["numel"])
                lo = done.get(name, 0)
                done[name] = lo + count
                for key, data in tensors.items():
                    self._range(file, self.model.info(name, key, data.dtype), lo, data.narrow(start, start + count))
        for group in shapes:  # parameters of which no rank holds anything have no elements
            for name, shape in group.items():
                self.model.shapes.setdefault(name, shape)
        return self._described(inner.get("param_groups", []), scalars, names, states)

    def _range(self, file: _File, info: TensorInfo, lo: int, data: Located) -> None:
        if lo + data.numel > info.numel:
            raise FormatError(f"{file.path}: {info.name} has {info.numel:,} elements, and {lo + data.numel:,} are there")
        for box, part in _boxes(info.shape, lo, lo + data.numel, data):
            self._add(file.path, Part(info, box, _reader(box, part)))
            if info.state == "master":
                self.model.masters.setdefault(info.name, []).append((box, part))

    def _partitioned_parameters(self, file: _File, states: Mapping[str, Any], rank: int, world: int) -> OptimizerRecord:
        """ZeRO 3: the n-th part of every parameter, in groups one after the other."""
        inner = states.get("optimizer_state_dict")
        flats = [self._tensor(file, flat, "a flat group").flat() for flat in states["fp32_flat_groups"]]
        if not isinstance(inner, dict):
            raise FormatError(f"{file.path}: the states of its optimizer are not there")
        order = [(name, shape) for group in self._group_shapes() for name, shape in group.items()]
        self.model.shapes |= dict(order)
        group, at = 0, 0
        names: list[list[str]] = [[] for _ in flats]
        held = self._flat_states(file, inner, 0, flats)
        for name, shape in order:
            length = -(-Box.whole(shape).numel // world)
            while group < len(flats) and at + length > flats[group].numel and at == flats[group].numel:
                group, at = group + 1, 0
                held = self._flat_states(file, inner, group, flats)
            if group >= len(flats) or at + length > flats[group].numel:
                raise FormatError(f"{file.path}: ends within {name}: {len(flats)} flat groups, of which the last has "
                                  f"{flats[-1].numel if flats else 0:,} elements")  # fmt: skip
            for key, data in held.items():
                info = self.model.info(name, key, data.dtype)
                self._flat_parts(file, info, data.narrow(at, at + length), rank, world)
            names[group].append(name)
            at += length
        scalars = [
            {key: value for key, value in inner.get("state", {}).get(at, {}).items() if not _is_flat(value)}
            for at in range(len(flats))
        ]
        return self._described(inner.get("param_groups", []), scalars, names, states)

    def _flat_states(self, file: _File, inner: Mapping[str, Any], group: int, flats: Sequence[Located]) -> dict[str, Located]:
        if group >= len(flats):
            return {}
        held = {"master": flats[group]}
        for key, value in inner.get("state", {}).get(group, {}).items():
            if _is_flat(value):
                if value.numel != flats[group].numel:
                    raise FormatError(f"{file.path}: {key} of group {group} has {value.numel:,} elements, its masters "
                                      f"{flats[group].numel:,} (those on a disk of their own are not saved)")  # fmt: skip
                held[key] = value.flat()
        return held

    def _whole(self) -> OptimizerRecord | None:
        """Without ZeRO: the states of the optimizer by number, in one file."""
        found = self.first.get("optimizer", dict)
        if found is None:
            return None
        inner = found.get("optimizer_state_dict", found)
        states, groups = inner.get("state"), inner.get("param_groups")
        if not isinstance(states, dict) or not isinstance(groups, (list, tuple)):
            raise FormatError(f"{self.first.path}: its optimizer holds {', '.join(map(str, inner))}, not states and groups")
        low = found.get("fp32_groups")
        if low is None and "fp32_groups_flat" in found:
            raise FormatError(f"{self.first.path}: of FP16_Optimizer with fused groups, whose order nothing in the file tells")
        buffers, aliases = set(self.first.get("buffer_names", (list, tuple), ())), self._aliases()
        module = {
            name: value for name, value in self.first.get("module", dict, {}).items()
            if isinstance(value, Located) and name not in buffers and name not in aliases
        }  # fmt: skip
        wanted = []
        for at, group in enumerate(groups):
            masters = low[at] if low is not None else [None] * len(group["params"])
            wanted.append([self._shape_of(states.get(number, {}), master) for number, master in
                           zip(group["params"], masters, strict=True)])  # fmt: skip
        names = self._named(module, wanted, low)
        scalars: list[Mapping[str, Any]] = []
        listed: list[list[str]] = []
        for at, group in enumerate(groups):
            for place, number in enumerate(group["params"]):
                name = names[at][place]
                self.model.shapes[name] = module[name].shape
                held = dict(states.get(number, {}))
                held["master"] = low[at][place] if low is not None else module[name]
                tensors = {k: v for k, v in held.items() if isinstance(v, Located) and v.shape == module[name].shape and
                           (v.shape or k != "step")}  # fmt: skip
                for key, data in tensors.items():
                    info = self.model.info(name, key, data.dtype)
                    self._range(self.first, info, 0, data.flat())
                scalars.append({key: value for key, value in held.items() if key not in tensors})
                listed.append([name])
        return self._described(groups, scalars, names, {}, per_parameter=listed)

    def _shape_of(self, state: Mapping[str, Any], master: Located | None) -> tuple[int, ...]:
        if master is not None:
            return master.shape
        shapes = {value.shape for key, value in state.items() if isinstance(value, Located) and key != "step"}
        if len(shapes) != 1:
            raise FormatError(f"{self.first.path}: an optimizer whose states {sorted(state)} do not tell whose they are")
        return shapes.pop()

    def _named(
        self, module: Mapping[str, Located], wanted: Sequence[Sequence[tuple[int, ...]]], masters: Any
    ) -> list[list[str]]:
        """The names of the optimizer's parameters, which it knows by number."""
        agrees = None
        if masters is not None:

            def agrees(name: str, group: int, place: int) -> bool:
                weight, master = module[name], masters[group][place]
                return bool(torch.equal(weight.read(), master.read().to(weight.read().dtype)))

        try:
            return matched({name: found.shape for name, found in module.items()}, wanted, agrees)
        except NoOrderError as err:
            raise FormatError(
                f"{self.first.path}: without ZeRO, DeepSpeed's optimizer states have numbers for names, and {err}"
            ) from None

    # ---------------------------------------------------------------- what is no tensor

    def _described(
        self, groups: Sequence[Mapping[str, Any]], scalars: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]],
        states: Mapping[str, Any], per_parameter: Sequence[Sequence[str]] | None = None,
    ) -> OptimizerRecord:  # fmt: skip
        """Hyperparameters and steps by name. Of ZeRO 3 a group of the optimizer has several flat groups."""
        self.model.trained = [name for group in names for name in group]
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
            ParameterGroup(_encoded({k: v for k, v in group.items() if k not in _NOT_HYPERPARAMETERS}), tuple(listed))
            for group, listed in zip(groups, joined, strict=True)
        )
        merged: dict[str, tuple[dict[str, Any], list[str]]] = {}
        steps = [groups[owner].get("step", states.get("base_optimizer_state_step")) for owner in owners]
        for at, listed in enumerate(per_parameter or names):
            values = {key: value for key, value in scalars[at].items() if value is not None}
            step = steps[at] if per_parameter is None else None
            encoded = _encoded({"step": step} | values if step is not None else values)
            merged.setdefault(repr(sorted(encoded.items())), (encoded, []))[1].extend(listed)
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

    def _objects(self) -> dict[str, Any]:
        client = {key: value for key, value in self.first.content.items() if key not in _OWN_KEYS}
        config = self.first.get("ds_config", dict, {})
        scheduler = self.first.get("lr_scheduler", dict)
        kind = config.get("scheduler", {}).get("type") if isinstance(config.get("scheduler"), dict) else None
        scaler = next((self._states(file).get("loss_scaler") for file in self._optimizers.values()), None)
        found = {
            "client_state": client,
            "engine": {key: self._number(key) for key in ("global_steps", "global_samples", "skipped_steps")},
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


def _reader(box: Box, located: Located) -> Any:
    """How boxes within a box are read, of a tensor that has its shape."""
    return lambda wanted: located.read(wanted.within(box))


def _boxes(shape: Sequence[int], lo: int, hi: int, data: Located) -> Iterator[tuple[Box, Located]]:
    """A flat range of a tensor as boxes, each with where its elements lie."""
    at = 0
    for box in split_flat_range(shape, lo, hi):
        yield box, data.narrow(at, at + box.numel).view(box.shape)
        at += box.numel


def _is_flat(value: Any) -> bool:
    return isinstance(value, Located) and len(value.shape) == 1


def _plain(value: Any) -> Any:
    """A number: of a tensor, of an enumeration."""
    if isinstance(value, Located):
        return value.read().item() if value.numel == 1 else value
    if isinstance(value, Record):
        return value.arguments[0] if len(value.arguments) == 1 else str(value)
    return value


def _encoded(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = objects.encode({key: _plain(value) for key, value in values.items()}, prefix="optimizer").value
    return found
