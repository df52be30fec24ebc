"""Saving: every rank copies what it holds and returns; writing, agreement and commit go on behind training.

    contribute -> copy          in training's thread
    write data + rows -> report -> merge -> index -> manifest -> latest     in the saver's thread
    send what was committed to another place, if asked for                  in the uploader's thread

One coordinator commits. Data is never gathered: it sees only the other ranks' fragment tables. A
save that waits for all of that is the same path, without the copy.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from unickpt import agreement, interruption, retention, staging
from unickpt import commit as commit_module
from unickpt import manifest as manifest_module
from unickpt.commit import HOLD_FILE, LATEST_FILE, Names
from unickpt.contribution import Contribution, Prepared, Shard, prepare, resolved
from unickpt.coordination import Message, Rendezvous
from unickpt.direct_io import BLOCK_BYTES
from unickpt.errors import CoordinationError, StorageError, UncertainCommitError, UnickptError, UnsupportedLayoutError
from unickpt.manifest import FileRecord
from unickpt.saves import PendingSave, Request, SaveCounts, SaveOptions, SaveResult
from unickpt.staging import StagingBuffer, StagingPool
from unickpt.storage import Sink, Storage, absolute, open_storage, split
from unickpt.uploading import Copy, PendingUpload, Uploader, tags_of
from unickpt.writing import DataFile, Pace, write_rows

logger = logging.getLogger("unickpt")


@dataclass
class _Part:
    """This rank's part of one save: what it was asked to write, or why it could not."""

    prepared: Prepared | None = None
    message: Message | None = None  # of a failure
    written: _Begun | None = None
    shards: list[Shard] = field(default_factory=list)  # that are still to be written
    ready: Callable[[], None] = staging.nothing_to_wait_for
    buffer: StagingBuffer | None = None


@dataclass
class _Begun:
    """A data file that is open, with what did not fit into the staging budget written already."""

    stack: contextlib.ExitStack
    file: DataFile

    def abandon(self) -> None:
        with contextlib.suppress(Exception):
            self.stack.close()


class Saver:
    """The saves of one job on one rank, one after the other.

    Every rank makes the same calls. Nothing that goes wrong while saving is raised, but
    CoordinationError where the ranks do not come together at all.

    Attributes:
        counts: of the saves that are over.
    """

    def __init__(self, options: SaveOptions | None = None) -> None:
        self.options = options or SaveOptions()
        self.counts = SaveCounts()
        self._pool = StagingPool(self.options.staging_bytes, buffers=2 if self.options.on_busy == "queue" else 1)
        self._pending: list[PendingSave] = []
        self._threads: list[threading.Thread] = []
        self._uploader = Uploader(self.pace)
        self._proven = False  # a save was committed: the layout can be described on every rank
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
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0.0))
        uploading = self._uploader.threads  # after the saves, which begin uploads
        for thread in uploading:
            thread.join(max(end - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in [*self._threads, *uploading])

    def save(self, request: Request, meet: Rendezvous, *, asynchronous: bool | None = None) -> PendingSave:
        """Save one checkpoint. Every rank calls this.

        Args:
            request: what to save, and where.
            meet: message exchange of the ranks, for this save alone (``Rendezvous.apart``).
            asynchronous: as in the options, which it overrides.

        Returns:
            The save: over, or going on in a thread. If it is not committed in the end, its files are removed and
            what was committed before, under this tag or another, is untouched.

        Raises:
            CoordinationError: a rank did not arrive in time.
        """
        begin = time.monotonic()
        behind = self.options.asynchronous if asynchronous is None else asynchronous
        save = PendingSave(request.directory, meet.rank, self.counts)
        busy = self.pending
        if busy and (self.options.on_busy == "wait" or not behind or any(s.directory == save.directory for s in busy)):
            _wait_for(busy[-1], save.directory, meet)
            busy = []
        storage = open_storage(save.directory)
        try:
            opening = meet.broadcast("save", self._opening(storage, request, busy=bool(busy)) if meet.rank == 0 else None)
        except CoordinationError:
            self._let_go(save.directory)
            raise
        if opening["skip"]:
            save.end(SaveResult(committed=False, skipped=True))
            if meet.rank == 0:
                logger.warning(
                    "unickpt: %s is skipped: the save before it is still being written (on_busy is 'skip')", save.directory
                )
            return save
        if opening["held"]:
            save.end(SaveResult(committed=False, failures={0: opening["held"]}), tell=request.on_end)
            return save
        names = Names(meet.rank, opening["generation"])
        part = self._part(request, storage, names, opening["announce"], meet, behind=behind)
        try:
            unsupported = self._agreed_on_layout(part, meet) if opening["agree"] else ""
        except CoordinationError:
            storage.delete(names.data)
            self.concluded(save, part, committed=False)
            raise
        if unsupported:
            storage.delete(names.data)
            self.concluded(save, part, committed=False)
            save.end(SaveResult(committed=False, unsupported=unsupported, seconds=time.monotonic() - begin))
            return save
        work = _Work(self, save, request, storage, names, part, meet, begin, after=busy[-1] if busy else None)
        self._pending.append(save)
        if behind:
            save.stall_s = time.monotonic() - begin
            thread = threading.Thread(target=work.run, name="unickpt-save", daemon=True)
            self._threads = [t for t in self._threads if t.is_alive()] + [thread]
            thread.start()
        else:
            work.run()
            save.stall_s = time.monotonic() - begin
            if save.error is not None:
                raise save.error
        return save

    def _opening(self, storage: Storage, request: Request, *, busy: bool) -> Message:
        # ranks hear of a commit one after the other: whether it is still to be agreed is the coordinator's word
        opening = {"skip": busy and self.options.on_busy == "skip", "held": "", "generation": 0, "agree": not self._proven}
        opening["announce"] = request.announce or {}
        if not opening["skip"]:
            opening["held"] = self._hold(storage)
            opening["generation"] = commit_module.next_generation(storage)
        return opening

    def _hold(self, storage: Storage) -> str:
        """Keep other jobs out of the directory; why not, if another one is in it."""
        try:
            release = storage.hold(HOLD_FILE)
        except UnickptError:  # the save itself will say what is wrong with the directory
            return ""
        if release is None:
            return (
                f"StorageError: {storage.where(HOLD_FILE)} is locked: another process is saving into this directory at this "
                "moment. Two jobs need two directories (or one of them is a job that was meant to be over)."
            )
        self._holds[storage.where()] = release
        return ""

    def _part(
        self, request: Request, storage: Storage, names: Names, announce: Message, meet: Rendezvous, *, behind: bool
    ) -> _Part:
        part = _Part()
        try:
            part.prepared = prepare(request.contribute(announce), meet.rank)
            if not behind or any(not shard.data.is_cpu for shard in part.prepared.shards):
                part.prepared.shards = resolved(part.prepared.shards)
            part.shards = part.prepared.shards
            if behind:
                self._stage(part, storage, names, meet)
        except UnsupportedLayoutError as err:
            part.message = {"outcome": "unsupported", "reason": str(err)}
        except Exception as err:
            part.message = _failure(err, meet.rank, storage)
        return part

    def _stage(self, part: _Part, storage: Storage, names: Names, meet: Rendezvous) -> None:
        """Copy this rank's shards; those beyond the budget are written at once, from where they are."""
        assert part.prepared is not None
        certain = staging.size_of([shard for shard in part.shards if shard.unless is None])
        part.buffer = self._buffer(certain, storage, meet)
        filled = part.buffer.fill(part.shards) if certain <= part.buffer.capacity_bytes else None
        if filled is not None:
            part.shards, part.ready = filled
            part.prepared.shards = part.shards
            return
        part.prepared.shards = part.shards = resolved(part.shards)
        if part.buffer.capacity_bytes < staging.size_of(part.shards):
            self._pool.release(part.buffer)
            part.buffer = self._buffer(staging.size_of(part.shards), storage, meet)
        first = staging.first_that_fits(part.shards, part.buffer.capacity_bytes)
        if first:
            stack = contextlib.ExitStack()
            with contextlib.ExitStack() as undo:
                undo.push(stack)
                sink = stack.enter_context(self.data_file(storage, names, part.prepared))
                file = DataFile(sink, part.shards, rank=meet.rank, step=part.prepared.step, pace=self.pace())
                file.write(part.shards[:first])
                undo.pop_all()
            part.written = _Begun(stack, file)
        lead = part.written.file.next_byte % BLOCK_BYTES if part.written is not None else 0
        filled = part.buffer.fill(part.shards[first:], lead_bytes=lead)
        assert filled is not None  # nothing has a condition any more, and they fit
        part.shards, part.ready = filled

    def _buffer(self, size_bytes: int, storage: Storage, meet: Rendezvous) -> StagingBuffer:
        return self._pool.acquire(
            size_bytes,
            notice=lambda: _warn_of_waiting(str(storage), "the saves before it", meet),
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

    @staticmethod
    def _agreed_on_layout(part: _Part, meet: Rendezvous) -> str:
        """Until a save was committed, the ranks say at once whether they can describe what they hold."""
        message = part.message or {}
        reasons = meet.agree("layout", message["reason"] if message.get("outcome") == "unsupported" else None)
        return min(reasons.items())[1] if reasons else ""

    def concluded(self, save: PendingSave, part: _Part, *, committed: bool) -> None:
        """The part is no longer needed, and the directory free for others."""
        self._proven = self._proven or committed
        if part.written is not None:
            part.written.abandon()
            part.written = None
        if part.buffer is not None:
            self._pool.release(part.buffer)
            part.buffer = None
        self._let_go(save.directory)

    def _let_go(self, directory: str) -> None:
        release = self._holds.pop(directory, None)
        if release is not None:
            release()


@dataclass
class _Work:
    """What is done behind training for one save."""

    saver: Saver
    save: PendingSave
    request: Request
    storage: Storage
    names: Names
    part: _Part
    meet: Rendezvous
    begin: float
    after: PendingSave | None
    record: FileRecord | None = None  # of this rank's data file, once it is written

    def run(self) -> None:
        """Write, agree, commit. Raises nothing."""
        result, error = None, None
        try:
            if self.after is not None:  # the same order on all ranks: each waits for the others within a save
                self.after.wait()
            message = self._write()
            self.save.written.set()
            result = self._agree(message)
        except CoordinationError as err:
            error = err
        except Exception as err:  # nothing of ours may end a training process
            logger.exception("unickpt: rank %d: %s", self.meet.rank, self.save.directory)
            error = CoordinationError(f"{type(err).__name__}: {err}")
        committed = result is not None and result.committed
        self.saver.concluded(self.save, self.part, committed=committed)
        if committed:
            self._upload()
        self.save.end(result, error, self.request.on_end)
        with contextlib.suppress(CoordinationError):
            self.meet.part()

    def _write(self) -> Message:
        part = self.part
        if part.message is not None:
            return part.message
        assert part.prepared is not None
        try:
            part.ready()
            self.record = self._written(part.prepared)
            message: Message = {"outcome": "written", "file": asdict(self.record)}
            message |= agreement.message_of(part.prepared.different, part.prepared.replica)
            if self.meet.rank and part.prepared.optimizer_part is not None:
                message["optimizer"] = asdict(part.prepared.optimizer_part)
            return message
        except Exception as err:
            return _failure(err, self.meet.rank, self.storage)

    def _written(self, prepared: Prepared) -> FileRecord:
        if self.part.written is None:
            with self.saver.data_file(self.storage, self.names, prepared) as sink:
                file = DataFile(
                    sink, prepared.shards, rank=self.meet.rank, step=prepared.step, pace=self.saver.pace()
                )  # fmt: skip
                file.write(self.part.shards)
        else:
            begun, self.part.written = self.part.written, None
            file = begun.file
            with begun.stack:
                file.write(self.part.shards)
        write_rows(self.storage, self.names.rows, file.rows, prepared.tensors)
        return file.record(self.names.data)

    def _agree(self, message: Message) -> SaveResult:
        messages = self.meet.gather("written", message)
        conclusion = None
        if messages is not None:
            conclusion = self._conclude(messages)
            if conclusion["committed"] and self.request.on_commit is not None:
                _notify(self.request.on_commit, self.save.directory)
        verdict = self.meet.broadcast("verdict", conclusion, notice=False)
        if self.meet.rank == 0 and verdict["committed"]:
            with contextlib.suppress(OSError, UnickptError):
                busy = tags_of(self.saver.uploads, absolute(self.request.save_dir))
                retention.apply(self.request.save_dir, self.saver.options.retention, just_saved=self.request.tag, busy=busy)
        if not verdict["committed"] and not verdict["uncertain"]:
            self.storage.delete(self.names.data)
            self.storage.delete(self.names.rows)
        return SaveResult(
            committed=verdict["committed"],
            unsupported=verdict["unsupported"],
            failures={int(rank): reason for rank, reason in verdict["failures"].items()},
            size_bytes=verdict["size_bytes"],
            seconds=time.monotonic() - self.begin,
            stall_s=self.save.stall_s or time.monotonic() - self.begin,
        )

    def _conclude(self, messages: list[Message]) -> Message:
        """On the coordinator: commit if every rank has written, otherwise say why not."""
        verdict: Message = {"committed": False, "uncertain": False, "unsupported": "", "failures": {}, "size_bytes": 0}
        for rank, message in enumerate(messages):
            if message["outcome"] == "unsupported":
                verdict["unsupported"] = message["reason"]
            elif message["outcome"] == "failed":
                verdict["failures"][str(rank)] = message["reason"]
        part = self.part.prepared
        if verdict["unsupported"] or verdict["failures"] or part is None:
            return verdict
        try:
            files = [FileRecord(**message["file"]) for message in messages]
            parts = [manifest_module.optimizer_from_json(m["optimizer"]) for m in messages if m.get("optimizer")]
            part.optimizer = manifest_module.merge_optimizers(part.optimizer, parts)
            part.notes = agreement.notes_of(messages)
            verdict["size_bytes"] = commit_module.commit(self.storage, files, part, self.names.generation)
            verdict["committed"] = True
            self.saver.tell(self.save.directory, part.notes)
        except Exception as err:
            if not isinstance(err, StorageError):
                logger.exception("unickpt: the coordinator could not commit %s", self.storage)
            verdict["uncertain"] = isinstance(err, UncertainCommitError)
            verdict["failures"]["0"] = f"{type(err).__name__}: {err}"
            return verdict
        if self.request.save_latest:
            try:
                open_storage(self.request.save_dir).write_atomic(LATEST_FILE, self.request.tag.encode())
            except Exception as err:  # the checkpoint is there, and all ranks wait to hear of it
                logger.warning("unickpt: %s is saved, but 'latest' could not be updated: %s", self.save.directory, err)
        return verdict

    def _upload(self) -> None:
        """Begin the copy of what was committed, if there is to be one."""
        target = self.saver.options.upload_to
        if not target:
            return
        assert self.record is not None  # or there was no commit
        request, meet = self.request, self.meet.apart("upload")
        copy = Copy(self.storage, target, request.tag, self.record, request.save_latest, meet, request.on_commit)
        try:
            self.save.upload = self.saver.upload(copy)
        except Exception:  # the checkpoint is there
            logger.exception("unickpt: rank %d cannot begin to upload %s", self.meet.rank, self.save.directory)


def _failure(err: Exception, rank: int, storage: Storage) -> Message:
    if not isinstance(err, StorageError):
        logger.error("unickpt: rank %d could not write its part of %s", rank, storage, exc_info=err)
    return {"outcome": "failed", "reason": f"{type(err).__name__}: {err}"}


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


def _notify(on_commit: Callable[[str], None], directory: str) -> None:
    try:
        on_commit(directory)
    except Exception as err:  # the checkpoint is there, whatever was to be told about it
        logger.warning("unickpt: %s is saved, but what should follow failed (%s: %s)", directory, type(err).__name__, err)


def save(
    contribute: Callable[[Message], Contribution],
    *,
    save_dir: str,
    tag: str,
    save_latest: bool,
    meet: Rendezvous,
    announce: Message | None = None,
) -> SaveResult:
    """Save one checkpoint and wait until it exists: ``Saver.save`` for those who save once.

    Raises:
        CoordinationError: a rank did not arrive in time.
    """
    request = Request(contribute, save_dir, tag, save_latest, announce)
    result = Saver(SaveOptions(asynchronous=False)).save(request, meet).result
    assert result is not None  # or the call has raised
    return result
