"""Trainer's checkpoints in the memory of the hosts: saves. ``trainer_resume`` brings them back.

One tier serves the whole ``output_dir``. Trainer first writes its own files into a private folder. They become an object of
each rank in the data files of the generation, so they are copied to other hosts and checked like the state of the engine.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from ds_unickpt.checkpoint_engine import TrainerSave, UnickptCheckpointEngine, ours_of
from ds_unickpt.framework import internals
from ds_unickpt.loops import trainer_folders
from ds_unickpt.saving import committed
from ds_unickpt.saving.save_checkpoint import request_of
from unickpt.base.errors import CoordinationError, FormatError, SaveFailedError
from unickpt.base.logs import logger
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.folders import TRAINER_STATE
from unickpt.checkpoint.memory.tier import MemoryTurn
from unickpt.checkpoint.storage.base import split
from unickpt.checkpoint.storage.posix import PosixStorage

FILES = "trainer_files"  # key in the objects of a rank
_OWN = ("_save_checkpoint", "save_model", "_save", "_get_output_dir", "_save_optimizer_and_scheduler", "_save_rng_state")
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")  # of ``save_pretrained``, without the index of shards

Files = dict[str, bytes]  # content by name relative to the ``checkpoint-N`` folder


def save_checkpoint(native: Callable[[], Any], trainer: Any, trial: Any) -> Any:
    """Replace ``Trainer._save_checkpoint``. Every rank calls this. ``trial``: of a hyperparameter search, or None."""
    ours = ours_of(getattr(trainer, "model_wrapped", None))
    if ours is None or not ours.memory.enabled or ours.unsupported:
        return native()
    run, reason = os.path.abspath(trainer.args.output_dir), not_in_memory(trainer, trial)
    if reason:
        ours.warn_once(f"saves go to disk although memory.to_disk_every is set: {reason}")
        return _on_disk(native, ours, run)
    try:
        turn = ours.memory.turn(run, ours.exchange, never=ours.exchange.rank == 0 and _belongs_on_disk(trainer, run))
        if turn is not None and _in_memory(native, ours, turn, trainer, run):
            return None
    except CoordinationError as err:
        logger.error("unickpt: checkpoint-%s is not saved in memory: %s", trainer.state.global_step, err)
    return _on_disk(native, ours, run)


def not_in_memory(trainer: Any, trial: Any) -> str:
    """Return why checkpoints of a Trainer have to be on disk; '' if they may be in memory. Equal on all ranks."""
    args = trainer.args
    used = [name for name in ("save_only_model", "push_to_hub", "save_on_each_node", "enable_jit_checkpoint",
                              "load_best_model_at_end") if getattr(args, name, False)]  # fmt: skip
    if used:
        return f"Trainer uses {used[0]}"
    if args.metric_for_best_model is not None or getattr(trainer.state, "best_global_step", None):
        return "Trainer keeps the folder of the best checkpoint (metric_for_best_model)"
    if trial is not None or trainer.hp_search_backend is not None:
        return "Trainer searches for hyperparameters"
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        return "transformers has distributed the model"
    if "peft" in sys.modules and isinstance(trainer.model, sys.modules["peft"].PeftModel):
        return "Trainer saves an adapter of PEFT"
    original = sys.modules["transformers.trainer"].Trainer
    replaced = next((name for name in _OWN if _differs(trainer, original, name)), "")
    if replaced:
        return f"{type(trainer).__name__} has its own {replaced}"
    silent = sys.modules["transformers.trainer_callback"].TrainerCallback.on_save
    for callback in trainer.callback_handler.callbacks:
        if getattr(type(callback), "on_save", silent) is not silent:
            return f"the callback {type(callback).__name__} has an on_save, which may expect the folder of the checkpoint"
    return ""


def _differs(trainer: Any, original: type, name: str) -> bool:
    first = next(kind for kind in type(trainer).__mro__ if name in vars(kind))
    return first is not original or name in vars(trainer)


def _belongs_on_disk(trainer: Any, run: str) -> bool:
    """Whether this checkpoint has to be on disk: it is the last one, or no other checkpoint of the run is on disk."""
    if trainer.state.global_step >= trainer.state.max_steps:
        return True
    try:
        return not any(map(trainer_folders.is_usable, trainer_folders.folders(run)))
    except Exception:  # the other ranks wait for the answer
        return True


def _on_disk(native: Callable[[], Any], ours: UnickptCheckpointEngine, run: str) -> Any:
    ours.trainer = TrainerSave(run)
    try:
        return native()
    finally:
        ours.trainer = None


def _in_memory(native: Callable[[], Any], ours: UnickptCheckpointEngine, turn: MemoryTurn, trainer: Any, run: str) -> bool:
    """Save into memory. Returns whether the save has begun; if not, the checkpoint has to go to disk.

    Raises:
        CoordinationError: a rank did not arrive in time.
    """
    engine, step = trainer.model_wrapped, int(trainer.state.global_step)
    arguments: Mapping[str, Any] = {}
    files: Files = {}
    failed: Exception | None = None
    try:
        arguments, files = _collected(native, ours, trainer, run)
    except Exception as err:  # this rank takes part in the save, so that the others learn of it
        failed = err
    request = request_of(
        ours, engine, os.path.join(run, f"checkpoint-{step}"), f"global_step{engine.global_steps}",
        exclude_frozen=bool(arguments.get("exclude_frozen_parameters")), rank_objects={FILES: encoded(files)}, tier=run,
    )  # fmt: skip
    request.failed, request.on_commit = failed, _committed
    save = turn.save(request)
    internals.gather_persistent(engine)
    return save.agreed


def _collected(
    native: Callable[[], Any], ours: UnickptCheckpointEngine, trainer: Any, run: str
) -> tuple[Mapping[str, Any], Files]:
    """Let Trainer write its own files, and return them with the arguments of its call to the engine, which saves later.

    Raises:
        SaveFailedError: Trainer did not call the engine once.
        Exception: of Trainer.
    """
    with tempfile.TemporaryDirectory(prefix="unickpt-trainer-") as private, _redirected(trainer, private):
        ours.trainer = made = TrainerSave(run, collects=True)
        try:
            native()
        finally:
            ours.trainer = None
        if len(made.calls) != 1:
            raise SaveFailedError(f"Trainer called save_checkpoint of the engine {len(made.calls)} times, expected once")
        return made.calls[0], read_files(Path(private) / f"checkpoint-{trainer.state.global_step}")


@contextlib.contextmanager
def _redirected(trainer: Any, private: str) -> Iterator[None]:
    """Make a Trainer write to a private folder, without the weights, which the engine saves."""

    def save_model(output_dir: str | None = None, _internal_call: bool = False) -> None:
        trainer._save(output_dir, state_dict={})  # as Trainer does under ZeRO-3 without a gather
        for pattern in _WEIGHTS if trainer.args.should_save else ():
            for path in glob.glob(os.path.join(glob.escape(str(output_dir)), pattern)):
                os.remove(path)

    trainer._get_output_dir, trainer.save_model = partial(_always, private), save_model
    try:
        yield
    finally:
        del trainer._get_output_dir, trainer.save_model


def _always(folder: str, trial: Any = None) -> str:  # noqa: ARG001
    return folder


def read_files(folder: Path) -> Files:
    """Return the regular files below a folder."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def encoded(files: Files) -> dict[str, torch.Tensor | None]:
    """Return files as an object of a checkpoint: bytes as tensors, None for an empty file."""
    return {name: torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else None for name, data in files.items()}


def files_of(checkpoint: Checkpoint, rank: int) -> Files:
    """Return Trainer's files that a rank of the saving job stored. Empty if it stored none.

    Raises:
        FormatError: the object is malformed.
        UnickptError: as ``Checkpoint.read``.
    """
    found = checkpoint.rank_objects(rank).value.get(FILES, {})
    if not isinstance(found, dict):
        raise FormatError(f"{checkpoint.storage}: the files of Trainer are malformed")
    files: Files = {}
    for name, data in found.items():
        path = PurePosixPath(name)
        inside = path.parts and not path.is_absolute() and ".." not in path.parts and "\\" not in name and "\0" not in name
        if not inside or not (
            data is None or (isinstance(data, torch.Tensor) and data.dtype is torch.uint8 and data.ndim == 1)
        ):
            raise FormatError(f"{checkpoint.storage}: {name[:80]!r} is no file of Trainer")
        files[name] = b"" if data is None else data.numpy().tobytes()
    return files


def write_files(folder: Path, files: Files) -> None:
    """Write files below a folder, ``trainer_state.json`` last: without it a folder is incomplete.

    Raises:
        StorageError: they cannot be written.
    """
    storage = PosixStorage(folder)
    for name in sorted(files, key=lambda name: (name == TRAINER_STATE, name)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        storage.write_atomic(name, files[name])


def _committed(directory: str) -> None:
    committed.complete(directory)
    write_back(directory)


def write_back(directory: str) -> None:
    """Complete the ``checkpoint-N`` folder of an engine's checkpoint that was written from memory. Runs on the coordinator.

    Raises:
        UnickptError: the files cannot be read or written.
    """
    checkpoint, folder = Checkpoint.open(directory), Path(split(directory)[0])
    for rank in reversed(range(int(checkpoint.manifest.writer.topology.get("world_size", 1)))):
        write_files(folder, files_of(checkpoint, rank))


def number_in(files: Files) -> int:
    """Return N of ``checkpoint-N`` from Trainer's files.

    Raises:
        FormatError: there is no valid ``trainer_state.json``.
    """
    try:
        number = json.loads(files[TRAINER_STATE])["global_step"]
    except (KeyError, ValueError, TypeError, RecursionError):
        number = None
    if type(number) is not int or number < 0:
        raise FormatError(f"{TRAINER_STATE} is missing or malformed, so Trainer did not make this checkpoint")
    return number
