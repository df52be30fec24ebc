"""Replaces ``dist_checkpointing.save``: saves synchronously, or in a thread while training continues.

Arguments and results are those of megatron-core's function (``dist_checkpointing/serialization.py``, 0.12 to 0.16 and the
development branch). This module does not use Megatron's global arguments.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from megatron_unickpt.dist_checkpointing import capture
from megatron_unickpt.framework import internals, marks
from megatron_unickpt.framework.errors import MegatronSaveError, as_megatron_errors
from megatron_unickpt.framework.versions import require_usable
from megatron_unickpt.held_state import optimizer_forms, sharded_tensors
from megatron_unickpt.held_state.common_state import COMMON, digests_of, readable, sendable
from megatron_unickpt.runtime import Purpose, Runtime, ScriptCall
from unickpt.base.logs import logger, make_visible
from unickpt.base.step_replay import asked
from unickpt.checkpoint.checkpoint_folder import ITERATION
from unickpt.checkpoint.coordination.message_exchange import Message
from unickpt.checkpoint.memory.tier import MemoryTurn
from unickpt.checkpoint.save.requests import PendingSave, SaveRequest
from unickpt.checkpoint.save.shards import Contribution
from unickpt.checkpoint.save.upload import tags_of
from unickpt.checkpoint.storage.base import absolute, split
from unickpt.checkpoint.storage.open import open_storage
from unickpt.diagnosis import session
from unickpt.transform.convert.megatron.keys import CONTENT_METADATA


def save(
    runtime: Runtime,
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str | Path,
    *,
    content_metadata: dict[str, Any] | None = None,
    asynchronous: bool = False,
    share: bool = True,
    validate_access_integrity: bool = True,
    preprocess_common: Callable[[Any], Any] | None = None,
    turn: MemoryTurn | None = None,
    stands_in: bool = False,
) -> Any:
    """Save a sharded state dict. All ranks call it.

    Args:
        runtime: state of the adapter.
        sharded_state_dict: as for ``dist_checkpointing.save``. Not changed.
        checkpoint_dir: path or URL of the checkpoint; created if it does not exist.
        content_metadata: stored with the checkpoint; ``load_content_metadata`` returns it.
        asynchronous: copy this rank's part to host memory and return; a thread writes it.
        share: divide weights that several data parallel ranks hold among them.
        validate_access_integrity: compare the ranks' common state, and warn where it differs. Each rank's own values are
            stored. (That shards cover every tensor exactly once is always checked.)
        preprocess_common: removes values that may differ between ranks from the comparison.
        turn: save into memory, and return after the copy.
        stands_in: the caller saves in another way if this save would fail again.

    Returns:
        None, or with ``asynchronous`` Megatron's ``AsyncRequest``.

    Raises:
        MegatronSaveError: on every rank, if any rank could not describe or write its part. Written files are removed.
        UnsupportedFrameworkError: the source of this Megatron has changed, and the self-test of the hooks failed.
    """
    runtime.saves_begun += 1
    make_visible()
    require_usable()
    directory = absolute(str(checkpoint_dir))
    save_dir, tag = split(directory)
    compared: list[Any] = []
    kept: list[_Described] = []
    owner, recorded = runtime.owner(sharded_state_dict), runtime.recorded(sharded_state_dict)
    coordinates = runtime.exchange().rank == 0
    call = runtime.call
    by_scripts = call.purpose is Purpose.SAVE  # they can save in Megatron's own format instead
    if by_scripts and tag.startswith(ITERATION):
        turn = call.memory

    def described() -> _Described:
        if not kept:
            state = optimizer_forms.to_save(sharded_state_dict, runtime.known.optimizers)
            common = sharded_tensors.common(state)
            if content_metadata is not None:
                common[CONTENT_METADATA] = {k: v for k, v in content_metadata.items() if k != "dp_cp_group"}
            compared.append(_comparable(common, preprocess_common))
            kept.append(_Described(state, common, digests_of(compared[0])))
        return kept[0]

    def announce() -> Message:
        with contextlib.suppress(Exception):  # ``contribute`` raises the same on all ranks
            return {COMMON: described().digests}
        return {}

    def early() -> None:
        described()

    def contribute(announced: Message) -> Contribution:
        found, theirs = described(), announced.get(COMMON)
        differ = [] if theirs is None else [key for key, digest in found.digests.items() if theirs.get(key) != digest]
        own = readable({key: found.common[key] for key in differ if key in found.common})
        made = capture.contribution(found.state, found.common, known=runtime.known, own=own, share=share, directory=directory)
        origin = {} if owner is None else asdict(runtime.owners.origin(owner))
        witness = recorded.passed(save_dir) if recorded is not None and coordinates else None
        return replace(made, writer=replace(made.writer, origin=origin), witness=witness)

    request = SaveRequest(
        contribute,
        save_dir=save_dir,
        tag=tag,
        announce=announce,
        early=early,
        forget=kept.clear,
        claim=None if owner is None else runtime.owners.claim(owner),
        one_writer=by_scripts,
        on_commit=partial(_scripts_commit, runtime, call) if by_scripts else marks.complete,
        on_end=partial(_ended, runtime, call.memory_folder or save_dir),
        framework_stands_in=by_scripts or stands_in,
    )
    pending = _begun(runtime, request, asynchronous=asynchronous, turn=turn)
    if not pending.pending.agreed:
        pending.conclude()
    if turn is not None and pending.pending.rank == 0:
        open_storage(directory).delete_if_empty()  # the scripts have created it
    skipped = pending.pending.result is not None and pending.pending.result.skipped  # on all ranks: nothing was described
    if validate_access_integrity and not skipped:  # a collective: all ranks reach it, or none
        internals.compare_common_state(sendable(compared[0]))
    if not asynchronous:
        if turn is None:
            pending.conclude()
        return None
    return Request(None, (), Finalizers(pending, in_memory=turn is not None))  # None: a queue starts no process for it


def _comparable(common: Any, preprocess: Callable[[Any], Any] | None) -> Any:
    """Return the common state without what may differ between ranks.

    A function that needs Megatron's form of the optimizer, as a test of Megatron has one, finds none: then all is compared, and
    values that differ are each rank's own.
    """
    if preprocess is None:
        return common
    try:
        return preprocess(common)
    except Exception as err:  # it only prepares a comparison: no reason to lose a checkpoint
        logger.debug("unickpt: the function that prepares the comparison of the common state failed (%r)", err)
        return common


@dataclass(frozen=True, slots=True)
class _Described:
    """A state dict as it is saved, its common state, and the digests of what all ranks should have alike in that."""

    state: Any
    common: Any
    digests: dict[str, str]


def refuse(runtime: Runtime, err: Exception, *, turn: MemoryTurn | None = None) -> MegatronSaveError:
    """Take part in the other ranks' save, on a rank that failed before it began one.

    Args:
        runtime: state of the adapter.
        err: why this rank failed.
        turn: the others save into memory.

    Returns:
        The error that all ranks raise.
    """
    request = SaveRequest(_nothing, save_dir="", tag="", failed=err)
    pending = _begun(runtime, request, asynchronous=False, turn=turn)
    return MegatronSaveError(f"no checkpoint is saved ({pending.pending.cause()})", framework_saves=True)


def _nothing(_: Message) -> Contribution:
    raise AssertionError("a rank that failed before the save contributes nothing")


def _begun(runtime: Runtime, request: SaveRequest, *, asynchronous: bool, turn: MemoryTurn | None) -> MegatronSave:
    with as_megatron_errors():
        if turn is not None:
            return MegatronSave(turn.save(request))
        exchange = runtime.exchange().separate("save")  # an earlier save may still be in progress
        return MegatronSave(runtime.saver().save(request, exchange, asynchronous=asynchronous))


def _scripts_commit(runtime: Runtime, call: ScriptCall, directory: str) -> None:
    """Write the mark and the tracker file of a committed checkpoint of the training scripts, also to the upload URL.

    A job that is preempted before its training loop polls the save therefore keeps the checkpoint.
    """
    marks.complete(directory)
    runtime.trackers.name(directory, call.order, replaces=call.replaces)
    if call.memory is not None:  # written at the end of the job; nothing else follows
        remove_old(runtime, directory)


def remove_old(runtime: Runtime, directory: str) -> None:
    """Remove what a checkpoint on disk has replaced. Called on the coordinator after the tracker file has named it."""
    folder, saver = split(directory)[0], runtime.saver()
    runtime.trackers.remove_replaced(folder, saver.options.retention, busy=tags_of(saver.uploads, folder))


def _ended(runtime: Runtime, memory_folder: str, save: PendingSave) -> None:
    runtime.last_save = result = save.result
    if result is not None and result.committed and save.rank == 0:
        _beside_training(partial(remove_old, runtime, save.directory), save)
    session.checkpoint_io(result.times if result is not None else ())
    if result is not None and result.complete:
        runtime.saved_to_disk(memory_folder, result.seconds)
    if result is not None and result.shortfall and save.rank == 0:
        logger.error("unickpt: %s", result.shortfall)
    elif result is not None and result.committed and save.rank == 0:
        logger.info(
            "unickpt: saved %s: %s bytes in %.2f s; training paused for %.2f s",
            save.directory, f"{result.size_bytes:,}", result.seconds, result.stall_s,
        )  # fmt: skip


def _beside_training(work: Callable[[], None], save: PendingSave) -> None:
    """Do something in the thread of the save, or in one of its own if training waits for the save."""
    if not save.background:
        with contextlib.suppress(RuntimeError):  # the interpreter is shutting down and starts no threads
            threading.Thread(target=work, name="unickpt-retention").start()
            return
    work()


class MegatronSave:
    """One save of this rank, which may still be in progress. Call ``conclude`` on every rank."""

    def __init__(self, pending: PendingSave) -> None:
        self.pending = pending

    @property
    def done(self) -> bool:
        return self.pending.done

    @property
    def committed(self) -> bool:
        return self.pending.committed

    def wait(self) -> None:
        self.pending.wait()

    def conclude(self) -> None:
        """Wait for the end of the save.

        Raises:
            MegatronSaveError: no checkpoint was written.
        """
        self.wait()
        if not self.committed and asked() is None:  # a job that repeats a step has saved nothing, and said so
            result = self.pending.result
            failed = MegatronSaveError(
                f"Gave up saving {self.pending.directory} ({self.pending.cause()}). "
                "No checkpoint was written; earlier checkpoints are intact.",
                directory=self.pending.directory,
                framework_saves=result is not None and result.framework_saves,
            )
            failed.failures = () if result is None else result.failures
            raise failed


class Request(AsyncRequest):  # type: ignore[misc]
    """Megatron's request, with the method that the queue of NVIDIA's resiliency extension calls in place of the functions."""

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:  # noqa: ARG002 - the signature is theirs
        """Call the finalize functions, and return the index of the call. The queue has found all ranks to be done."""
        for function in self.finalize_fns:
            function()
        return int(self.call_idx)


class Finalizers(list[Callable[[], Any]]):
    """The finalize functions of an ``AsyncRequest`` whose save runs in a thread of this process.

    The first one waits for the thread, so the queue of any package can have the request. Those added later run only if the
    checkpoint was committed. A save into memory has none: they would name a checkpoint on disk, and delete older ones.

    Attributes:
        pending: the save.
        in_memory: whether the checkpoint goes into memory.
    """

    def __init__(self, pending: MegatronSave, *, in_memory: bool) -> None:
        super().__init__([] if in_memory else [self._conclude])
        self.pending, self.in_memory = pending, in_memory

    def _conclude(self) -> None:
        try:
            self.pending.conclude()
        except MegatronSaveError as err:
            if self.pending.pending.rank == 0:
                logger.error("unickpt: %s Training continues; the next save is synchronous.", err)

    def append(self, function: Callable[[], Any]) -> None:
        if not self.in_memory:
            super().append(lambda: function() if self.pending.committed else None)
