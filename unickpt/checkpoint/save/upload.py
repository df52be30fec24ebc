"""Upload of committed checkpoints to another location, in the background.

    send own data file -> report -> index -> manifest -> latest      in the thread of the uploader

As in a save, the ranks agree through the store of the job, one coordinator commits, and the copy does not exist
before its manifest. Every rank opens its data file before its save ends, so neither a later save under the same
name nor retention can change what is sent.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from unickpt.base.errors import CoordinationError, CorruptCheckpointError, StorageError, UncertainCommitError
from unickpt.base.logs import logger
from unickpt.checkpoint.checkpoint_folder import read_manifest
from unickpt.checkpoint.coordination.failure import Failure, sentence
from unickpt.checkpoint.coordination.message_exchange import Message, MessageExchange
from unickpt.checkpoint.coordination.owners import Claim, Origin
from unickpt.checkpoint.coordination.pending import Pending
from unickpt.checkpoint.fence import guarded, writing_copy
from unickpt.checkpoint.format.checksums import RunningDigest
from unickpt.checkpoint.format.layout import LATEST_FILE, RankFiles
from unickpt.checkpoint.format.manifest import MANIFEST_FILE, FileRecord, Manifest
from unickpt.checkpoint.save import commit
from unickpt.checkpoint.save.data_file import Pace
from unickpt.checkpoint.save.failure import save_failure
from unickpt.checkpoint.storage.base import Reader, Storage, join, split
from unickpt.checkpoint.storage.open import open_storage

_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class UploadResult:
    """Result of an upload, the same on every rank except for the time.

    Attributes:
        committed: the copy exists.
        superseded: the upload was skipped because a newer checkpoint was waiting.
        failures: why there is no copy; at most one per rank, in rank order.
        size_bytes: size of all files except the manifest; 0 unless committed.
        seconds: duration of the upload on this rank, without the time in the queue.
    """

    committed: bool
    superseded: bool = False
    failures: tuple[Failure, ...] = ()
    size_bytes: int = 0
    seconds: float = 0.0


class PendingUpload(Pending[UploadResult]):
    """Handle of one upload of this rank.

    Attributes:
        source: directory of the checkpoint.
        target: location of the copy.
    """

    def __init__(self, source: str, target: str) -> None:
        super().__init__()
        self.source, self.target = source, target

    def end(self, result: UploadResult | None, error: CoordinationError | None = None) -> None:
        """Store the result. The uploader calls this once."""
        self._known(result, error)
        self._over.set()


@dataclass(frozen=True)
class UploadRequest:
    """Request to upload a committed checkpoint.

    Attributes:
        source: directory of the checkpoint.
        target: folder for the copies. The copy is ``<target>/<tag>``.
        tag: tag of the checkpoint.
        record: data file of this rank.
        save_latest: update ``<target>/latest``.
        exchange: message exchange of the ranks for this upload only.
        on_commit: called on the coordinator with the location of the committed copy.
        one_writer, claim: as in ``SaveRequest``.
    """

    source: Storage
    target: str
    tag: str
    record: FileRecord
    save_latest: bool
    exchange: MessageExchange
    on_commit: Callable[[str], None] | None = None
    one_writer: bool = False
    claim: Claim | None = None


class Uploader:
    """Sequential uploads of one rank. Every rank adds the same uploads in the same order.

    If several uploads wait, only the newest is made. So if saves are more frequent than uploads, there are fewer
    copies, and the local directory does not fill up.

    Args:
        bandwidth_bytes_per_s: bandwidth limit; None for no limit.
    """

    def __init__(self, bandwidth_bytes_per_s: float | None) -> None:
        self._bandwidth = bandwidth_bytes_per_s
        self._waiting: deque[_Upload] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._all: list[PendingUpload] = []

    @property
    def pending(self) -> list[PendingUpload]:
        """Unfinished uploads, oldest first."""
        with self._lock:
            self._all = [upload for upload in self._all if not upload.done]
            return list(self._all)

    @property
    def threads(self) -> list[threading.Thread]:
        """The running threads."""
        with self._lock:
            return [self._thread] if self._thread is not None and self._thread.is_alive() else []

    def add(self, request: UploadRequest) -> PendingUpload:
        """Queue an upload. The files are opened at once."""
        pending = PendingUpload(request.source.where(), join(request.target, request.tag))
        upload = _Upload(request, pending, self._bandwidth, self._newer)
        upload.open()
        with self._lock:
            self._all.append(upload.pending)
            self._waiting.append(upload)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="unickpt-upload", daemon=True)
                self._thread.start()
        return upload.pending

    def _newer(self) -> bool:
        """Return whether a newer upload waits."""
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
    def __init__(
        self, request: UploadRequest, pending: PendingUpload, bandwidth: float | None, newer: Callable[[], bool]
    ) -> None:
        self.request, self.pending, self._bandwidth, self._newer = request, pending, bandwidth, newer
        self._target = open_storage(pending.target)
        self._files = contextlib.ExitStack()
        self._data: Reader | None = None
        self._index: Reader | None = None
        self._manifest: Manifest | None = None
        self._cannot_open: Failure | None = None

    def open(self) -> None:
        """Open the data file of this rank, and on the coordinator index and manifest."""
        source = self.request.source
        try:
            self._data = self._files.enter_context(source.reader(self.request.record.path))
            if self.request.exchange.rank == 0:
                if source.size_bytes(MANIFEST_FILE) is None:
                    raise StorageError(f"{source.where(MANIFEST_FILE)}: it is gone since its save")
                self._manifest = read_manifest(source)
                self._index = self._files.enter_context(source.reader(self._manifest.index))
        except Exception as err:
            self._cannot_open = save_failure(err, self.request.exchange.rank)

    def run(self) -> None:
        """Send, agree, commit. Never raises an exception."""
        begin = time.monotonic()
        exchange = self.request.exchange
        result, error = None, None
        try:
            result = self._agreed(begin)
        except CoordinationError as err:
            error = err
        except Exception as err:  # an upload must never end a training process
            logger.exception("unickpt: rank %d: upload of %s", exchange.rank, self.pending.source)
            error = CoordinationError(f"{type(err).__name__}: {err}")
        with contextlib.suppress(Exception):
            self._files.close()
        if exchange.rank == 0:
            self._log_end(result, error)
        self.pending.end(result, error)
        with contextlib.suppress(CoordinationError):
            exchange.leave()

    def _agreed(self, begin: float) -> UploadResult:
        exchange = self.request.exchange
        opening = exchange.broadcast("upload", self._opening() if exchange.rank == 0 else None, notice=False)
        if opening["superseded"]:
            return UploadResult(committed=False, superseded=True)
        if opening["refused"] is not None:
            return UploadResult(committed=False, failures=(Failure.from_json(opening["refused"]),))
        generation = opening["generation"]
        name = RankFiles(exchange.rank, generation).data
        failure = self._send(name)
        messages = exchange.gather("sent", {"failure": None if failure is None else failure.to_json()})
        self.pending.written.set()
        verdict = exchange.broadcast(
            "verdict", None if messages is None else self._conclude(messages, generation), notice=False
        )
        if not verdict["committed"] and not verdict["uncertain"]:
            self._target.delete(name)
        return UploadResult(
            committed=verdict["committed"],
            failures=tuple(map(Failure.from_json, verdict["failures"])),
            size_bytes=verdict["size_bytes"],
            seconds=time.monotonic() - begin,
        )

    def _opening(self) -> Message:
        """Return what the coordinator announces. The other ranks wait for it, so it may be a refusal."""
        opening: Message = {"superseded": self._newer(), "generation": 0, "refused": None}
        if not opening["superseded"]:
            try:
                opening["generation"] = commit.next_generation(self._target, self.request.claim)
            except Exception as err:
                opening["refused"] = save_failure(err, 0).to_json()
        return opening

    def _send(self, name: str) -> Failure | None:
        """Upload the data file of this rank. Return the failure, or None."""
        if self._data is None:
            return self._cannot_open
        record = self.request.record
        try:
            pace, whole = Pace(self._bandwidth), RunningDigest()
            buffer = memoryview(bytearray(min(_CHUNK_BYTES, pace.batch_bytes, max(record.size_bytes, 1))))
            with self._target.create(name, about_bytes=record.size_bytes) as sink:
                for at in range(0, record.size_bytes, len(buffer)):
                    part = buffer[: record.size_bytes - at]
                    self._data.read_into([part], at)
                    whole.update(part)
                    sink.write([part])
                    pace.after(len(part))
                if whole.value() != record.checksum:
                    raise CorruptCheckpointError(
                        f"{self._data.path}: the checksum differs from the one of the save; the file is not copied"
                    )
        except Exception as err:
            return save_failure(err, self.request.exchange.rank)
        return None

    def _conclude(self, messages: list[Message], generation: int) -> Message:
        """Commit the copy if every rank has sent its file, and return the verdict. Runs on the coordinator."""
        failures = [message["failure"] for message in messages if message["failure"] is not None]
        verdict: Message = {"committed": False, "uncertain": False, "failures": failures, "size_bytes": 0}
        if failures:
            return verdict
        request = self.request
        with contextlib.ExitStack() as guard:
            own = writing_copy(request.one_writer, request.exchange.world)
            try:
                verdict["size_bytes"] = self._publish(generation, lambda: guard.enter_context(guarded(request.target, own)))
                verdict["committed"] = True
            except Exception as err:
                verdict["uncertain"] = isinstance(err, UncertainCommitError)
                failures.append(save_failure(err, 0).to_json())
                return verdict
            self._follow()
        return verdict

    def _publish(self, generation: int, proceed: Callable[[], None]) -> int:
        """Write index and manifest of the copy. Return the size of all files except the manifest."""
        if self._manifest is None or self._index is None:
            raise StorageError("" if self._cannot_open is None else self._cannot_open.text)
        table = bytearray(self._manifest.file(self._manifest.index).size_bytes)
        self._index.read_into([memoryview(table)], 0)
        copied, index = commit.with_generation(self._manifest, bytes(table), generation, where=self._index.path)
        data = [record for record in copied.files if record.path != copied.index]
        for record, size in zip(data, self._target.sizes_bytes([record.path for record in data]), strict=True):
            if size != record.size_bytes:
                raise StorageError(f"{self._target.where(record.path)}: found {size} bytes, expected {record.size_bytes}")
        if self.request.claim is not None:
            commit.check_structure(self._target, self.request.claim, Origin.of(copied).structure)
        commit.publish(self._target, copied, index, proceed=proceed)
        return sum(record.size_bytes for record in copied.files)

    def _follow(self) -> None:
        """Update ``latest`` and call ``on_commit`` after a commit."""
        request = self.request
        try:
            if request.save_latest:
                open_storage(request.target).write_atomic(LATEST_FILE, request.tag.encode())
            if request.on_commit is not None:
                request.on_commit(self.pending.target)
        except Exception as err:  # the copy is committed
            logger.warning(
                "unickpt: %s is uploaded, but the step after the commit failed (%s: %s)",
                self.pending.target,
                type(err).__name__,
                err,
            )

    def _log_end(self, result: UploadResult | None, error: CoordinationError | None) -> None:
        pending = self.pending
        if result is not None and result.committed:
            logger.info(
                "unickpt: uploaded %s to %s: %s bytes in %.2f s",
                pending.source, pending.target, f"{result.size_bytes:,}", result.seconds,
            )  # fmt: skip
        elif result is not None and result.superseded:
            logger.warning(
                "unickpt: %s is not uploaded: a newer checkpoint waits (saves are more frequent than uploads)",
                pending.source,
            )
        else:
            cause = sentence(() if result is None else result.failures) if error is None else str(error)
            logger.warning(
                "unickpt: %s is NOT uploaded to %s (%s). The local checkpoint is complete; the next save is uploaded again.",
                pending.source,
                pending.target,
                cause,
            )


def tags_of(uploads: list[PendingUpload], save_dir: str) -> set[str]:
    """Return the names of the checkpoints in a folder whose upload is pending."""
    places = (split(upload.source) for upload in uploads)
    return {name for folder, name in places if folder == save_dir}
