"""Writer of DeepSpeed's universal checkpoints, which DeepSpeed loads with ``"checkpoint": {"load_universal": true}``.

The files are those of deepspeed/checkpoint/ds_to_universal.py, in the form that every ZeRO stage reads:

    <tag>/zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt    {"param": the whole tensor, "cat_dim": 0}
    <tag>/zero/<parameter>/step.pt                               a number, for ZeRO 1 and 2
    <tag>/zero/optimizer_state.pt                                hyperparameters, and the step for ZeRO 3
    <tag>/mp_rank_00_model_states.pt                             counters, scheduler, client state; for ZeRO 1 and 2
    <tag>/zero_pp_rank_0_mp_rank_00_model_states.pt              the same for ZeRO 3
    latest_universal                                             the tag

DeepSpeed reads them in ``load_hp_checkpoint_state_from_checkpoint_dir`` (deepspeed/runtime/base_optimizer.py, and ``_stage3``
in runtime/zero/stage3.py) and ``_load_checkpoint`` (runtime/engine.py). It casts the weights from the masters and does not read
the module, so the weights of trained parameters are not written. Frozen parameters and buffers are written for other readers.
"""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unickpt.base.errors import MismatchError
from unickpt.base.listing import some
from unickpt.checkpoint.format import objects
from unickpt.checkpoint.format.boxes import Box, cut
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import OptimizerRecord, ParameterGroup
from unickpt.checkpoint.load.checked_read import bytes_of
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.diff import BLOCK_ELEMENTS
from unickpt.checkpoint.state.optimizer_record import decoded
from unickpt.transform.convert.deepspeed.files import UNIVERSAL_LATEST
from unickpt.transform.convert.deepspeed.model_states import OWN_KEYS
from unickpt.transform.convert.deepspeed.universal_reader import FOLDER, MASTER, OPTIMIZER_FILE, STEP
from unickpt.transform.convert.exported import Exported, filled
from unickpt.transform.convert.optimizers import step_of_all
from unickpt.transform.convert.pipeline import OnBytes

MODEL_FILE, MODEL_FILE_ZERO3 = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"
DEEPSPEED_VERSION = "0.19.8"  # version of the written form
UNIVERSAL_VERSION = 0.4  # deepspeed/checkpoint/constants.py, UNIVERSAL_CHECKPOINT_VERSION_VALUE
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MASTERS = ("F32", "BF16", "F16")  # dtypes that fp32 represents exactly
_COUNTS_IN_NUMBERS = ("FusedAdam", "DeepSpeedCPUAdam")  # deepspeed/ops/adam: step is a number; in torch it is a tensor
_ALIGNMENT = 64


@dataclass(frozen=True)
class _Trained:
    """State of the optimizer.

    Attributes:
        groups: hyperparameters and parameters of each group.
        tensors: tensors of each parameter by file name. Each becomes a file.
        step: step of all parameters.
    """

    groups: Sequence[tuple[dict[str, Any], Sequence[str]]]
    tensors: Mapping[str, Mapping[str, TensorInfo]]
    step: float

    @property
    def size_bytes(self) -> int:
        return sum(info.size_bytes for held in self.tensors.values() for info in held.values())


def size_bytes(checkpoint: Checkpoint) -> int:
    """Return the size of the masters and states that ``export`` writes, in bytes. Raises MismatchError as ``export``."""
    return _trained(checkpoint).size_bytes


def export(checkpoint: Checkpoint, folder: Path, *, tag: str = "", progress: OnBytes = lambda _: None) -> Exported:
    """Write a universal checkpoint.

    One state of one parameter is in memory at a time, because a file contains it as a whole. Frozen parameters and buffers
    share one file, which is assembled on disk.

    Args:
        checkpoint: checkpoint with an optimizer, under the names of the module (``as_huggingface``).
        folder: directory for ``load_checkpoint``. The tag and the pointer file are written to it.
        tag: name of the tag; default ``global_step<step>_universal``.
        progress: called with the number of bytes written.

    Raises:
        MismatchError: the tag exists already, or the checkpoint lacks state that DeepSpeed needs: Adam's states of every
            trained parameter, and a single step.
        CorruptCheckpointError, StorageError: the checkpoint is damaged or unreadable.
        OSError: a file cannot be written.
    """
    tag = tag or f"global_step{checkpoint.manifest.step}_universal"
    if not _is_name(tag):
        raise MismatchError(f"the tag {tag!r} is not a valid folder name")
    target = folder / tag
    if target.exists():
        raise MismatchError(f"{target}: exists already; choose another folder or another --tag")
    trained, notes = _trained(checkpoint), list[str]()
    common = _common(checkpoint, trained, notes)
    with filled(target, folder / UNIVERSAL_LATEST, tag) as fresh:
        (fresh / FOLDER).mkdir()
        for name, held in trained.tensors.items():
            _write_parameter(checkpoint, fresh / FOLDER / name, held, _step(checkpoint, trained), progress)
        torch.save(_optimizer_state(checkpoint, trained, notes), fresh / FOLDER / OPTIMIZER_FILE)
        _write_models(checkpoint, fresh, common, trained)
    return Exported(target, len(trained.tensors), trained.size_bytes, notes=tuple(notes))


def _is_name(name: str) -> bool:
    return bool(name) and name not in (".", "..") and "/" not in name and "\0" not in name


# -------------------------------------------------------------------- optimizer


def _trained(checkpoint: Checkpoint) -> _Trained:
    """Return the optimizer state to write. Raises MismatchError."""
    where, record = checkpoint.storage, checkpoint.manifest.optimizer
    groups = _groups_with_steps(checkpoint, record) if record is not None else []
    if record is None or not groups:
        raise MismatchError(
            f"{where}: has no optimizer, but DeepSpeed's universal loading needs masters and states (--to hf does not)"
        )
    by_name: dict[str, list[TensorInfo]] = {}
    for info in checkpoint.index.tensors:
        by_name.setdefault(info.name, []).append(info)
    tensors: dict[str, dict[str, TensorInfo]] = {}
    for name in (name for _, names in groups for name in names):
        if not _is_name(name):
            raise MismatchError(f"{where}: the parameter {name!r} is not a valid folder name, which DeepSpeed requires")
        states = {info.state: info for info in by_name.get(name, ())}
        master = states.get("master", states.get("weight"))
        if master is None or master.dtype not in _MASTERS or (master.derived_from is not None):
            raise MismatchError(f"{where}: {name} has no master that fp32 represents exactly")
        held = {info.state: info for info in states.values() if info.kind == "optimizer"}
        for state in _MOMENTS:
            if state not in held:
                raise MismatchError(
                    f"{where}: {name} has no {state}, which ZeRO's universal loading needs: only Adam's states "
                    f"can be exported (the optimizer is {record.name})"
                )
        for info in held.values():
            if info.shape != master.shape or not _is_name(info.state) or info.state in (MASTER, STEP):
                raise MismatchError(
                    f"{where}: {info.state} of {name} has shape {list(info.shape)}; DeepSpeed's universal form needs shape "
                    f"{list(master.shape)} and a plain name"
                )
        tensors[name] = {MASTER: master, **held}
    step = step_of_all(
        record,
        tensors,
        str(where),
        needs="ZeRO's universal loading needs",
        single="ZeRO has a single step for all parameters of a flat group",
    )
    return _Trained([(decoded(group, where="optimizer"), names) for group, names in groups], tensors, step)


def _groups_with_steps(checkpoint: Checkpoint, record: OptimizerRecord) -> list[tuple[ParameterGroup, list[str]]]:
    """Return the groups, and of each the parameters that a step has used. torch gives frozen ones no state."""
    used = {name for scalars in record.scalars for name in scalars.parameters}
    used |= {info.name for info in checkpoint.index.tensors if info.kind == "optimizer"}
    groups = [(group, [name for name in group.parameters if name in used or not used]) for group in record.groups]
    return [(group, names) for group, names in groups if names]


# -------------------------------------------------------------------- files


def _step(checkpoint: Checkpoint, trained: _Trained) -> Any:
    """Return the step in the type that the optimizer uses."""
    record = checkpoint.manifest.optimizer
    if record is not None and record.name in _COUNTS_IN_NUMBERS:
        return int(trained.step)
    return torch.tensor(trained.step, dtype=torch.float32)


def _write_parameter(
    checkpoint: Checkpoint, folder: Path, held: Mapping[str, TensorInfo], step: Any, progress: OnBytes
) -> None:
    """Write the files of a parameter. DeepSpeed loads every file in its folder as a state."""
    folder.mkdir()
    torch.save(step, folder / f"{STEP}.pt")
    for state, info in held.items():
        dtype = torch.float32 if state == MASTER else torch_dtype(info.dtype)
        data = torch.empty(info.numel, dtype=dtype)
        at = 0
        for block in _blocks(checkpoint, info):
            data[at : at + block.numel()] = block
            at += block.numel()
            progress(block.numel() * block.element_size())
        torch.save({"cat_dim": 0, "param": data.view(info.shape)}, folder / f"{state}.pt")


def _blocks(checkpoint: Checkpoint, info: TensorInfo) -> Iterator[torch.Tensor]:
    """Yield all elements of a tensor in row-major order, block by block."""
    for box in cut(Box.whole(info.shape), BLOCK_ELEMENTS) if info.numel else ():
        yield checkpoint.read_box(info, box, verify="off")


def _optimizer_state(checkpoint: Checkpoint, trained: _Trained, notes: list[str]) -> dict[str, Any]:
    """Return the hyperparameters of numbered groups.

    ZeRO 1 and 2 pair the groups by position and stop at the shorter list, including the tensors of the groups. A job with more
    groups than the file would silently keep its initial state. So the file has one group per parameter. Surplus groups have the
    hyperparameters that all groups share; the others keep the values of the job. ZeRO 3 uses one group for all parameters.
    """
    first, *others = [values for values, _ in trained.groups]
    shared = {key: value for key, value in first.items() if all(key in other and other[key] == value for other in others)}
    groups = [{**values, "params": [at]} for at, (values, _) in enumerate(trained.groups)]
    rest = {**shared, "params": []}
    if others:
        differ = sorted({key for group in (first, *others) for key in group} - shared.keys())
        notes.append(
            f"{', '.join(differ)} of {len(groups)} groups differ: ZeRO-1 and 2 pair the groups by position, so the job must "
            "have them in this order; ZeRO-3 has one group for all and keeps the values of the job"
        )
    step = _step(checkpoint, trained)
    if isinstance(step, torch.Tensor):
        notes.append(
            "the step is a tensor, as optimizers of torch require: under ZeRO-3, DeepSpeed shares one tensor among all "
            "sub-groups, and each of them increments it; after such a load, run: for state in "
            "engine.optimizer.optimizer.state.values(): state['step'] = state['step'].clone()"
        )
    stage = checkpoint.manifest.writer.topology.get("zero_stage")
    return {
        "zero_stage": stage if stage in (1, 2, 3) else 1,
        "ds_version": DEEPSPEED_VERSION,
        "param_groups": groups + [rest] * (len(trained.tensors) - len(groups)),
        "optimizer_state_dict": {"state": {0: {STEP: step}}, "param_groups": [{**shared, "params": [0]}]},
    }


def _write_models(checkpoint: Checkpoint, folder: Path, common: dict[str, Any], trained: _Trained) -> None:
    """Write the model states for ZeRO 1 and 2 and for ZeRO 3. Trained parameters are empty tensors."""
    weights = {info.name: info for info in checkpoint.index.tensors if info.state == "weight" and info.kind != "object"}
    module: dict[str, torch.Tensor] = {
        name: torch.empty(0, dtype=torch_dtype(weights[name].dtype if name in weights else held[MASTER].dtype))
        for name, held in trained.tensors.items()
    }
    others = [info for name, info in weights.items() if name not in trained.tensors]
    empty = {info.name: torch.empty(0, dtype=torch_dtype(info.dtype)) for info in others if info.kind == "parameter"}
    torch.save({**common, "module": {**module, **empty}, "frozen_param_shapes": None}, folder / MODEL_FILE_ZERO3)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        kept = _on_disk(checkpoint, others, Path(scratch) / "tensors")
        frozen = {info.name: kept[info.name] for info in others if info.kind == "parameter"}
        shapes = {name: found.shape for name, found in frozen.items()}
        rest = {"frozen_param_shapes": shapes, "frozen_param_fragments": frozen}
        torch.save({**common, "module": {**module, **kept}, **rest}, folder / MODEL_FILE)


def _on_disk(checkpoint: Checkpoint, infos: Sequence[TensorInfo], path: Path) -> dict[str, torch.Tensor]:
    """Write tensors to a file and return them memory-mapped."""
    places: dict[str, int] = {}
    with path.open("wb") as file:
        for info in infos:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            places[info.name] = file.tell()
            for block in _blocks(checkpoint, info):
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


# -------------------------------------------------------------------- non-tensor state


def _common(checkpoint: Checkpoint, trained: _Trained, notes: list[str]) -> dict[str, Any]:
    """Return the state of ``_common_checkpoint_state`` in DeepSpeed's engine, without the module."""
    manifest, stored = checkpoint.manifest, checkpoint.objects()
    native = manifest.writer.framework == "deepspeed"
    saved = stored.value if native else {}
    notes += [f"left out: {line}" for line in stored.left_out]
    if not native:
        others = "(scheduler, random generators), except the step count"
        notes.append(f"left out: non-tensor state of {manifest.writer.framework} {others}")
    counters = saved.get("engine") or {"global_steps": manifest.step, "skipped_steps": 0}
    scheduler = (saved.get("lr_scheduler") or {}).get("state")
    if scheduler is None:
        notes.append(
            "the checkpoint has no state of a learning-rate scheduler: a job with one loads with load_lr_scheduler_states=False"
        )
    client = _without_opaque(saved.get("client_state") or {})
    taken = sorted(OWN_KEYS & client.keys())
    if taken:
        notes.append(f"left out: {', '.join(taken)} of the client state, because DeepSpeed uses these names itself")
    if (saved.get("loss_scaler") or {}).get("dynamic"):
        notes.append("left out: the loss scale; a job in fp16 starts with its initial scale")
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


def _note_tensors(checkpoint: Checkpoint, trained: _Trained, notes: list[str]) -> None:
    """Add notes on tensors that DeepSpeed does not load."""
    tensors = checkpoint.index.tensors
    more = sorted({state for held in trained.tensors.values() for state in held} - {MASTER, *_MOMENTS})
    if more:
        notes.append(f"{', '.join(more)}: ZeRO-3 reads only {' and '.join(_MOMENTS)}")
    untrained = sorted({info.name for info in tensors if info.kind in ("parameter", "buffer")} - trained.tensors.keys())
    if untrained:
        notes.append(
            f"not trained: {some(untrained)}. DeepSpeed's universal loading does not load them; they are under 'module' in "
            f"{MODEL_FILE}"
        )
    changed = sorted(
        info.name
        for at, info in enumerate(tensors)
        if info.name in trained.tensors and info.derived_from is not None and checkpoint.override_boxes(at)
    )
    if changed:
        notes.append(f"weights that are not the cast of their masters: {some(changed)}. DeepSpeed casts them from the masters")


def _without_opaque(value: Any) -> Any:
    """Return a value without opaque objects."""
    if isinstance(value, dict):
        return {key: _without_opaque(each) for key, each in value.items() if not isinstance(each, objects.Opaque)}
    if type(value) in (list, tuple):
        return type(value)(_without_opaque(each) for each in value if not isinstance(each, objects.Opaque))
    return value
