"""Task of one save on one rank after staging: write, report, commit, publish the result.

It runs in the training thread or in a thread of its own, with the same steps.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

from unickpt.base.errors import CoordinationError, UncertainCommitError, UnickptError
from unickpt.base.io_times import IoPhase, IoTime
from unickpt.base.logs import logger
from unickpt.base.round_folder import note_commit
from unickpt.base.thread_turns import short_turns
from unickpt.checkpoint.coordination.failure import Failure
from unickpt.checkpoint.coordination.message_exchange import Message, MessageExchange
from unickpt.checkpoint.fence import guarded, writing_copy
from unickpt.checkpoint.format import manifest as manifest_module
from unickpt.checkpoint.format.layout import LATEST_FILE, RankFiles
from unickpt.checkpoint.format.manifest import FileRecord
from unickpt.checkpoint.save import agreement, retention, staging
from unickpt.checkpoint.save import commit as commit_module
from unickpt.checkpoint.save.data_file import DataFile, Pace, create_data_file, write_rows
from unickpt.checkpoint.save.failure import save_failure
from unickpt.checkpoint.save.part import SavePart
from unickpt.checkpoint.save.requests import PendingSave, SaveOptions, SaveRequest, SaveResult
from unickpt.checkpoint.save.shards import Prepared
from unickpt.checkpoint.save.upload import PendingUpload, UploadRequest, tags_of
from unickpt.checkpoint.storage.base import Storage

_REMOVAL_S = 2.0  # limit for the removal of files at the end of a process; the storage may hang


class TaskOwner(Protocol):
    """Interface of the saver to its tasks."""

    @property
    def options(self) -> SaveOptions: ...

    @property
    def uploads(self) -> list[PendingUpload]: ...

    def open(self, where: str) -> Storage:
        """Return the storage of a path or URL."""

    def end_task(self, task: SaveTask, result: SaveResult | None) -> None:
        """Release the resources of the task and keep its failure."""

    def unlock(self, directory: str) -> None:
        """Release the lock of a checkpoint directory."""

    def log_notes(self, directory: str, notes: tuple[str, ...]) -> None:
        """Log differences between ranks in a committed checkpoint."""

    def upload(self, request: UploadRequest) -> PendingUpload:
        """Start the upload of a committed checkpoint."""


class AbandonedError(CoordinationError):
    """This save is abandoned because the process ends."""


@dataclass
class SaveTask:
    """The remaining steps of one save on this rank after all ranks have agreed to it."""

    owner: TaskOwner
    save: PendingSave
    request: SaveRequest
    storage: Storage
    names: RankFiles
    part: SavePart
    exchange: MessageExchange
    begin: float
    after: PendingSave | None
    record: FileRecord | None = None  # data file of this rank; None until it is written

    def __post_init__(self) -> None:
        self._gate = threading.Lock()
        self._times: list[IoTime] = []
        self._reported = self._publishing = self._abandoned = False

    def run(self) -> None:
        """Write, agree, commit.

        Raises:
            KeyboardInterrupt, SystemExit: this rank was interrupted; no files of the save remain.
        """
        try:
            with short_turns() if self.save.background else contextlib.nullcontext():
                self._run()
        except BaseException as err:
            if not self.save.done:  # Ctrl-C during the last steps, or once more
                self.owner.end_task(self, None)
                self.save.end(SaveResult(committed=False, failures=(save_failure(err, self.exchange.rank),)))
            raise

    def _run(self) -> None:
        result, error = None, None
        try:
            self._copy()
            if self.after is not None:  # ranks wait for each other within a save, so all use the same order
                self.after.wait()
            self._timed(IoPhase.STAGE, time.monotonic_ns() - self.part.stage_ns)
            begin_ns = time.monotonic_ns()
            message = self._write()
            self._timed(IoPhase.WRITE, begin_ns)
            self._step("_reported")
            self.save.written.set()
            result = self._agree(message)
        except CoordinationError as err:
            error = err
            self.abandon()
        except Exception as err:  # a save must never end a training process
            logger.exception("unickpt: rank %d: %s", self.exchange.rank, self.save.directory)
            error = CoordinationError(f"{type(err).__name__}: {err}")
            self.abandon()
        except BaseException as err:
            self._interrupted(err)
            raise
        committed = result is not None and result.committed
        self.owner.end_task(self, result)
        if committed:
            self._upload()
        self.save.end(result, error, self.request.on_end)
        if committed and not self.exchange.rank:
            note_commit()
        with contextlib.suppress(CoordinationError):
            self.exchange.leave()

    def abandon(self) -> bool:
        """Abandon the save and remove its files. Any thread may call this.

        Returns:
            Whether the checkpoint certainly does not exist. Otherwise this rank had reported its part, or was writing
            the manifest.
        """
        with self._gate:
            if self._publishing or (self._reported and self.exchange.rank):
                return False
            self._abandoned = True
        removal = threading.Thread(target=self._remove, name="unickpt-removal", daemon=True)
        try:
            removal.start()
            removal.join(_REMOVAL_S)
        except RuntimeError:  # the interpreter is shutting down and starts no threads
            self._remove()
        return True

    def _remove(self) -> None:
        self.owner.unlock(self.save.directory)
        if self.exchange.rank == 0:
            commit_module.remove_uncommitted_files(self.storage, self.names.generation)
        else:
            commit_module.remove_rank_files(self.storage, self.names)

    def _interrupted(self, err: BaseException) -> None:
        """End the save after Ctrl-C, and inform the waiting ranks."""
        failure = save_failure(err, self.exchange.rank)
        if self._publishing and not commit_module.is_committed(self.storage, self.names.generation):
            self._publishing = False
        absent = self.abandon()
        with contextlib.suppress(CoordinationError):
            if absent or self.exchange.rank == 0:
                self.exchange.abandon(str(failure))
        self.owner.end_task(self, None)
        self.save.end(SaveResult(committed=False, failures=(failure,)))

    def _timed(self, phase: IoPhase, begin_ns: int) -> None:
        """Note that a phase ends now."""
        prepared, background = self.part.prepared, self.save.background and phase is not IoPhase.STAGE
        size = {
            IoPhase.STAGE: 0 if self.part.buffer is None else staging.size_of(self.part.shards),
            IoPhase.WRITE: 0 if self.record is None else self.record.size_bytes,
        }.get(phase, 0)
        step = max(0, prepared.step or 0) if prepared is not None else 0
        self._times.append(IoTime(phase, step, begin_ns, time.monotonic_ns(), size, background))

    def _step(self, name: str) -> None:
        """Enter the next step. Raises AbandonedError if the save was abandoned."""
        with self._gate:
            if self._abandoned:
                raise AbandonedError(f"rank {self.exchange.rank}: the save was abandoned at the end of the process")
            setattr(self, name, True)

    def _copy(self) -> None:
        """Copy what is copied behind training, before anything that takes long."""
        try:
            self.part.ready()
        except Exception as err:
            self.part.failure = self.part.failure or save_failure(err, self.exchange.rank)

    def _write(self) -> Message:
        part = self.part
        if part.failure is not None:
            return {"failure": part.failure.to_json()}
        assert part.prepared is not None
        try:
            self.record = self._written(part.prepared)
            part.check()
            message: Message = {"failure": None, "file": asdict(self.record)}
            message |= agreement.message_of(part.prepared.different, part.prepared.replica)
            if self.exchange.rank and part.prepared.optimizer_part is not None:
                message["optimizer"] = asdict(part.prepared.optimizer_part)
            if self.exchange.rank and (part.prepared.aliases or part.prepared.excluded):
                message["names"] = [part.prepared.aliases, part.prepared.excluded]
            return message
        except Exception as err:
            return {"failure": save_failure(err, self.exchange.rank).to_json()}

    def _written(self, prepared: Prepared) -> FileRecord:
        if self.part.written is None:
            options = self.owner.options
            with create_data_file(self.storage, self.names.data, prepared.shards, direct=options.direct_io) as sink:
                pace = Pace(options.bandwidth_bytes_per_s)
                file = DataFile(
                    sink,
                    prepared.shards,
                    rank=self.exchange.rank,
                    step=prepared.step,
                    pace=pace,
                    header_bytes=self.part.header_bytes,
                )
                file.write(self.part.shards)
        else:
            begun, self.part.written = self.part.written, None
            file = begun.file
            with begun.stack:
                file.write(self.part.shards)
        if self._abandoned:
            raise AbandonedError(f"rank {self.exchange.rank}: the save was abandoned")
        write_rows(self.storage, self.names.rows, file.rows, prepared.tensors)
        return file.record(self.names.data)

    def _agree(self, message: Message) -> SaveResult:
        begin_ns = time.monotonic_ns()
        messages = self.exchange.gather("written", message)
        conclusion = None
        if messages is not None:
            conclusion = self._conclude(messages)
            if conclusion["committed"]:  # before any rank returns, and may copy the folder: the lock file goes
                self.owner.unlock(self.save.directory)
        verdict = self.exchange.broadcast("verdict", conclusion, notice=False)
        if self.exchange.rank == 0 and verdict["committed"]:
            busy = tags_of(self.owner.uploads, self.request.save_dir)
            try:
                retention.apply(self.request.save_dir, self.owner.options.retention, just_saved=self.request.tag, busy=busy)
            except (OSError, UnickptError) as err:
                logger.warning("unickpt: older checkpoints in %s were not removed: %s", self.request.save_dir, err)
        if not verdict["committed"] and not verdict["uncertain"]:
            commit_module.remove_rank_files(self.storage, self.names)
        self._timed(IoPhase.COMMIT, begin_ns)
        return SaveResult(
            committed=verdict["committed"],
            failures=tuple(map(Failure.from_json, verdict["failures"])),
            shortfall=verdict["shortfall"],
            size_bytes=verdict["size_bytes"],
            seconds=time.monotonic() - self.begin,
            stall_s=self.save.stall_s or time.monotonic() - self.begin,
            times=tuple(self._times),
        )

    def _conclude(self, messages: list[Message]) -> Message:
        """Commit if every rank has written, and return the verdict for all ranks. Runs on the coordinator."""
        failures = [message["failure"] for message in messages if message["failure"] is not None]
        verdict: Message = {"committed": False, "uncertain": False, "failures": failures, "shortfall": "", "size_bytes": 0}
        part = self.part.prepared
        if failures or part is None:
            return verdict
        try:
            files = [FileRecord(**message["file"]) for message in messages]
            parts = [manifest_module.optimizer_from_json(m["optimizer"]) for m in messages if m.get("optimizer")]
            part.optimizer = manifest_module.merge_optimizers(part.optimizer, parts)
            for aliases, excluded in (message["names"] for message in messages if message.get("names")):
                part.aliases = {**aliases, **part.aliases}
                part.excluded = tuple(dict.fromkeys((*part.excluded, *excluded)))
            part.notes = (*agreement.notes_of(messages), *agreement.notes_on_optimizer(part.optimizer))
            self._publish(files, part, verdict)
        except CoordinationError:
            raise
        except Exception as err:
            verdict["uncertain"] = isinstance(err, UncertainCommitError)
            failures.append(save_failure(err, 0).to_json())
            return verdict
        return verdict

    def _publish(self, files: list[FileRecord], part: Prepared, verdict: Message) -> None:
        """Commit, and write ``latest``, as the only copy of the job that writes there.

        Raises:
            FencedError: a copy of the job that was started later writes there.
            UnickptError: as ``commit``.
        """
        with contextlib.ExitStack() as guard:

            def proceed() -> None:
                guard.enter_context(guarded(self.request.save_dir, writing_copy(self.request.one_writer, self.exchange.world)))
                self._step("_publishing")

            made = commit_module.commit(
                self.storage, files, part, self.names.generation, proceed=proceed, claim=self.request.claim
            )
            verdict["committed"], verdict["size_bytes"] = True, made.size_bytes
            self.owner.log_notes(self.save.directory, part.notes)
            if made.at_risk:
                verdict["shortfall"] = (
                    f"{self.save.directory} is committed, but may not survive a crash of the machine: {made.at_risk}"
                )
            if self.request.save_latest:
                try:
                    self.owner.open(self.request.save_dir).write_atomic(LATEST_FILE, self.request.tag.encode())
                except Exception as err:  # the checkpoint is committed, and all ranks wait for the verdict
                    text = f"{self.save.directory} is committed, but 'latest' could not be updated: {err}"
                    verdict["shortfall"] = "; ".join(filter(None, [verdict["shortfall"], text]))
            if self.request.on_commit is not None:  # it may write a file like ``latest``
                _notify(self.request.on_commit, self.save.directory)

    def _upload(self) -> None:
        """Start the upload of the committed checkpoint, if configured."""
        target = self.owner.options.upload_to
        if not target:
            return
        assert self.record is not None  # set before every commit
        request, exchange = self.request, self.exchange.separate("upload")
        upload = UploadRequest(
            self.storage, target, request.tag, self.record, request.save_latest, exchange, request.on_commit,
            request.one_writer, request.claim,
        )  # fmt: skip
        try:
            self.save.upload = self.owner.upload(upload)
        except Exception:  # the checkpoint is committed
            logger.exception("unickpt: rank %d cannot start the upload of %s", self.exchange.rank, self.save.directory)


def _notify(on_commit: Callable[[str], None], directory: str) -> None:
    try:
        on_commit(directory)
    except Exception as err:  # the checkpoint is committed
        logger.warning(
            "unickpt: %s is saved, but the step after the commit failed (%s: %s)", directory, type(err).__name__, err
        )
