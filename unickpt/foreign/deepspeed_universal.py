"""DeepSpeed's universal checkpoints: ``zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt`` beside model states.

What is in them: deepspeed/checkpoint/ds_to_universal.py. Of ZeRO 1 and 2 (and of tensor parallel ranks) a file holds a
dictionary whose ``param`` is the whole tensor, whatever the ranks were, without the padding of a vocabulary; of ZeRO 3 it is
the tensor alone, laid flat. ``zero/optimizer_state.pt`` has the hyperparameters. What is not trained is written there, too,
cast to fp32, tied names and buffers likewise: those are taken from the module, which has them as they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unickpt.converting import Part, Portion, Source
from unickpt.errors import FormatError, NotACheckpointError
from unickpt.foreign.deepspeed_files import MODEL, File, is_deepspeed, read_file
from unickpt.foreign.deepspeed_states import MODEL_FILE_WHOLE, States, number_in, read_files, tensor_in
from unickpt.foreign.limits import bounded
from unickpt.foreign.located import Files, Located
from unickpt.foreign.pickles import load
from unickpt.fragments import Box
from unickpt.index import TensorInfo
from unickpt.manifest import OptimizerRecord
from unickpt.reading import bytes_of

FOLDER, OPTIMIZER_FILE = "zero", "optimizer_state.pt"
MASTER, STEP = "fp32", "step"
PORTION_BYTES = 1 << 30  # of a data file, but for a single tensor

_States = dict[str, tuple[Path, Located]]  # by the name of the state


def is_universal(folder: Path) -> bool:
    """Whether it is a tag that ``ds_to_universal`` has written."""
    return (folder / FOLDER / OPTIMIZER_FILE).is_file() and is_deepspeed(folder)


@bounded
def deepspeed_universal(folder: Path, files: Files, *, also: Sequence[str] = ()) -> Source:
    """A universal checkpoint of DeepSpeed, of ZeRO 1 to 3.

    Args:
        folder: of the tag (``global_step1000_universal``).
        files: through which it is read.
        also: as of ``pickles.load``.

    Raises:
        NotACheckpointError: it is not such a folder.
        FormatError: it is damaged, a file is missing, or it holds what is not known.
    """
    return _Reader(folder, files, also).source()


class _Reader(States):
    def __init__(self, folder: Path, files: Files, also: Sequence[str]) -> None:
        if not is_universal(folder):
            raise NotACheckpointError(f"{folder}: no {FOLDER}/{OPTIMIZER_FILE} is there beside mp_rank_*_model_states.pt")
        both = read_files(folder, MODEL_FILE_WHOLE, files, also)  # a folder may have both kinds, for jobs of any stage
        super().__init__(folder, files, also, MODEL_FILE_WHOLE if both else MODEL)
        self._files, self._also = files, also
        self._optimizer = read_file(folder / FOLDER / OPTIMIZER_FILE, files, also)
        others = read_files(folder, MODEL, files, also).values() if both else ()
        for file in others:
            if file.get("global_steps", int, 0) != self.number("global_steps"):
                raise FormatError(f"{file.path}: is of step {file.get('global_steps', int, 0)}, {self.first.path.name} of step "
                                  f"{self.number('global_steps')}: files of two checkpoints are in one folder")  # fmt: skip

    def source(self) -> Source:
        groups = self._groups()
        trained = [name for group in groups for name in group]
        stored = self._stored(trained)
        aliases = self.aliases()
        states = self._parameters(groups, stored)
        optimizer = self._described(groups, states)
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
        found = number_in(self._optimizer.content.get("zero_stage", 1))
        if type(found) is not int or not 0 <= found <= 3:
            raise FormatError(f"{self._optimizer.path}: zero_stage is {found!r}")
        return found

    # ---------------------------------------------------------------- masters and states

    def _groups(self) -> list[dict[str, tuple[int, ...]]]:
        """The trained parameters of every group, of all ranks of model parallelism, with the shapes of the first of them."""
        joined: list[dict[str, tuple[int, ...]]] = []
        for file in (file for (_, data), file in sorted(self.files.items()) if data == 0):
            for at, group in enumerate(self.group_shapes(file)):
                if at == len(joined):
                    joined.append({})
                for name, shape in group.items():
                    joined[at].setdefault(name, shape)
        names = [name for group in joined for name in group]
        if not names or len(set(names)) != len(names):
            raise FormatError(f"{self.first.path}: its param_shapes do not tell which parameters were trained")
        return joined

    def _stored(self, trained: Sequence[str]) -> dict[str, Path]:
        """The folder of every trained parameter. Nothing but what lies in ``zero`` is looked at, whatever a name says."""
        there = {path.name: path for path in (self.folder / FOLDER).iterdir() if path.is_dir()}
        missing = [name for name in trained if name not in there]
        if missing:
            raise FormatError(f"{self.folder / FOLDER}: {missing[0]} is not there, nor are {len(missing) - 1} more of the "
                              f"{len(trained)} trained parameters")  # fmt: skip
        return {name: there[name] for name in trained}

    def _parameters(self, groups: Sequence[Mapping[str, tuple[int, ...]]], stored: Mapping[str, Path]) -> dict[str, _States]:
        """Where masters and states are; they become parts."""
        found: dict[str, _States] = {}
        for group in groups:
            for name, told in group.items():
                held = {
                    path.stem: (path, self._state(path, name, told))
                    for path in sorted(stored[name].glob("*.pt")) if path.stem != STEP
                }  # fmt: skip
                if MASTER not in held:
                    raise FormatError(f"{stored[name]}: {MASTER}.pt is not there")
                shape = self.model.shapes[name] = held[MASTER][1].shape
                for key, (path, data) in held.items():
                    if data.shape != shape:
                        raise FormatError(f"{path}: has shape {data.shape}, {MASTER}.pt {shape}")
                    info = self.model.info(name, "master" if key == MASTER else key, data.dtype)
                    self.add_range(File(path, {}), info, 0, data.flat())
                found[name] = held
        return found

    def _state(self, path: Path, name: str, told: tuple[int, ...]) -> Located:
        """The tensor in a file, in its own shape.

        Args:
            path: of the file.
            name: of the parameter.
            told: its shape on the first rank of model parallelism that has it.
        """
        content = load(path, self._files, also=self._also)
        if isinstance(content, Located):
            if Box.whole(told).numel != content.numel:
                raise FormatError(f"{path}: has {content.numel:,} elements, {name} has shape {told}")
            return content.view(told)
        if not isinstance(content, dict):
            raise FormatError(f"{path}: holds a {type(content).__name__}, not a tensor")
        found = tensor_in(File(path, content), content.get("param"), "param")
        if content.get("is_expert_param"):
            raise FormatError(f"{path}: of expert parallelism, which is not read yet")
        parallel = len({model for model, _ in self.files}) > 1
        if found.shape != told and (not parallel or len(found.shape) != len(told)):
            raise FormatError(f"{path}: has shape {found.shape}, where {self.first.path.name} says {told}")
        return found

    def _portions(self) -> list[Portion]:
        """The parts so far, in data files of some size; each is of the files of some parameters."""
        batches: list[list[tuple[Path, list[Part]]]] = [[]]
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
            for at, batch in enumerate(batches) if batch
        ]  # fmt: skip

    # ---------------------------------------------------------------- hyperparameters and steps

    def _described(self, groups: Sequence[Mapping[str, Any]], states: Mapping[str, _States]) -> OptimizerRecord:
        """Hyperparameters by name; steps, which are per parameter, or of ZeRO 3 per group."""
        content = self._optimizer.content
        told = self._optimizer.get("param_groups", (list, tuple))
        if not told or not all(isinstance(group, dict) for group in told):
            raise FormatError(f"{self._optimizer.path}: has no param_groups")
        names = [list(group) for group in groups]
        inner = content.get("optimizer_state_dict")
        paths = {name: held[MASTER][0].with_name(f"{STEP}.pt") for name, held in states.items()}
        if isinstance(inner, dict) and not any(path.is_file() for path in paths.values()):
            kept = inner.get("state", {})
            if not isinstance(kept, dict) or not all(isinstance(state, dict) for state in kept.values()):
                raise FormatError(f"{self._optimizer.path}: the states of its optimizer are no dictionaries")
            return self.described(
                told, [{STEP: self._step(kept.get(at, {}).get(STEP))} for at in range(len(names))], names, content
            )
        # DeepSpeed takes one group after the other, as long as both sides have one
        told = list(told[: len(names)])
        if len(told) != len(names):
            raise FormatError(f"{self._optimizer.path}: {len(told)} param_groups for {len(names)} groups of parameters")
        listed, per_parameter = [], []
        for group, members in zip(told, names, strict=True):
            for name in members:
                step = load(paths[name], self._files, also=self._also) if paths[name].is_file() else group.get(STEP)
                per_parameter.append({STEP: self._step(step)})
                listed.append([name])
        return self.described(told, per_parameter, names, {}, per_parameter=listed)

    def _step(self, value: Any) -> int | float | None:
        found = number_in(value)
        if found is not None and type(found) not in (int, float):
            raise FormatError(f"{self.folder / FOLDER}: a step is {str(found)[:80]}, not a number")
        step: int | float | None = found
        return step

    # ---------------------------------------------------------------- the module

    def _module(self, trained: set[str], aliases: Mapping[str, str]) -> None:
        """Weights that masters tell, what differs of them, those that are not trained, and buffers."""
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
        for name in sorted(trained - module.keys()):  # of pipeline stages: their weights are in files that are not kept
            master = self.model.info(name, "weight", self._low_precision())
            self.listed.append(TensorInfo(name, "weight", master.dtype, master.shape, "parameter", derived_from="master"))

    def _check_same(self, trained: set[str], aliases: Mapping[str, str]) -> None:
        """Of tensor or pipeline parallel ranks: nothing tells how a tensor that is not trained lies on them."""
        buffers = {name for file in self.files.values() for name in file.get("buffer_names", (list, tuple), ())}
        for (rank, _), file in sorted(self.files.items()):
            for name, found in file.get("module", dict, {}).items():
                if name in trained or name in aliases or not isinstance(found, Located):
                    continue
                first = self.first.get("module", dict, {}).get(name)
                same = isinstance(first, Located) and first.shape == found.shape and first.dtype == found.dtype
                if name not in buffers or not same or bytes(bytes_of(first.read())) != bytes(bytes_of(found.read())):
                    what = "is a buffer that differs" if name in buffers else "is not trained"
                    raise FormatError(
                        f"{file.path}: {name} {what} on rank {rank} of model parallelism, and nothing in a universal "
                        "checkpoint tells how it is put together; make one of a job without tensor and pipeline parallelism"
                    )

    def _check_frozen(self) -> None:
        """Of ZeRO 3: parts of all ranks are there."""
        world = self.number("dp_world_size")
        if self.first.get("frozen_param_fragments", dict) and len(self.files) != world:
            raise FormatError(f"{self.folder}: {len(self.files)} files of model states are there of {world}")

    def _low_precision(self) -> str:
        """In which the job computed, by its configuration."""
        config = self.first.get("ds_config", dict, {})
        on = [key for key in ("bf16", "bfloat16", "fp16") if isinstance(config.get(key), dict) and config[key].get("enabled")]
        return ("F16" if on[0] == "fp16" else "BF16") if on else "F32"
