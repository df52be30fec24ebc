"""Copies of committed checkpoints in another place, behind training: one more step after the commit.

    send own data file -> report -> index -> manifest -> latest      in the uploader's thread

As with a save, the ranks agree through the job's store, one coordinator commits, and until its
manifest is there the copy does not exist. What is sent is what was committed: every rank opens its
file before its save ends, so that neither a later save under the same name nor retention takes it away.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from unickpt import commit, manifest
from unickpt.checksums import RunningDigest
from unickpt.commit import LATEST_FILE, Names
from unickpt.coordination import Message, Rendezvous
from unickpt.errors import CoordinationError, CorruptCheckpointError, StorageError, UncertainCommitError
from unickpt.manifest import MANIFEST_FILE, FileRecord, Manifest
from unickpt.pending import Pending
from unickpt.storage import Reader, Storage, join, open_storage, split
from unickpt.writing import Pace

logger = logging.getLogger("unickpt")

_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class UploadResult:
    """How an upload ended, the same on every rank.

    Attributes:
        committed: the copy exists.
        superseded: it was left out, because a newer checkpoint was waiting to be uploaded.
        failures: rank -> reason, if that is why there is none.
        size_bytes: of all files but the manifest (0 unless committed).
        seconds: from its turn to its end, on this rank.
    """

    committed: bool
    superseded: bool = False
    failures: dict[int, str] = field(default_factory=dict)
    size_bytes: int = 0
    seconds: float = 0.0


class PendingUpload(Pending[UploadResult]):
    """One upload of this rank.

    Attributes:
        source: the directory of the checkpoint.
        target: where its copy goes.
    """

    def __init__(self, source: str, target: str) -> None:
        super().__init__()
        self.source, self.target = source, target

    def end(self, result: UploadResult | None, error: CoordinationError | None = None) -> None:
        """Called once, by the uploader."""
        self._known(result, error)
        self._over.set()


@dataclass(frozen=True)
class Copy:
    """A checkpoint that has just been committed, and its copy to be.

    Attributes:
        source: the directory.
        target: where the copies of this folder's checkpoints go; this one under the same tag.
        tag: of the checkpoint.
        record: of this rank's data file.
        save_latest: whether ``<target>/latest`` shall name it.
        meet: message exchange of the ranks, for this upload alone.
        on_commit: on the coordinator, called with the copy's place when it exists.
    """

    source: Storage
    target: str
    tag: str
    record: FileRecord
    save_latest: bool
    meet: Rendezvous
    on_commit: Callable[[str], None] | None = None


class Uploader:
    """The uploads of one rank, one after the other. Every rank adds the same ones in the same order.

    Of several that wait, only the newest is made: where saves come faster than uploads go, the copies
    become fewer, and the local directory does not fill up.

    Args:
        pace: of an upload's writing.
    """

    def __init__(self, pace: Callable[[], Pace]) -> None:
        self._pace = pace
        self._waiting: deque[_Upload] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._all: list[PendingUpload] = []

    @property
    def pending(self) -> list[PendingUpload]:
        """Uploads that are not over, the oldest first."""
        with self._lock:
            self._all = [upload for upload in self._all if not upload.done]
            return list(self._all)

    @property
    def threads(self) -> list[threading.Thread]:
        """What is at work."""
        with self._lock:
            return [self._thread] if self._thread is not None and self._thread.is_alive() else []

    def add(self, copy: Copy) -> PendingUpload:
        """Upload a checkpoint when its turn comes. Its files are opened now."""
        upload = _Upload(copy, PendingUpload(copy.source.where(), join(copy.target, copy.tag)), self._pace, self._newer)
        upload.open()
        with self._lock:
            self._all.append(upload.pending)
            self._waiting.append(upload)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="unickpt-upload", daemon=True)
                self._thread.start()
        return upload.pending

    def _newer(self) -> bool:
        """Whether another one waits behind the one whose turn it is."""
        with self._lock:
            return bool(self._waiting)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                upload = self._waiting.popleft()
            upload.run()


class _Upload:
    def __init__(self, copy: Copy, pending: PendingUpload, pace: Callable[[], Pace], newer: Callable[[], bool]) -> None:
        self.copy, self.pending, self._pace, self._newer = copy, pending, pace, newer
        self._target = open_storage(pending.target)
        self._files = contextlib.ExitStack()
        self._data: Reader | None = None
        self._index: Reader | None = None
        self._manifest: Manifest | None = None
        self._cannot_open = ""

    def open(self) -> None:
        """Hold on to this rank's file, and on the coordinator to index and manifest."""
        source = self.copy.source
        try:
            self._data = self._files.enter_context(source.reader(self.copy.record.path))
            if self.copy.meet.rank == 0:
                data = source.read(MANIFEST_FILE, 0, source.size_bytes(MANIFEST_FILE) or 0)
                self._manifest = manifest.from_bytes(data, where=source.where(MANIFEST_FILE))
                self._index = self._files.enter_context(source.reader(self._manifest.index))
        except Exception as err:
            self._cannot_open = f"{type(err).__name__}: {err}"

    def run(self) -> None:
        """Send, agree, commit. Raises nothing."""
        begin = time.monotonic()
        meet = self.copy.meet
        result, error = None, None
        try:
            result = self._agreed(begin)
        except CoordinationError as err:
            error = err
        except Exception as err:  # nothing of ours may end a training process
            logger.exception("unickpt: rank %d: upload of %s", meet.rank, self.pending.source)
            error = CoordinationError(f"{type(err).__name__}: {err}")
        with contextlib.suppress(Exception):
            self._files.close()
        if meet.rank == 0:
            self._tell(result, error)
        self.pending.end(result, error)
        with contextlib.suppress(CoordinationError):
            meet.part()

    def _agreed(self, begin: float) -> UploadResult:
        meet = self.copy.meet
        opening = meet.broadcast("upload", self._opening() if meet.rank == 0 else None, notice=False)
        if opening["superseded"]:
            return UploadResult(committed=False, superseded=True)
        generation = opening["generation"]
        name = Names(meet.rank, generation).data
        messages = meet.gather("sent", {"failure": self._send(name)})
        self.pending.written.set()
        verdict = meet.broadcast("verdict", None if messages is None else self._conclude(messages, generation), notice=False)
        if not verdict["committed"] and not verdict["uncertain"]:
            self._target.delete(name)
        return UploadResult(
            committed=verdict["committed"],
            failures={int(rank): reason for rank, reason in verdict["failures"].items()},
            size_bytes=verdict["size_bytes"],
            seconds=time.monotonic() - begin,
        )

    def _opening(self) -> Message:
        return {"superseded": self._newer(), "generation": commit.next_generation(self._target)}

    def _send(self, name: str) -> str | None:
        """Copy this rank's data file; why that has failed, or None."""
        if self._data is None:
            return self._cannot_open
        record = self.copy.record
        try:
            pace, whole = self._pace(), RunningDigest()
            buffer = memoryview(bytearray(min(_CHUNK_BYTES, pace.batch_bytes, max(record.size_bytes, 1))))
            with self._target.create(name, about_bytes=record.size_bytes) as sink:
                for at in range(0, record.size_bytes, len(buffer)):
                    part = buffer[: record.size_bytes - at]
                    self._data.read_into([part], at)
                    whole.update(part)
                    sink.write([part])
                    pace.after(len(part))
                if whole.value() != record.checksum:
                    raise CorruptCheckpointError(f"{self._data.path}: no longer what was written; its copy is not made")
        except Exception as err:
            return f"{type(err).__name__}: {err}"
        return None

    def _conclude(self, messages: list[Message], generation: int) -> Message:
        """On the coordinator: make the copy exist if every rank has sent its file."""
        failures = {str(rank): message["failure"] for rank, message in enumerate(messages) if message["failure"] is not None}
        verdict: Message = {"committed": False, "uncertain": False, "failures": failures, "size_bytes": 0}
        if failures:
            return verdict
        try:
            verdict["size_bytes"] = self._publish(generation)
            verdict["committed"] = True
        except Exception as err:
            verdict["uncertain"] = isinstance(err, UncertainCommitError)
            failures["0"] = f"{type(err).__name__}: {err}"
            return verdict
        self._follow()
        return verdict

    def _publish(self, generation: int) -> int:
        """Returns the size of all files but the manifest."""
        if self._manifest is None or self._index is None:
            raise StorageError(self._cannot_open)
        table = bytearray(self._manifest.file(self._manifest.index).size_bytes)
        self._index.read_into([memoryview(table)], 0)
        copied, index = commit.renumbered(self._manifest, bytes(table), generation, where=self._index.path)
        data = [record for record in copied.files if record.path != copied.index]
        for record, size in zip(data, self._target.sizes_bytes([record.path for record in data]), strict=True):
            if size != record.size_bytes:
                raise StorageError(f"{self._target.where(record.path)}: {size} bytes are there, {record.size_bytes} were sent")
        commit.publish(self._target, copied, index)
        return sum(record.size_bytes for record in copied.files)

    def _follow(self) -> None:
        """What follows on a commit."""
        copy = self.copy
        try:
            if copy.save_latest:
                open_storage(copy.target).write_atomic(LATEST_FILE, copy.tag.encode())
            if copy.on_commit is not None:
                copy.on_commit(self.pending.target)
        except Exception as err:  # the copy is there, whatever was to be told about it
            logger.warning(
                "unickpt: %s is uploaded, but what should follow failed (%s: %s)", self.pending.target, type(err).__name__, err
            )

    def _tell(self, result: UploadResult | None, error: CoordinationError | None) -> None:
        pending = self.pending
        if result is not None and result.committed:
            logger.info(
                "unickpt: uploaded %s to %s: %s bytes in %.2f s",
                pending.source, pending.target, f"{result.size_bytes:,}", result.seconds,
            )  # fmt: skip
        elif result is not None and result.superseded:
            logger.warning(
                "unickpt: %s is not uploaded: a newer checkpoint waits for it (saves come faster than uploads go)",
                pending.source,
            )
        else:
            failures = {} if result is None else result.failures
            reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(failures.items())[:8])
            cause = reasons if error is None else str(error)
            logger.warning(
                "unickpt: %s is NOT uploaded to %s (%s). The local checkpoint is whole; the next save is uploaded again.",
                pending.source, pending.target, cause,
            )  # fmt: skip


def tags_of(uploads: list[PendingUpload], save_dir: str) -> set[str]:
    """Names of the checkpoints in a folder that are still being uploaded, or wait for it."""
    places = (split(upload.source) for upload in uploads)
    return {name for folder, name in places if folder == save_dir}


__all__ = ["Copy", "PendingUpload", "UploadResult", "Uploader", "tags_of"]
