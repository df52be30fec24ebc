"""Saver: the ranks agree, every rank writes its own state, and the coordinator commits.

    opening -> describe -> agree        in the training thread: all ranks know of a failure when the call returns
    write data + rows -> report -> merge -> index -> manifest -> latest     before the call returns, or in the background
    upload of the committed checkpoint, if configured                       in the thread of the uploader

Data is never gathered: the coordinator reads only the index rows of the other ranks. An asynchronous save takes the
same steps after a copy into host memory.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from unickpt.base.errors import CoordinationError, UnickptError
from unickpt.base.garbage import collection_paused
from unickpt.base.launcher_watch import end_with_launcher
from unickpt.base.logs import logger
from unickpt.base.round_folder import note_saver
from unickpt.base.step_replay import saves_nothing
from unickpt.checkpoint.coordination.failure import Failure, FailureKind
from unickpt.checkpoint.coordination.message_exchange import Message, MessageExchange
from unickpt.checkpoint.fence import guarded, writing_copy
from unickpt.checkpoint.format.layout import LOCK_FILE, RankFiles
from unickpt.checkpoint.save import commit as commit_module
from unickpt.checkpoint.save import shutdown
from unickpt.checkpoint.save.failure import save_failure
from unickpt.checkpoint.save.opening import Opening, announced, differences, opening_of
from unickpt.checkpoint.save.part import PartBuilder, SavePart, warn_of_waiting
from unickpt.checkpoint.save.requests import PendingSave, SaveCounts, SaveOptions, SaveRequest, SaveResult
from unickpt.checkpoint.save.shutdown import AbandonedSave
from unickpt.checkpoint.save.staging_pool import BufferPool, StagingPool
from unickpt.checkpoint.save.task import SaveTask
from unickpt.checkpoint.save.upload import PendingUpload, Uploader, UploadRequest
from unickpt.checkpoint.storage.base import Storage, split
from unickpt.checkpoint.storage.open import open_storage

_PIECE_S = 0.25  # of a wait that may become pointless


class Saver:
    """Sequential saves of one job on one rank.

    Every rank makes the same calls. Failures of a save are results, not exceptions, except CoordinationError if the
    ranks do not meet.

    Args:
        options: options of all saves.
        pool: source of staging memory; default: as the options say.
        opener: returns the storage of a path or URL.

    Attributes:
        counts: counters of finished saves.
        known_defect: failure of a save for an unexpected reason, or None. Later saves are refused with it, so that
            the framework saves.
    """

    def __init__(
        self,
        options: SaveOptions | None = None,
        *,
        pool: BufferPool | None = None,
        opener: Callable[[str], Storage] = open_storage,
    ) -> None:
        self.options = options or SaveOptions()
        self.open = opener
        self.counts = SaveCounts()
        self.known_defect: Failure | None = None
        buffers = 2 if self.options.on_busy == "queue" else 1
        self._pool = pool or StagingPool(self.options.staging_bytes, buffers=buffers, pinned=self.options.pinned_staging)
        self._parts = PartBuilder(self.options, self._pool)
        self._pending: list[PendingSave] = []
        self._tasks: dict[PendingSave, SaveTask] = {}
        self._unreported: list[PendingSave] = []  # failed in the background
        self._recovering = False  # True from a failure in the background, or for lack of memory, to the next commit
        self._threads: list[threading.Thread] = []
        self._exchange: MessageExchange | None = None  # of the last save
        self._uploader = Uploader(self.options.bandwidth_bytes_per_s)
        self._logged_notes: set[str] = set()
        self._locks: dict[str, Callable[[], None]] = {}  # release of each locked directory, on the coordinator
        shutdown.guard(self)
        note_saver()
        end_with_launcher()

    @property
    def pending(self) -> list[PendingSave]:
        """Unfinished saves, oldest first."""
        self._pending = [save for save in self._pending if not save.done]
        return list(self._pending)

    @property
    def uploads(self) -> list[PendingUpload]:
        """Unfinished uploads, oldest first."""
        return self._uploader.pending

    def finish(self, timeout_s: float | None = None) -> bool:
        """Wait for all saves and uploads. Return whether all have finished."""
        end = None if timeout_s is None else time.monotonic() + timeout_s

        def left() -> float | None:
            return None if end is None else max(end - time.monotonic(), 0.0)

        return all(save.wait(left()) for save in self.pending) and all(upload.wait(left()) for upload in self.uploads)

    def closing(self, *, signalled: bool) -> None:
        """Begin what is left to do before the process ends: nothing, because each save has begun what follows it."""

    def leave(self, timeout_s: float) -> bool:
        """Wait like ``finish``, but until the threads have ended too: the end of the process would kill them.

        Not after the process of the coordinator has ended: then no save ends, and a thread may hang in the job's store.

        Returns whether all have ended.
        """
        end = time.monotonic() + timeout_s

        def left() -> float:
            deserted = self._exchange is not None and self._exchange.deserted
            return 0.0 if deserted else max(end - time.monotonic(), 0.0)

        waiting = self.pending  # includes a save in the training thread, while another thread handles SIGTERM
        for save in waiting:
            _wait_in_pieces(save.wait, partial(_pends, save), left)
        for thread in self._threads:
            _wait_in_pieces(thread.join, thread.is_alive, left)
        uploading = self._uploader.threads  # after the saves, because these start uploads
        for thread in uploading:
            _wait_in_pieces(thread.join, thread.is_alive, left)
        return not self.pending and not any(thread.is_alive() for thread in [*self._threads, *uploading])

    def abandon(self) -> list[AbandonedSave]:
        """Abandon all unfinished saves and remove their files."""
        found = []
        for save in self.pending:
            task = self._tasks.get(save)
            found.append(AbandonedSave(save.directory, task is None or task.abandon()))
        return found

    def report(self) -> None:
        """Log every failed asynchronous save that was not reported yet, at error level."""
        failed, self._unreported = self._unreported, []
        for save in failed:
            if save.rank == 0 or save.result is None:
                logger.error(
                    "unickpt: the asynchronous save of %s FAILED after the call had returned: %s", save.directory, save.cause()
                )

    def save(self, request: SaveRequest, exchange: MessageExchange, *, asynchronous: bool | None = None) -> PendingSave:
        """Save one checkpoint. Every rank calls this.

        Args:
            request: state and destination of the save.
            exchange: message exchange of the ranks for this save only (``MessageExchange.separate``).
            asynchronous: overrides the option. The value of the coordinator applies. After a failed asynchronous save,
                or a lack of memory on a rank, saves are synchronous until one is committed. These need no copy.

        Returns:
            The save, finished or pending in a thread. If it is not committed, its files are removed, and earlier
            checkpoints, under this tag or another, are untouched. A failure to describe the state is known on all
            ranks when this returns.

        Raises:
            CoordinationError: a rank did not arrive in time.
            KeyboardInterrupt, SystemExit: this rank was interrupted; no files of the save remain.
        """
        if saves_nothing(request.directory, first=exchange.rank == 0):
            return _left_out(PendingSave(request.directory, exchange.rank, self.counts), request)
        shutdown.listen()  # this saver may have been made in another thread
        interrupts: list[BaseException] = []
        try:
            save = self._begun(request, exchange, asynchronous, interrupts)
        except CoordinationError:
            if not interrupts:
                raise
        finally:
            if request.forget is not None:
                request.forget()
        if interrupts:
            raise interrupts[0]
        return save

    def _begun(
        self, request: SaveRequest, exchange: MessageExchange, asynchronous: bool | None, interrupts: list[BaseException]
    ) -> PendingSave:
        """As ``save``. An interrupt in ``early`` is noted in ``interrupts``, and the other ranks learn of it."""
        begin = time.monotonic()
        self._exchange = exchange
        save = PendingSave(request.directory, exchange.rank, self.counts)
        wanted = self.options.asynchronous if asynchronous is None else asynchronous
        busy = self.pending
        if busy and (self.options.on_busy == "wait" or not wanted or any(s.directory == save.directory for s in busy)):
            _wait_for(busy[-1], save.directory, exchange)
            busy = []
        self.report()
        idle = exchange.rank and request.failed is None and not (busy and self.options.on_busy == "skip")
        interrupts += _describe_early(request) if idle else []
        exchange, opening = announced(request, exchange, partial(self._opening, request, wanted, busy=bool(busy)))
        if opening.skip:
            save.end(SaveResult(committed=False, skipped=True))
            if exchange.rank == 0:
                logger.warning(
                    "unickpt: %s is skipped: the previous save is still being written (on_busy is 'skip')", save.directory
                )
            return save
        part, failures, generation = SavePart(), [], 0
        storage = self.open(save.directory)
        try:
            if opening.refused is not None:
                failures = [opening.refused]
                if opening.arguments["tag"]:  # the coordinator knows the arguments of this save
                    failures += [each for each in differences(request, exchange) if each != opening.refused]
            else:
                described_ns = time.monotonic_ns()
                part = self._parts.describe(request, opening, exchange, interrupts)
                part.stage_ns = time.monotonic_ns() - described_ns
                self._pending.append(save)  # from now on, SIGTERM waits for it
                generation, failures = self._agreed(request, part, storage, exchange)
            if failures:
                self._ended(save, part, failures, request, exchange, begin)
                return save
            if not part.staged and opening.background:
                staged_ns = time.monotonic_ns()
                self._parts.stage(part, storage, RankFiles(exchange.rank, generation), exchange)
                part.stage_ns += time.monotonic_ns() - staged_ns
            after = busy[-1] if busy else None
            task = SaveTask(self, save, request, storage, RankFiles(exchange.rank, generation), part, exchange, begin, after)
            save.agreed, save.background = True, opening.background
            self._tasks[save] = task
        except BaseException as err:
            self._interrupted(err, save, part, exchange)
            raise
        if opening.background:
            save.stall_s = time.monotonic() - begin
            thread = threading.Thread(target=task.run, name="unickpt-save", daemon=True)
            try:
                thread.start()
            except RuntimeError as err:  # the limit of threads or of memory; the other ranks wait for this part
                logger.warning(
                    "unickpt: rank %d writes its part of %s while training waits: %s", exchange.rank, save.directory, err
                )
                task.run()
            else:
                self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        else:
            task.run()
            save.stall_s = time.monotonic() - begin
            if save.error is not None:
                raise save.error
        return save

    @collection_paused()
    def _opening(self, request: SaveRequest, wanted: bool, *, busy: bool) -> Opening:
        """Return the announcement of this coordinator."""
        skip = busy and self.options.on_busy == "skip"
        return opening_of(request, skip=skip, background=wanted and not self._recovering, known_defect=self.known_defect)

    def _agreed(
        self, request: SaveRequest, part: SavePart, storage: Storage, exchange: MessageExchange
    ) -> tuple[int, list[Failure]]:
        """Return the generation of the new save, and the failures that prevent it. All ranks get the same values.

        Raises:
            KeyboardInterrupt, SystemExit: this rank was interrupted; the other ranks know.
        """
        if part.interrupt is not None and exchange.rank == 0:
            raise part.interrupt
        failure = None if part.failure is None else part.failure.to_json()
        messages = exchange.gather("described", {"failure": failure})
        if part.interrupt is not None:
            raise part.interrupt
        verdict: Message | None = None
        if messages is not None:
            verdict = {"failures": [m["failure"] for m in messages if m["failure"] is not None], "generation": 0}
            if not verdict["failures"]:
                try:
                    with guarded(request.save_dir, writing_copy(request.one_writer, exchange.world)):
                        refused = self._lock(storage)
                    verdict["generation"] = commit_module.next_generation(storage, request.claim)
                except Exception as err:  # the other ranks wait for the verdict
                    refused = save_failure(err, exchange.rank)
                verdict["failures"] = [refused.to_json()] if refused is not None else []
        verdict = exchange.broadcast("agreed", verdict, notice=False)
        return verdict["generation"], list(map(Failure.from_json, verdict["failures"]))

    def _ended(
        self,
        save: PendingSave,
        part: SavePart,
        failures: list[Failure],
        request: SaveRequest,
        exchange: MessageExchange,
        begin: float,
    ) -> None:
        """End a save that all ranks know to have failed before any file was written."""
        self._release(save, part)
        kinds = {failure.kind for failure in failures}
        self._recovering = self._recovering or FailureKind.MEMORY in kinds
        if request.failed is None and (exchange.rank == 0 or FailureKind.ARGUMENTS in kinds):
            self.open(save.directory).delete_if_empty()  # the framework may have created it
        result = SaveResult(committed=False, failures=tuple(failures), seconds=time.monotonic() - begin)
        save.end(result, notify=request.on_end)
        with contextlib.suppress(CoordinationError):
            exchange.leave()

    def _interrupted(self, err: BaseException, save: PendingSave, part: SavePart, exchange: MessageExchange) -> None:
        """End a save that was interrupted before any file was written, and inform the waiting ranks."""
        self._release(save, part)
        failure = save_failure(err, exchange.rank)
        posted = err is part.interrupt and exchange.rank != 0
        if not isinstance(err, CoordinationError) and not posted:
            with contextlib.suppress(CoordinationError):
                exchange.abandon(str(failure))
        self._tasks.pop(save, None)
        if not save.done:
            save.end(SaveResult(committed=False, failures=(failure,)))

    def upload(self, request: UploadRequest) -> PendingUpload:
        """Start the upload of a committed checkpoint."""
        return self._uploader.add(request)

    def log_notes(self, directory: str, notes: tuple[str, ...]) -> None:
        """Log differences between ranks in a committed checkpoint: as a warning the first time, then at info level."""
        for note in notes:
            logger.log(logging.INFO if note in self._logged_notes else logging.WARNING, "unickpt: %s: %s", directory, note)
        self._logged_notes.update(notes)

    def end_task(self, task: SaveTask, result: SaveResult | None) -> None:
        """End a task: release its part and its lock, and keep its failure."""
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
            if failure.kind is FailureKind.UNEXPECTED and task.request.framework_stands_in:
                self.known_defect = failure

    def _release(self, save: PendingSave, part: SavePart) -> None:
        self._parts.release(part)
        self.unlock(save.directory)

    def _lock(self, storage: Storage) -> Failure | None:
        """Keep other jobs from saving into a checkpoint directory. Return the failure if another process holds the lock."""
        try:
            release = storage.try_lock(LOCK_FILE)
        except UnickptError:  # the save itself reports what is wrong with the directory
            return None
        if release is None:
            text = (
                f"{storage.where(LOCK_FILE)} is locked: another process, or another engine of this one, is saving into "
                "this directory. Give each job and each model its own directory, or end the other job."
            )
            return Failure(FailureKind.STORAGE, 0, text=text)
        self._locks[storage.where()] = release
        return None

    def unlock(self, directory: str) -> None:
        """Release the lock of a checkpoint directory, if there is one."""
        self._locks.pop(directory, lambda: None)()


def _pends(save: PendingSave) -> bool:
    return not save.done


def _left_out(save: PendingSave, request: SaveRequest) -> PendingSave:
    """Return a save that all ranks skip without a message to each other."""
    if request.forget is not None:
        request.forget()
    save.end(SaveResult(committed=False, skipped=True))
    return save


def _wait_in_pieces(wait: Callable[[float], object], goes_on: Callable[[], bool], left: Callable[[], float]) -> None:
    """Wait for something that goes on, for at most as long as ``left`` says. It may say less from one moment to the next."""
    while goes_on() and (left_s := left()) > 0:
        wait(min(left_s, _PIECE_S))


@collection_paused()
def _describe_early(request: SaveRequest) -> list[BaseException]:
    """Describe what does not depend on the announcement. Return an interrupt that came meanwhile, or nothing."""
    if request.early is None:
        return []
    try:
        request.early()
    except (KeyboardInterrupt, SystemExit) as err:
        return [err]
    except BaseException as err:  # torch's CheckpointException does not derive from Exception
        logger.debug("unickpt: %s: %s: %s", request.directory, type(err).__name__, err)  # ``contribute`` raises it again
    return []


def _wait_for(save: PendingSave, directory: str, exchange: MessageExchange) -> None:
    begin = time.monotonic()
    if not save.wait(exchange.notice_s):
        warn_of_waiting(directory, save.directory, exchange)
        save.wait()
    waited = time.monotonic() - begin
    if exchange.rank == 0 and waited > 0.05:
        logger.warning(
            "unickpt: training waited %.1f s until the save of %s was written: saves are more frequent than the storage allows",
            waited,
            split(save.directory)[1],
        )
