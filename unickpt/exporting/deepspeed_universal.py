"""A checkpoint as DeepSpeed's universal one, which its own ``"checkpoint": {"load_universal": true}`` loads.

The files are those of deepspeed/checkpoint/ds_to_universal.py, in the form that every stage of ZeRO reads:

    <tag>/zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt    {"param": the whole tensor, "cat_dim": 0}
    <tag>/zero/<parameter>/step.pt                               a number; ZeRO 1 and 2 look here
    <tag>/zero/optimizer_state.pt                                hyperparameters, and the step for ZeRO 3
    <tag>/mp_rank_00_model_states.pt                             counters, scheduler, the caller's state; for ZeRO 1 and 2
    <tag>/zero_pp_rank_0_mp_rank_00_model_states.pt              the same for ZeRO 3
    latest_universal                                             the tag

What reads them: ``load_hp_checkpoint_state_from_checkpoint_dir`` in deepspeed/runtime/base_optimizer.py, ``_stage3`` of it in
runtime/zero/stage3.py, and ``_load_checkpoint`` in runtime/engine.py. That makes weights from masters and reads nothing of the
module, so the weights of what is trained are not written; frozen parameters and buffers are, for whoever wants to load them.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unickpt import objects
from unickpt.differences import BLOCK_ELEMENTS
from unickpt.dtypes import torch_dtype
from unickpt.errors import MismatchError
from unickpt.foreign.deepspeed_states import OWN_KEYS
from unickpt.foreign.deepspeed_universal import FOLDER, MASTER, OPTIMIZER_FILE, STEP
from unickpt.fragments import Box, cut
from unickpt.index import TensorInfo
from unickpt.loading import Checkpoint
from unickpt.manifest import ParameterGroup
from unickpt.reading import bytes_of

POINTER = "latest_universal"
MODEL_FILE, MODEL_FILE_ZERO3 = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"
DEEPSPEED_VERSION = "0.19.8"  # whose form this is
UNIVERSAL_VERSION = 0.4  # deepspeed/checkpoint/constants.py, UNIVERSAL_CHECKPOINT_VERSION_VALUE
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MASTERS = ("F32", "BF16", "F16")  # what fp32 holds without loss
_COUNTS_IN_NUMBERS = ("FusedAdam", "DeepSpeedCPUAdam")  # deepspeed/ops/adam; optimizers of torch count in tensors
_ALIGNMENT = 64

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written.

    Attributes:
        tag: of it, as ``load_checkpoint`` wants it; the pointer in the folder says the same.
        parameters: that are trained.
        size_bytes: of their masters and states.
        notes: what DeepSpeed will not load, or load in another way, each a sentence.
    """

    tag: str
    parameters: int
    size_bytes: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Trained:
    """What the optimizer has.

    Attributes:
        groups: hyperparameters, and the parameters that they hold for.
        tensors: by parameter, what becomes a file each, by its name there.
        step: of all of them.
    """

    groups: Sequence[tuple[dict[str, Any], Sequence[str]]]
    tensors: Mapping[str, Mapping[str, TensorInfo]]
    step: float

    @property
    def size_bytes(self) -> int:
        return sum(info.size_bytes for held in self.tensors.values() for info in held.values())


@dataclass
class _Notes:
    lines: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        self.lines.append(line)


def size_bytes(checkpoint: Checkpoint) -> int:
    """Of the masters and states that ``export`` writes. Raises MismatchError as it does."""
    return _trained(checkpoint).size_bytes


def export(
    checkpoint: Checkpoint, folder: Path, *, tag: str = "", verify: str = "off", progress: Progress = lambda _: None
) -> Exported:
    """Write a universal checkpoint.

    One state of one parameter is in memory at a time, since a file holds it whole: the largest one is the bound. What is not
    trained lies in one file together; it is put together on the disk and read from there.

    Args:
        checkpoint: under the names of the module (``as_huggingface``), with an optimizer.
        folder: for ``load_checkpoint``; it gets the tag and the pointer.
        tag: that is made; ``global_step<step>_universal`` if not given.
        verify: as of ``huggingface.export``.
        progress: called with the bytes that were written.

    Raises:
        MismatchError: the tag is there already, or the checkpoint has not what DeepSpeed needs: Adam's states of every trained
            parameter, and one step.
        CorruptCheckpointError, StorageError: damaged or unreadable.
        OSError: it cannot be written.
    """
    tag = tag or f"global_step{checkpoint.manifest.step}_universal"
    if not _is_name(tag):
        raise MismatchError(f"{tag!r} cannot be the name of a folder")
    target, fresh = folder / tag, folder / f"{tag}.part"
    if target.exists():
        raise MismatchError(f"{target}: is there already; name another folder or another --tag")
    trained, notes = _trained(checkpoint), _Notes()
    common = _common(checkpoint, trained, notes)
    shutil.rmtree(fresh, ignore_errors=True)
    (fresh / FOLDER).mkdir(parents=True)
    try:
        for name, held in trained.tensors.items():
            _write_parameter(checkpoint, fresh / FOLDER / name, held, _step(checkpoint, trained), verify, progress)
        torch.save(_optimizer_state(checkpoint, trained, notes), fresh / FOLDER / OPTIMIZER_FILE)
        _write_models(checkpoint, fresh, common, trained, verify)
        fresh.rename(target)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    pointer = folder / f"{POINTER}.part"
    pointer.write_text(tag)
    pointer.replace(folder / POINTER)
    return Exported(tag, len(trained.tensors), trained.size_bytes, tuple(notes.lines))


def _is_name(name: str) -> bool:
    return bool(name) and name not in (".", "..") and "/" not in name and "\0" not in name


# -------------------------------------------------------------------- what there is


def _trained(checkpoint: Checkpoint) -> _Trained:
    """What is to be written. Raises MismatchError."""
    where, record = checkpoint.storage, checkpoint.manifest.optimizer
    groups = [group for group in record.groups if group.parameters] if record is not None else []
    if record is None or not groups:
        raise MismatchError(
            f"{where}: has no optimizer; DeepSpeed's universal loading wants masters and states (--to hf does not)"
        )
    by_name: dict[str, list[TensorInfo]] = {}
    for info in checkpoint.index.tensors:
        by_name.setdefault(info.name, []).append(info)
    tensors: dict[str, dict[str, TensorInfo]] = {}
    for name in (name for group in groups for name in group.parameters):
        if not _is_name(name):
            raise MismatchError(f"{where}: {name!r} cannot be the name of a folder, which DeepSpeed makes of a parameter")
        states = {info.state: info for info in by_name.get(name, ())}
        master = states.get("master", states.get("weight"))
        if master is None or master.dtype not in _MASTERS or (master.derived_from is not None):
            raise MismatchError(f"{where}: {name} has no master that fp32 can hold")
        held = {info.state: info for info in states.values() if info.kind == "optimizer"}
        for state in _MOMENTS:
            if state not in held:
                raise MismatchError(f"{where}: {name} has no {state}, which ZeRO's universal loading wants: only Adam's states "
                                    f"can be exported (this is {record.name})")  # fmt: skip
        for info in held.values():
            if info.shape != master.shape or not _is_name(info.state) or info.state in (MASTER, STEP):
                raise MismatchError(f"{where}: {info.state} of {name} has no place in DeepSpeed's universal form")
        tensors[name] = {MASTER: master, **held}
    return _Trained([(_decoded(group), group.parameters) for group in groups], tensors, _one_step(checkpoint, tensors))


def _decoded(group: ParameterGroup) -> dict[str, Any]:
    found: dict[str, Any] = objects.decode(group.hyperparameters, tensors={}, where="optimizer").value
    return found


def _one_step(checkpoint: Checkpoint, tensors: Mapping[str, Any]) -> float:
    """The step of all parameters: ZeRO keeps one for all that it lays flat together."""
    record = checkpoint.manifest.optimizer
    steps: dict[str, Any] = {}
    for group in record.scalars if record is not None else ():
        steps |= dict.fromkeys(group.parameters, _decoded(group).get(STEP))
    lacking = [name for name in tensors if not isinstance(steps.get(name), (int, float))]
    if lacking:
        raise MismatchError(f"{checkpoint.storage}: {lacking[0]} has no step, which ZeRO's universal loading wants")
    found = {float(steps[name]): name for name in tensors}
    if len(found) > 1:
        (a, first), (b, second) = list(found.items())[:2]
        raise MismatchError(f"{checkpoint.storage}: {first} is at step {a:g}, {second} at step {b:g}; ZeRO has one step for "
                            "all that it lays flat together, so that one of them would change")  # fmt: skip
    return next(iter(found))


# -------------------------------------------------------------------- files


def _step(checkpoint: Checkpoint, trained: _Trained) -> Any:
    """The step as the optimizer keeps it."""
    record = checkpoint.manifest.optimizer
    if record is not None and record.name in _COUNTS_IN_NUMBERS:
        return int(trained.step)
    return torch.tensor(trained.step, dtype=torch.float32)


def _write_parameter(
    checkpoint: Checkpoint, folder: Path, held: Mapping[str, TensorInfo], step: Any, verify: str, progress: Progress
) -> None:
    """Its files. DeepSpeed takes every file there for a state."""
    folder.mkdir()
    torch.save(step, folder / f"{STEP}.pt")
    for state, info in held.items():
        dtype = torch.float32 if state == MASTER else torch_dtype(info.dtype)
        data = torch.empty(info.numel, dtype=dtype)
        at = 0
        for block in _blocks(checkpoint, info, verify):
            data[at : at + block.numel()] = block
            at += block.numel()
            progress(block.numel() * block.element_size())
        torch.save({"cat_dim": 0, "param": data.view(info.shape)}, folder / f"{state}.pt")


def _blocks(checkpoint: Checkpoint, info: TensorInfo, verify: str) -> Iterator[torch.Tensor]:
    """All elements of a tensor in row-major order, some at a time."""
    for box in cut(Box.whole(info.shape), BLOCK_ELEMENTS) if info.numel else ():
        yield checkpoint.read_box(info, box, verify=verify)


def _optimizer_state(checkpoint: Checkpoint, trained: _Trained, notes: _Notes) -> dict[str, Any]:
    """Hyperparameters, by number alone.

    ZeRO 1 and 2 take group after group and stop where either side has no more, *tensors and all*: a job with more groups
    than the file would silently keep what it had. So there are as many as there can be; further ones have what is the same in
    all groups, and for the rest a job's group keeps what it has. ZeRO 3 takes the first for all: there it has the same.
    """
    first, *others = [values for values, _ in trained.groups]
    shared = {key: value for key, value in first.items() if all(key in other and other[key] == value for other in others)}
    groups = [{**values, "params": [at]} for at, (values, _) in enumerate(trained.groups)]
    rest = {**shared, "params": []}
    if others:
        differ = sorted({key for group in (first, *others) for key in group} - shared.keys())
        notes.add(f"{', '.join(differ)} of {len(groups)} groups of parameters: ZeRO-1 and 2 take them by number, so a job's "
                  "groups have to come in this order; ZeRO-3 has one for all, so there the job's own remain")  # fmt: skip
    step = _step(checkpoint, trained)
    if isinstance(step, torch.Tensor):
        notes.add("the step is a tensor, as optimizers of torch want it: under ZeRO-3, DeepSpeed gives one and the same to all "
                  "sub-groups, each of which counts on in it; after such a load, give each its own: for state in "
                  "engine.optimizer.optimizer.state.values(): state['step'] = state['step'].clone()")  # fmt: skip
    stage = checkpoint.manifest.writer.topology.get("zero_stage")
    return {
        "zero_stage": stage if stage in (1, 2, 3) else 1,
        "ds_version": DEEPSPEED_VERSION,
        "param_groups": groups + [rest] * (len(trained.tensors) - len(groups)),
        "optimizer_state_dict": {"state": {0: {STEP: step}}, "param_groups": [{**shared, "params": [0]}]},
    }


def _write_models(checkpoint: Checkpoint, folder: Path, common: dict[str, Any], trained: _Trained, verify: str) -> None:
    """Model states for either kind of stages: empty tensors for what is trained, the rest as it is."""
    weights = {info.name: info for info in checkpoint.index.tensors if info.state == "weight" and info.kind != "object"}
    module: dict[str, torch.Tensor] = {
        name: torch.empty(0, dtype=torch_dtype(weights[name].dtype if name in weights else held[MASTER].dtype))
        for name, held in trained.tensors.items()
    }
    others = [info for name, info in weights.items() if name not in trained.tensors]
    empty = {info.name: torch.empty(0, dtype=torch_dtype(info.dtype)) for info in others if info.kind == "parameter"}
    torch.save({**common, "module": {**module, **empty}, "frozen_param_shapes": None}, folder / MODEL_FILE_ZERO3)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        kept = _on_disk(checkpoint, others, Path(scratch) / "tensors", verify)
        frozen = {info.name: kept[info.name] for info in others if info.kind == "parameter"}
        shapes = {name: found.shape for name, found in frozen.items()}
        rest = {"frozen_param_shapes": shapes, "frozen_param_fragments": frozen}
        torch.save({**common, "module": {**module, **kept}, **rest}, folder / MODEL_FILE)


def _on_disk(checkpoint: Checkpoint, infos: Sequence[TensorInfo], path: Path, verify: str) -> dict[str, torch.Tensor]:
    """Tensors whose memory is a file."""
    places: dict[str, int] = {}
    with path.open("wb") as file:
        for info in infos:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            places[info.name] = file.tell()
            for block in _blocks(checkpoint, info, verify):
                file.write(bytes_of(block))
    found = {}
    for info in infos:
        dtype = torch_dtype(info.dtype)
        if info.numel:
            data = np.memmap(path, np.uint8, "c", offset=places[info.name], shape=(info.size_bytes,))
            found[info.name] = torch.from_numpy(data).view(dtype).view(info.shape)
        else:
            found[info.name] = torch.empty(info.shape, dtype=dtype)
    return found


# -------------------------------------------------------------------- what is no tensor


def _common(checkpoint: Checkpoint, trained: _Trained, notes: _Notes) -> dict[str, Any]:
    """What ``_common_checkpoint_state`` of DeepSpeed's engine has, but for the module."""
    manifest, decoded = checkpoint.manifest, checkpoint.objects()
    native = manifest.writer.framework == "deepspeed"
    saved = decoded.value if native else {}
    for line in decoded.left_out:
        notes.add(f"left out: {line}")
    if not native:
        notes.add(f"left out: state of {manifest.writer.framework} that is no tensor (scheduler, random numbers), but for the "
                  "count of steps")  # fmt: skip
    counters = saved.get("engine") or {"global_steps": manifest.step, "skipped_steps": 0}
    scheduler = (saved.get("lr_scheduler") or {}).get("state")
    if scheduler is None:
        notes.add(
            "no state of a learning rate's scheduler is there: a job that has one loads with load_lr_scheduler_states=False"
        )
    client = _without_opaque(saved.get("client_state") or {})
    taken = sorted(OWN_KEYS & client.keys())
    if taken:
        notes.add(f"left out: {', '.join(taken)} of the client state, under whose names DeepSpeed has its own")
    if (saved.get("loss_scaler") or {}).get("dynamic"):
        notes.add("left out: the scale of losses; a job in fp16 begins with its initial one")
    _note_tensors(checkpoint, trained, notes)
    return {
        **{key: value for key, value in client.items() if key not in OWN_KEYS},
        **counters,
        "buffer_names": [info.name for info in checkpoint.index.tensors if info.kind == "buffer"],
        "optimizer": None,
        "param_shapes": [
            OrderedDict((name, torch.Size(trained.tensors[name][MASTER].shape)) for name in names)
            for _, names in trained.groups
        ],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": dict(manifest.aliases),
        "lr_scheduler": _without_opaque(scheduler),
        "data_sampler": None,
        "random_ltd": None,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": _without_opaque(saved.get("ds_config") or {}),
        "ds_version": DEEPSPEED_VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": UNIVERSAL_VERSION},
    }


def _note_tensors(checkpoint: Checkpoint, trained: _Trained, notes: _Notes) -> None:
    """What DeepSpeed will not load of tensors."""
    tensors = checkpoint.index.tensors
    more = sorted({state for held in trained.tensors.values() for state in held} - {MASTER, *_MOMENTS})
    if more:
        notes.add(f"{', '.join(more)}: ZeRO-3 reads {' and '.join(_MOMENTS)} alone")
    untrained = sorted({info.name for info in tensors if info.kind in ("parameter", "buffer")} - trained.tensors.keys())
    if untrained:
        notes.add(f"not trained: {_some(untrained)}. DeepSpeed's universal loading leaves them as the job has them; they are "
                  f"under 'module' in {MODEL_FILE}")  # fmt: skip
    changed = sorted(
        info.name for at, info in enumerate(tensors)
        if info.name in trained.tensors and info.derived_from is not None and checkpoint.override_boxes(at)
    )  # fmt: skip
    if changed:
        notes.add(f"weights that are not the cast of their masters: {_some(changed)}. DeepSpeed makes them from the masters")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _without_opaque(value: Any) -> Any:
    """The same without what only its own code could read."""
    if isinstance(value, dict):
        return {key: _without_opaque(each) for key, each in value.items() if not isinstance(each, objects.Opaque)}
    if type(value) in (list, tuple):
        return type(value)(_without_opaque(each) for each in value if not isinstance(each, objects.Opaque))
    return value
