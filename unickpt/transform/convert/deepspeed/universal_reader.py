"""Reader of DeepSpeed's universal checkpoints.

They have ``zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt`` beside the model state files.
Their content is defined by deepspeed/checkpoint/ds_to_universal.py. From ZeRO 1 and 2 (and from tensor parallel ranks) a file
has a dictionary whose ``param`` is the whole tensor, without padding of the vocabulary. From ZeRO 3 it has the flat tensor.
``zero/optimizer_state.pt`` has the hyperparameters. Frozen parameters, tied names and buffers are also there, cast to fp32.
This reader takes them from the module, which has the original values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unickpt.base.errors import FormatError, NotACheckpointError
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import OptimizerRecord
from unickpt.checkpoint.load.checked_read import bytes_of
from unickpt.transform.convert.deepspeed.files import MODEL, File, is_deepspeed, name_in_module, named_as_module, read_file
from unickpt.transform.convert.deepspeed.model_states import (
    SourceBuilder,
    as_number,
    box_reader,
    flat_range_boxes,
    range_of_rank,
    require_tensor,
    tied_names,
    zero_stage_of,
)
from unickpt.transform.convert.limits import bounded
from unickpt.transform.convert.pickles.lazy_tensor import Located, OpenFiles
from unickpt.transform.convert.pickles.safe_pickle import load
from unickpt.transform.convert.pipeline import Portion, Source, SourcePart
from unickpt.transform.convert.readings import Regions

MODEL_FILE_WHOLE = re.compile(r"(?P<data>(?!))?mp_rank_(?P<model>\d+)_model_states\.pt")  # ZeRO 0 to 2
FOLDER, OPTIMIZER_FILE = "zero", "optimizer_state.pt"
MASTER, STEP = "fp32", "step"
PORTION_BYTES = 1 << 30  # size of a data file, unless a single tensor is larger

_States = dict[str, tuple[Path, Located]]  # file and tensor, by state


def is_universal(folder: Path) -> bool:
    """Return whether a folder is a tag written by ``ds_to_universal``."""
    return (folder / FOLDER / OPTIMIZER_FILE).is_file() and is_deepspeed(folder)


@bounded
def deepspeed_universal(folder: Path, files: OpenFiles, *, also: Sequence[str] = ()) -> Source:
    """Open the tag folder (``global_step1000_universal``) of a universal checkpoint of ZeRO 1 to 3.

    Arguments and errors: see ``bounded``.
    """
    return _UniversalReader(folder, files, also).source()


@dataclass
class _Parameters:
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


def _read_files(folder: Path, pattern: re.Pattern[str], files: OpenFiles, also: Sequence[str]) -> dict[tuple[int, int], File]:
    """Read the files that match a pattern, by (model parallel rank, data parallel rank). Raises as ``read_file``."""
    found = {}
    for path in sorted(folder.iterdir()):
        match = pattern.fullmatch(path.name)
        if match:
            found[int(match["model"]), int(match["data"] or 0)] = read_file(path, files, also)
    return found


class _UniversalReader(SourceBuilder):
    """Builder of the source from the files of a universal checkpoint.

    Attributes:
        files: model state files, by (model parallel rank, data parallel rank).
        model: the parameters.
    """

    def __init__(self, folder: Path, files: OpenFiles, also: Sequence[str]) -> None:
        if not is_universal(folder):
            raise NotACheckpointError(f"{folder}: has no {FOLDER}/{OPTIMIZER_FILE} beside mp_rank_*_model_states.pt")
        whole = _read_files(folder, MODEL_FILE_WHOLE, files, also)  # a folder can have both kinds, for jobs of any stage
        every = _read_files(folder, MODEL, files, also)
        self.files = {at: named_as_module(file, file.get("module", dict, {})) for at, file in (whole or every).items()}
        super().__init__(folder, self.files[min(self.files)])
        self.model = _Parameters()
        self._files, self._also = files, also
        self._optimizer = read_file(folder / FOLDER / OPTIMIZER_FILE, files, also)
        for file in every.values() if whole else ():
            if file.get("global_steps", int, 0) != self.number("global_steps"):
                raise FormatError(
                    f"{file.path}: has step {file.get('global_steps', int, 0)}, {self.first.path.name} has step "
                    f"{self.number('global_steps')}: the folder has files of two checkpoints"
                )

    def source(self) -> Source:
        groups = self._groups()
        trained = [name for group in groups for name in group]
        stored = self._stored(trained)
        module = self.first.get("module", dict, {})
        aliases = tied_names(self.first, {name: found for name, found in module.items() if isinstance(found, Located)})
        states = self._parameters(groups, stored)
        optimizer = self._optimizer_record(groups, states)
        portions = self._portions()
        self._module(set(trained), aliases)
        for path, parts in sorted(self.parts.items()):
            masters = {file for part in parts if part.unless is not None for file, _ in [states[part.tensor.name][MASTER]]}
            portions.append(Portion(path.name, parts, sorted({path, *masters})))
        stage = self._stage()
        return Source(
            f"DeepSpeed universal (of ZeRO-{stage})", portions, self.writer(self.topology(stage)),
            step=self.number("global_steps"), tensors=self.listed, optimizer=optimizer, aliases=aliases,
            objects=self.objects(self._optimizer.content.get("loss_scaler")), left_out=self.left_out,
        )  # fmt: skip

    def _stage(self) -> int:
        found = zero_stage_of(self._optimizer.content.get("zero_stage", 1))
        if type(found) is not int or not 0 <= found <= 3:
            raise FormatError(f"{self._optimizer.path}: zero_stage is {found!r}")
        return found

    # ---------------------------------------------------------------- masters and states

    def _groups(self) -> list[dict[str, tuple[int, ...]]]:
        """Return the trained parameters of every group on all model parallel ranks, with the shape on the first rank."""
        joined: list[dict[str, tuple[int, ...]]] = []
        for file in (file for (_, data), file in sorted(self.files.items()) if data == 0):
            for at, group in enumerate(file.group_shapes()):
                if at == len(joined):
                    joined.append({})
                for name, shape in group.items():
                    joined[at].setdefault(name, shape)
        names = [name for group in joined for name in group]
        if not names or len(set(names)) != len(names):
            raise FormatError(
                f"{self.first.path}: param_shapes is empty or has duplicates, so the trained parameters are unknown"
            )
        return joined

    def _stored(self, trained: Sequence[str]) -> dict[str, Path]:
        """Return the folder of every trained parameter. Only folders listed in ``zero`` are used, never a path from a name."""
        module = self.first.get("module", dict, {})
        folders = {path.name: path for path in (self.folder / FOLDER).iterdir() if path.is_dir()}
        wrapped = {plain: path for name, path in folders.items() if (plain := name_in_module(name, module)) != name}
        present = folders | wrapped  # beside these, DeepSpeed's script writes the module's weights as if they were frozen
        missing = [name for name in trained if name not in present]
        if missing:
            raise FormatError(
                f"{self.folder / FOLDER}: the folders of {len(missing)} of the {len(trained)} trained parameters "
                f"are missing; the first is {missing[0]}"
            )
        return {name: present[name] for name in trained}

    def _parameters(self, groups: Sequence[Mapping[str, tuple[int, ...]]], stored: Mapping[str, Path]) -> dict[str, _States]:
        """Add masters and states as parts. Return their files by parameter."""
        found: dict[str, _States] = {}
        for group in groups:
            for name, shape_on_rank in group.items():
                held = {
                    path.stem: (path, self._state(path, name, shape_on_rank))
                    for path in sorted(stored[name].glob("*.pt"))
                    if path.stem != STEP
                }
                if MASTER not in held:
                    raise FormatError(f"{stored[name]}: {MASTER}.pt is missing")
                shape = self.model.shapes[name] = held[MASTER][1].shape
                for key, (path, data) in held.items():
                    if data.shape != shape:
                        raise FormatError(f"{path}: has shape {data.shape}, {MASTER}.pt has shape {shape}")
                    info = self.model.info(name, "master" if key == MASTER else key, data.dtype)
                    self.add_range(File(path, {}), info, 0, data.flat())
                found[name] = held
        return found

    def _state(self, path: Path, name: str, shape_on_rank: tuple[int, ...]) -> Located:
        """Return the tensor in a file with its global shape.

        Args:
            path: path of the file.
            name: name of the parameter.
            shape_on_rank: shape on the first model parallel rank that has the parameter.
        """
        content = load(path, self._files, also=self._also)
        if isinstance(content, Located):
            if Box.whole(shape_on_rank).numel != content.numel:
                raise FormatError(f"{path}: has {content.numel:,} elements, {name} has shape {shape_on_rank}")
            return content.view(shape_on_rank)
        if not isinstance(content, dict):
            raise FormatError(f"{path}: contains a {type(content).__name__}, expected a tensor")
        found = require_tensor(File(path, content), content.get("param"), "param")
        if content.get("is_expert_param"):
            raise FormatError(f"{path}: expert parallelism is not supported in universal checkpoints")
        parallel = len({model for model, _ in self.files}) > 1
        if found.shape != shape_on_rank and (not parallel or len(found.shape) != len(shape_on_rank)):
            raise FormatError(f"{path}: has shape {found.shape}, {self.first.path.name} has {shape_on_rank}")
        return found

    def _portions(self) -> list[Portion]:
        """Return the parts collected so far, grouped into data files of about ``PORTION_BYTES``."""
        batches: list[list[tuple[Path, list[SourcePart]]]] = [[]]
        size = 0
        for path, parts in self.parts.items():
            more = sum(part.size_bytes for part in parts)
            if batches[-1] and size + more > PORTION_BYTES:
                batches.append([])
                size = 0
            batches[-1].append((path, parts))
            size += more
        self.parts = {}
        return [
            Portion(f"{FOLDER}.{at:05d}", [part for _, parts in batch for part in parts], sorted(path for path, _ in batch))
            for at, batch in enumerate(batches)
            if batch
        ]

    # ---------------------------------------------------------------- hyperparameters and steps

    def _optimizer_record(self, groups: Sequence[Mapping[str, Any]], states: Mapping[str, _States]) -> OptimizerRecord:
        """Return hyperparameters by parameter, and steps, which are per parameter, or per group under ZeRO 3."""
        content = self._optimizer.content
        param_groups = self._optimizer.get("param_groups", (list, tuple))
        if not param_groups or not all(isinstance(group, dict) for group in param_groups):
            raise FormatError(f"{self._optimizer.path}: has no param_groups")
        names = [list(group) for group in groups]
        inner = content.get("optimizer_state_dict")
        paths = {name: held[MASTER][0].with_name(f"{STEP}.pt") for name, held in states.items()}
        if isinstance(inner, dict) and not any(path.is_file() for path in paths.values()):
            kept = inner.get("state", {})
            if not isinstance(kept, dict) or not all(isinstance(state, dict) for state in kept.values()):
                raise FormatError(f"{self._optimizer.path}: the states of its optimizer are not dictionaries")
            return self.optimizer_record(
                param_groups, [{STEP: self._step(kept.get(at, {}).get(STEP))} for at in range(len(names))], names, content
            )
        # DeepSpeed pairs the groups by position up to the shorter list
        param_groups = list(param_groups[: len(names)])
        if len(param_groups) != len(names):
            raise FormatError(f"{self._optimizer.path}: has {len(param_groups)} param_groups, expected {len(names)}")
        listed, per_parameter = [], []
        for group, members in zip(param_groups, names, strict=True):
            for name in members:
                step = load(paths[name], self._files, also=self._also) if paths[name].is_file() else group.get(STEP)
                per_parameter.append({STEP: self._step(step)})
                listed.append([name])
        return self.optimizer_record(param_groups, per_parameter, names, {}, per_parameter=listed)

    def _step(self, value: Any) -> int | float | None:
        found = as_number(value)
        if found is not None and type(found) not in (int, float):
            raise FormatError(f"{self.folder / FOLDER}: a step is {str(found)[:80]}, expected a number")
        step: int | float | None = found
        return step

    # ---------------------------------------------------------------- the module

    def _module(self, trained: set[str], aliases: Mapping[str, str]) -> None:
        """Add derived weights, fragments that differ from the cast of their masters, frozen parameters, and buffers."""
        module = self.first.get("module", dict, {})
        several = len({model for model, _ in self.files}) > 1
        if several:
            self._check_same(trained, aliases)
        empty = [
            name for name in trained if isinstance(at := module.get(name), Located) and at.shape != self.model.shapes[name]
        ]
        whole = not several and (not empty or any(module[name].numel for name in empty))
        if not whole:
            self._check_frozen()
        self.weights(aliases, whole=whole)
        for name in sorted(trained - module.keys()):  # pipeline stages: ds_to_universal drops their weight files
            master = self.model.info(name, "weight", self._low_precision())
            self.listed.append(TensorInfo(name, "weight", master.dtype, master.shape, "parameter", derived_from="master"))

    def _check_same(self, trained: set[str], aliases: Mapping[str, str]) -> None:
        """Check that model parallel ranks have equal buffers and nothing frozen: their division is unknown."""
        buffers = {name for file in self.files.values() for name in file.buffers()}
        for (rank, _), file in sorted(self.files.items()):
            for name, found in file.get("module", dict, {}).items():
                if name in trained or name in aliases or not isinstance(found, Located):
                    continue
                first = self.first.get("module", dict, {}).get(name)
                same = isinstance(first, Located) and first.shape == found.shape and first.dtype == found.dtype
                if name not in buffers or not same or bytes(bytes_of(first.read())) != bytes(bytes_of(found.read())):
                    what = "is a buffer that differs" if name in buffers else "is not trained"
                    raise FormatError(
                        f"{file.path}: {name} {what} on model parallel rank {rank}, and a universal checkpoint does not "
                        "contain how it is divided; write one from a job without tensor and pipeline parallelism"
                    )

    def _check_frozen(self) -> None:
        """Check that frozen parameters under ZeRO 3 have the parts of all ranks."""
        world = self.number("dp_world_size")
        if self.first.get("frozen_param_fragments", dict) and len(self.files) != world:
            raise FormatError(f"{self.folder}: has {len(self.files)} model state files, expected {world}")

    def _low_precision(self) -> str:
        """Return the dtype of the weights by the configuration of the job."""
        config = self.first.get("ds_config", dict, {})
        on = [key for key in ("bf16", "bfloat16", "fp16") if isinstance(config.get(key), dict) and config[key].get("enabled")]
        return ("F16" if on[0] == "fp16" else "BF16") if on else "F32"

    def topology(self, stage: int) -> dict[str, Any]:
        """Return the topology of the job that wrote the checkpoint."""
        return {
            "world_size": self.number("dp_world_size") * max(self.number("mp_world_size"), 1),
            "zero_stage": stage,
            "weight_dtypes": sorted(set(self.model.dtypes.values())),
        }

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
