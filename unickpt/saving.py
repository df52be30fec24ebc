"""Saving: the ranks agree, every rank writes what it holds, one of them commits.

    opening -> describe -> agree        in training's thread: what fails here is known on all ranks when the call returns
    write data + rows -> report -> merge -> index -> manifest -> latest     before the call returns, or behind training
    send what was committed to another place, if asked for                  in the uploader's thread

One coordinator commits. Data is never gathered: it sees only the other ranks' fragment tables. An
asynchronous save is the same path behind a copy in host memory.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from unickpt import commit as commit_module
from unickpt import interruption, staging
from unickpt.commit import HOLD_FILE, Names
from unickpt.contribution import Contribution, Prepared, prepare, resolved
from unickpt.coordination import Message, Rendezvous
from unickpt.direct_io import BLOCK_BYTES
from unickpt.errors import CoordinationError, UnickptError
from unickpt.failures import SaveFailure, failure_of
from unickpt.saves import PendingSave, Request, SaveCounts, SaveOptions, SaveResult
from unickpt.staging import StagingBuffer, StagingPool
from unickpt.storage import Sink, Storage, open_storage, split
from unickpt.task import Begun, Part, SaveTask
from unickpt.uploading import Copy, PendingUpload, Uploader
from unickpt.writing import DataFile, Pace

logger = logging.getLogger("unickpt")


class Abandoned(NamedTuple):
    """A save that the end of the process has cut off. ``absent``: it surely has no checkpoint."""

    directory: str
    absent: bool


class Saver:
    """The saves of one job on one rank, one after the other.

    Every rank makes the same calls. Nothing that goes wrong while saving is raised, but
    CoordinationError where the ranks do not come together at all.

    Attributes:
        counts: of the saves that are over.
        wrong: a save was described, and then found to be described wrongly. Later saves are refused with this failure,
            so that the framework makes them.
    """

    def __init__(self, options: SaveOptions | None = None) -> None:
        self.options = options or SaveOptions()
        self.counts = SaveCounts()
        self.wrong: SaveFailure | None = None
        self._pool = StagingPool(self.options.staging_bytes, buffers=2 if self.options.on_busy == "queue" else 1)
        self._pending: list[PendingSave] = []
        self._tasks: dict[PendingSave, SaveTask] = {}
        self._unreported: list[PendingSave] = []  # failed behind training
        self._recovering = False  # since a failure behind training, no save was committed
        self._threads: list[threading.Thread] = []
        self._uploader = Uploader(self.pace)
        self._told: set[str] = set()
        self._holds: dict[str, Callable[[], None]] = {}  # on the coordinator: directories that are being saved into
        interruption.guard(self)

    @property
    def pending(self) -> list[PendingSave]:
        """Saves that are not over, the oldest first."""
        self._pending = [save for save in self._pending if not save.done]
        return list(self._pending)

    @property
    def uploads(self) -> list[PendingUpload]:
        """Uploads that are not over, the oldest first."""
        return self._uploader.pending

    def finish(self, timeout_s: float | None = None) -> bool:
        """Wait for everything that was begun, uploads included; whether it is over."""
        end = None if timeout_s is None else time.monotonic() + timeout_s

        def left() -> float | None:
            return None if end is None else max(end - time.monotonic(), 0.0)

        return all(save.wait(left()) for save in self.pending) and all(upload.wait(left()) for upload in self.uploads)

    def leave(self, timeout_s: float) -> bool:
        """As ``finish``, for the end of the process: the threads themselves have to be gone, or they are torn apart."""
        end = time.monotonic() + timeout_s
        waiting = self.pending  # also those without a thread: training's own may be in one while SIGTERM is heard in another
        for save in waiting:
            save.wait(max(end - time.monotonic(), 0.0))
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0.0))
        uploading = self._uploader.threads  # after the saves, which begin uploads
        for thread in uploading:
            thread.join(max(end - time.monotonic(), 0.0))
        return not self.pending and not any(thread.is_alive() for thread in [*self._threads, *uploading])

    def abandon(self) -> list[Abandoned]:
        """Give up all saves that are not over, and remove what was written of them."""
        found = []
        for save in self.pending:
            task = self._tasks.get(save)
            found.append(Abandoned(save.directory, task is None or task.abandon()))
        return found

    def report(self) -> None:
        """Log every asynchronous save that has failed and was not reported yet, at error level."""
        failed, self._unreported = self._unreported, []
        for save in failed:
            if save.rank == 0 or save.result is None:
                logger.error(
                    "unickpt: the asynchronous save of %s FAILED after the call had returned: %s", save.directory, save.cause()
                )

    def save(self, request: Request, meet: Rendezvous, *, asynchronous: bool | None = None) -> PendingSave:
        """Save one checkpoint. Every rank calls this.

        Args:
            request: what to save, and where.
            meet: message exchange of the ranks, for this save alone (``Rendezvous.apart``).
            asynchronous: as in the options, which it overrides. The coordinator's counts. After an asynchronous save that
                failed, saves are synchronous until one is committed.

        Returns:
            The save: over, or going on in a thread. If it is not committed in the end, its files are removed and
            what was committed before, under this tag or another, is untouched. What fails while a rank describes its
            state is known on all ranks when this returns.

        Raises:
            CoordinationError: a rank did not arrive in time.
            KeyboardInterrupt, SystemExit: on the rank that was interrupted; nothing of the save is left.
        """
        begin = time.monotonic()
        save = PendingSave(request.directory, meet.rank, self.counts)
        wanted = self.options.asynchronous if asynchronous is None else asynchronous
        busy = self.pending
        if busy and (self.options.on_busy == "wait" or not wanted or any(s.directory == save.directory for s in busy)):
            _wait_for(busy[-1], save.directory, meet)
            busy = []
        self.report()
        meet, opening = self._opened(request, meet, wanted, busy=bool(busy))
        if opening["skip"]:
            save.end(SaveResult(committed=False, skipped=True))
            if meet.rank == 0:
                logger.warning(
                    "unickpt: %s is skipped: the save before it is still being written (on_busy is 'skip')", save.directory
                )
            return save
        part, failures, generation = Part(), [], 0
        storage = open_storage(save.directory)
        try:
            if opening["refused"] is not None:
                failures = [SaveFailure.from_json(opening["refused"])]
            else:
                part = self._described(request, opening, meet)
                self._pending.append(save)  # from here on, SIGTERM waits for it
                generation, failures = self._agreed(part, storage, meet)
            if failures:
                self._ended(save, part, failures, request, meet, begin)
                return save
            if not part.staged and opening["behind"]:
                self._stage(part, storage, Names(meet.rank, generation), meet)
        except BaseException as err:
            self._interrupted(err, save, part, meet)
            raise
        after = busy[-1] if busy else None
        task = SaveTask(self, save, request, storage, Names(meet.rank, generation), part, meet, begin, after)
        save.agreed, save.background = True, opening["behind"]
        self._tasks[save] = task
        if opening["behind"]:
            save.stall_s = time.monotonic() - begin
            thread = threading.Thread(target=task.run, name="unickpt-save", daemon=True)
            self._threads = [t for t in self._threads if t.is_alive()] + [thread]
            thread.start()
        else:
            task.run()
            save.stall_s = time.monotonic() - begin
            if save.error is not None:
                raise save.error
        return save

    def _opened(
        self, request: Request, meet: Rendezvous, wanted: bool, *, busy: bool
    ) -> tuple[Rendezvous, Message]:  # fmt: skip
        """Hear the coordinator's word on this save. Calls that it gave up, and this rank never made, are passed over.

        Raises:
            CoordinationError: the coordinator does not come, or has waited for this rank in vain.
        """
        if meet.rank == 0:
            try:
                return meet, meet.broadcast("save", self._opening(request, wanted, busy=busy))
            except BaseException as err:
                with contextlib.suppress(CoordinationError):
                    meet.abandon(str(failure_of(err, meet.rank)))
                raise
        while True:
            opening = meet.broadcast("save", None)
            reason = meet.given_up()
            if not reason:
                return meet, opening
            following = meet.following()
            if opening["arguments"] == request.arguments or following is meet:
                raise CoordinationError(f"rank {meet.rank} came when this save was given up already: {reason}")
            meet = following

    def _opening(self, request: Request, wanted: bool, *, busy: bool) -> Message:
        """The coordinator's word on a save, which all ranks follow: they hear of earlier ones at different times."""
        opening: Message = {"skip": busy and self.options.on_busy == "skip", "refused": None, "announce": {}}
        opening["arguments"] = request.arguments
        opening["behind"] = wanted and not self._recovering
        if opening["skip"]:
            return opening
        refused = self.wrong if request.framework_stands_in else None
        if request.failed is not None:
            refused = failure_of(request.failed, 0, describing=True)
        if refused is not None:
            opening["refused"] = refused.to_json()
            return opening
        try:
            opening["announce"] = {} if request.announce is None else request.announce()
        except Exception as err:
            opening["refused"] = failure_of(err, 0, describing=True).to_json()
        return opening

    def _described(self, request: Request, opening: Message, meet: Rendezvous) -> Part:
        """This rank's part, copied if the save is to go on behind training and the copy fits; or why there is none."""
        part = Part()
        if request.failed is not None:
            part.failure = failure_of(request.failed, meet.rank, describing=True)
        else:
            part.failure = _refusal(request.arguments, opening["arguments"], meet.rank)
        if part.failure is not None:
            return part
        try:
            part.prepared = prepare(request.contribute(opening["announce"]), meet.rank)
            self._resolve(part, part.prepared, behind=opening["behind"], meet=meet)
        except BaseException as err:  # torch's CheckpointException is no Exception
            part.failure = failure_of(err, meet.rank, describing=True)
            part.interrupt = err if part.failure.kind == "interrupted" else None
            logger.debug("unickpt: rank %d could not describe %s", meet.rank, request.directory, exc_info=err)
        return part

    def _resolve(self, part: Part, prepared: Prepared, *, behind: bool, meet: Rendezvous) -> None:
        """Which shards are to be written. Behind training, copy them, if they fit into the budget."""
        if not behind or any(not shard.data.is_cpu for shard in prepared.shards):
            prepared.shards = resolved(prepared.shards)
        part.shards = prepared.shards
        if not behind:
            return
        certain = staging.size_of([shard for shard in part.shards if shard.unless is None])
        part.buffer = self._buffer(certain, meet)
        filled = part.buffer.fill(part.shards) if certain <= part.buffer.capacity_bytes else None
        if filled is None:
            prepared.shards = part.shards = resolved(part.shards)
            return
        part.shards, part.ready = filled
        prepared.shards, part.staged = part.shards, True

    def _agreed(self, part: Part, storage: Storage, meet: Rendezvous) -> tuple[int, list[SaveFailure]]:
        """The number of the new save, or why there will be none: the same on all ranks.

        Raises:
            KeyboardInterrupt, SystemExit: this rank was interrupted, and the others know.
        """
        if part.interrupt is not None and meet.rank == 0:
            raise part.interrupt
        failure = None if part.failure is None else part.failure.to_json()
        messages = meet.gather("described", {"failure": failure})
        if part.interrupt is not None:
            raise part.interrupt
        verdict: Message | None = None
        if messages is not None:
            verdict = {"failures": [m["failure"] for m in messages if m["failure"] is not None], "generation": 0}
            if not verdict["failures"]:
                try:
                    held = self._hold(storage)
                    verdict["generation"] = commit_module.next_generation(storage)
                except Exception as err:  # the other ranks wait for this one's word
                    held = failure_of(err, meet.rank)
                verdict["failures"] = [held.to_json()] if held is not None else []
        verdict = meet.broadcast("agreed", verdict, notice=False)
        return verdict["generation"], list(map(SaveFailure.from_json, verdict["failures"]))

    def _ended(
        self, save: PendingSave, part: Part, failures: list[SaveFailure], request: Request, meet: Rendezvous, begin: float
    ) -> None:
        """All ranks know that there will be no checkpoint of ours."""
        self._release(save, part)
        if request.failed is None and meet.rank == 0:
            open_storage(save.directory).delete_if_empty()  # the framework may have made it already
        result = SaveResult(committed=False, failures=tuple(failures), seconds=time.monotonic() - begin)
        save.end(result, tell=request.on_end)
        with contextlib.suppress(CoordinationError):
            meet.part()

    def _interrupted(self, err: BaseException, save: PendingSave, part: Part, meet: Rendezvous) -> None:
        """Before anything of this save was written: leave nothing, and nobody waiting."""
        self._release(save, part)
        failure = failure_of(err, meet.rank)
        posted = err is part.interrupt and meet.rank != 0
        if not isinstance(err, CoordinationError) and not posted:
            with contextlib.suppress(CoordinationError):
                meet.abandon(str(failure))
        save.end(SaveResult(committed=False, failures=(failure,)))

    def _hold(self, storage: Storage) -> SaveFailure | None:
        """Keep other jobs out of the directory; why not, if another one is in it."""
        try:
            release = storage.hold(HOLD_FILE)
        except UnickptError:  # the save itself will say what is wrong with the directory
            return None
        if release is None:
            return SaveFailure(
                "storage", 0,
                f"StorageError: {storage.where(HOLD_FILE)} is locked: another process is saving into this directory at this "
                "moment. Two jobs need two directories (or one of them is a job that was meant to be over).",
            )  # fmt: skip
        self._holds[storage.where()] = release
        return None

    def _stage(self, part: Part, storage: Storage, names: Names, meet: Rendezvous) -> None:
        """Copy this rank's shards within the budget; those beyond it are written at once, from where they are."""
        assert part.prepared is not None
        assert part.buffer is not None
        try:
            if part.buffer.capacity_bytes < staging.size_of(part.shards):
                self._pool.release(part.buffer)
                part.buffer = None
                part.buffer = self._buffer(staging.size_of(part.shards), meet)
            first = staging.first_that_fits(part.shards, part.buffer.capacity_bytes)
            if first:
                part.written = self._begun(part.prepared, first, storage, names, meet)
            lead = part.written.file.next_byte % BLOCK_BYTES if part.written is not None else 0
            filled = part.buffer.fill(part.shards[first:], lead_bytes=lead)
            assert filled is not None  # nothing has a condition any more, and they fit
            part.shards, part.ready = filled
        except Exception as err:
            part.failure = failure_of(err, meet.rank)

    def _begun(self, prepared: Prepared, count: int, storage: Storage, names: Names, meet: Rendezvous) -> Begun:
        """The data file with its first shards."""
        stack = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.push(stack)
            sink = stack.enter_context(self.data_file(storage, names, prepared))
            file = DataFile(sink, prepared.shards, rank=meet.rank, step=prepared.step, pace=self.pace())
            file.write(prepared.shards[:count])
            undo.pop_all()
        return Begun(stack, file)

    def _buffer(self, size_bytes: int, meet: Rendezvous) -> StagingBuffer:
        return self._pool.acquire(
            size_bytes,
            notice=lambda: _warn_of_waiting("this one", "the saves before it", meet),
            notice_s=meet.notice_s,
        )

    def data_file(self, storage: Storage, names: Names, prepared: Prepared) -> contextlib.AbstractContextManager[Sink]:
        """This rank's data file, to be written."""
        size = sum(shard.size_bytes for shard in prepared.shards)
        return storage.create(names.data, direct=self.options.direct_io, about_bytes=size)

    def upload(self, copy: Copy) -> PendingUpload:
        """Copy a checkpoint that was just committed to another place."""
        return self._uploader.add(copy)

    def pace(self) -> Pace:
        return Pace(self.options.bandwidth_bytes_per_s)

    def tell(self, directory: str, notes: tuple[str, ...]) -> None:
        """What was noticed of a checkpoint that exists: a warning for the first one, and only a line for others like it."""
        for note in notes:
            logger.log(logging.INFO if note in self._told else logging.WARNING, "unickpt: %s: %s", directory, note)
        self._told.update(notes)

    def concluded(self, task: SaveTask, result: SaveResult | None) -> None:
        """A task is over: its part is no longer needed, the directory is free for others; its failure is kept."""
        self._release(task.save, task.part)
        if result is None or not result.committed:
            task.storage.delete_if_empty()
        self._tasks.pop(task.save, None)
        if result is not None and result.complete:
            self._recovering = False
            return
        if task.save.background:
            self._recovering = True
            self._unreported.append(task.save)
        for failure in () if result is None else result.failures:
            if failure.kind == "defect" and task.request.framework_stands_in:
                self.wrong = failure

    def _release(self, save: PendingSave, part: Part) -> None:
        if part.written is not None:
            part.written.abandon()
            part.written = None
        if part.buffer is not None:
            self._pool.release(part.buffer)
            part.buffer = None
        self.let_go(save.directory)

    def let_go(self, directory: str) -> None:
        """Let other jobs into a directory again."""
        release = self._holds.pop(directory, None)
        if release is not None:
            release()


def _refusal(here: Message, there: Message, rank: int) -> SaveFailure | None:
    """Why a rank makes no part of this save, or None.

    Args:
        here: the call's arguments on this rank.
        there: on the coordinator.
        rank: this one.
    """
    if interruption.ending():
        return SaveFailure("interrupted", rank, f"{interruption.ending()} was received, so no new save begins")
    differing = [name for name in there if here.get(name) != there[name]]
    if not differing:
        return None
    found = "; ".join(f"{name} is {here.get(name)!r} here and {there[name]!r} on rank 0" for name in differing)
    return SaveFailure("arguments", rank, found)


def _wait_for(save: PendingSave, directory: str, meet: Rendezvous) -> None:
    begin = time.monotonic()
    if not save.wait(meet.notice_s):
        _warn_of_waiting(directory, save.directory, meet)
        save.wait()
    waited = time.monotonic() - begin
    if meet.rank == 0 and waited > 0.05:
        logger.warning(
            "unickpt: training waited %.1f s for the save of %s to be written: saves come faster than the storage takes them",
            waited, split(save.directory)[1],
        )  # fmt: skip


def _warn_of_waiting(directory: str, what: str, meet: Rendezvous) -> None:
    logger.warning(
        "unickpt: rank %d: training waits at the save of %s until %s is written, for %.0f s now: the storage may be stalled "
        "(on_busy 'skip' would go on without a save)",
        meet.rank, directory, what, meet.notice_s,
    )  # fmt: skip


def save(
    contribute: Callable[[Message], Contribution],
    *,
    save_dir: str,
    tag: str,
    save_latest: bool,
    meet: Rendezvous,
) -> SaveResult:
    """Save one checkpoint and wait until it exists: ``Saver.save`` for those who save once.

    Raises:
        CoordinationError: a rank did not arrive in time.
    """
    result = Saver().save(Request(contribute, save_dir, tag, save_latest), meet).result
    assert result is not None  # or the call has raised
    return result
