"""One save on one rank, from what is staged to the verdict: write, report, commit, say how it ended.

It runs in the thread of training, or behind it in one of its own; the steps are the same.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from unickpt import agreement, retention, staging
from unickpt import commit as commit_module
from unickpt import manifest as manifest_module
from unickpt.commit import LATEST_FILE, Names
from unickpt.contribution import Prepared, Shard
from unickpt.coordination import Message, Rendezvous
from unickpt.errors import CoordinationError, UncertainCommitError, UnickptError
from unickpt.failures import SaveFailure, failure_of
from unickpt.manifest import FileRecord
from unickpt.saves import PendingSave, Request, SaveResult
from unickpt.staging import StagingBuffer
from unickpt.storage import Storage, open_storage
from unickpt.uploading import Copy, tags_of
from unickpt.writing import DataFile, write_rows

if TYPE_CHECKING:
    from unickpt.saving import Saver

logger = logging.getLogger("unickpt")

_REMOVAL_S = 2.0  # what the end of a process grants to the removal of files, on a storage that may not answer


@dataclass
class Begun:
    """A data file that is open, with what did not fit into the staging budget written already."""

    stack: contextlib.ExitStack
    file: DataFile

    def abandon(self) -> None:
        with contextlib.suppress(Exception):
            self.stack.close()


@dataclass
class Part:
    """This rank's part of one save: what it was asked to write, or why it could not."""

    prepared: Prepared | None = None
    failure: SaveFailure | None = None
    interrupt: BaseException | None = None  # raised again once the other ranks can know of it
    written: Begun | None = None
    shards: list[Shard] = field(default_factory=list)  # that are still to be written
    ready: Callable[[], None] = staging.nothing_to_wait_for
    buffer: StagingBuffer | None = None
    staged: bool = False


class AbandonedError(CoordinationError):
    """The process ends, and this save with it."""


@dataclass
class SaveTask:
    """What is still to be done for one save on this rank once all ranks have agreed to make it."""

    saver: Saver
    save: PendingSave
    request: Request
    storage: Storage
    names: Names
    part: Part
    meet: Rendezvous
    begin: float
    after: PendingSave | None
    record: FileRecord | None = None  # of this rank's data file, once it is written

    def __post_init__(self) -> None:
        self._gate = threading.Lock()
        self._reported = self._publishing = self._abandoned = False

    def run(self) -> None:
        """Write, agree, commit.

        Raises:
            KeyboardInterrupt, SystemExit: as they came; nothing of the save is left.
        """
        result, error = None, None
        try:
            if self.after is not None:  # the same order on all ranks: each waits for the others within a save
                self.after.wait()
            message = self._write()
            self._step("_reported")
            self.save.written.set()
            result = self._agree(message)
        except CoordinationError as err:
            error = err
            self.abandon()
        except Exception as err:  # nothing of ours may end a training process
            logger.exception("unickpt: rank %d: %s", self.meet.rank, self.save.directory)
            error = CoordinationError(f"{type(err).__name__}: {err}")
            self.abandon()
        except BaseException as err:
            self._interrupted(err)
            raise
        committed = result is not None and result.committed
        self.saver.concluded(self, result)
        if committed:
            self._upload()
        self.save.end(result, error, self.request.on_end)
        with contextlib.suppress(CoordinationError):
            self.meet.part()

    def abandon(self) -> bool:
        """Give the save up, and remove what was written of it. Any thread may call this.

        Returns:
            Whether it surely has no checkpoint. If not, this rank had written its part, or was just writing the manifest.
        """
        with self._gate:
            if self._publishing or (self._reported and self.meet.rank):
                return False
            self._abandoned = True
        removal = threading.Thread(target=self._remove, name="unickpt-removal", daemon=True)
        try:
            removal.start()
            removal.join(_REMOVAL_S)
        except RuntimeError:  # the interpreter is ending and begins no more threads
            self._remove()
        return True

    def _remove(self) -> None:
        self.saver.let_go(self.save.directory)
        if self.meet.rank == 0:
            commit_module.forget_all(self.storage, self.names.generation)
        else:
            commit_module.forget(self.storage, self.names)

    def _interrupted(self, err: BaseException) -> None:
        """Ctrl-C while training waits for the save: no other rank waits for this one in vain."""
        failure = failure_of(err, self.meet.rank)
        gone = self.abandon()
        with contextlib.suppress(CoordinationError):
            if gone or self.meet.rank == 0:
                self.meet.abandon(str(failure))
        self.saver.concluded(self, None)
        self.save.end(SaveResult(committed=False, failures=(failure,)))

    def _step(self, name: str) -> None:
        """Go on to the next step, unless the save was abandoned meanwhile."""
        with self._gate:
            if self._abandoned:
                raise AbandonedError(f"rank {self.meet.rank}: the save was given up at the end of the process")
            setattr(self, name, True)

    def _write(self) -> Message:
        part = self.part
        if part.failure is not None:
            return {"failure": part.failure.to_json()}
        assert part.prepared is not None
        try:
            part.ready()
            self.record = self._written(part.prepared)
            message: Message = {"failure": None, "file": asdict(self.record)}
            message |= agreement.message_of(part.prepared.different, part.prepared.replica)
            if self.meet.rank and part.prepared.optimizer_part is not None:
                message["optimizer"] = asdict(part.prepared.optimizer_part)
            return message
        except Exception as err:
            return {"failure": failure_of(err, self.meet.rank).to_json()}

    def _written(self, prepared: Prepared) -> FileRecord:
        if self.part.written is None:
            with self.saver.data_file(self.storage, self.names, prepared) as sink:
                file = DataFile(sink, prepared.shards, rank=self.meet.rank, step=prepared.step, pace=self.saver.pace())
                file.write(self.part.shards)
        else:
            begun, self.part.written = self.part.written, None
            file = begun.file
            with begun.stack:
                file.write(self.part.shards)
        if self._abandoned:
            raise AbandonedError("given up")
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
                busy = tags_of(self.saver.uploads, self.request.save_dir)
                retention.apply(self.request.save_dir, self.saver.options.retention, just_saved=self.request.tag, busy=busy)
        if not verdict["committed"] and not verdict["uncertain"]:
            commit_module.forget(self.storage, self.names)
        return SaveResult(
            committed=verdict["committed"],
            failures=tuple(map(SaveFailure.from_json, verdict["failures"])),
            shortfall=verdict["shortfall"],
            size_bytes=verdict["size_bytes"],
            seconds=time.monotonic() - self.begin,
            stall_s=self.save.stall_s or time.monotonic() - self.begin,
        )

    def _conclude(self, messages: list[Message]) -> Message:
        """On the coordinator: commit if every rank has written, otherwise say why not."""
        failures = [message["failure"] for message in messages if message["failure"] is not None]
        verdict: Message = {"committed": False, "uncertain": False, "failures": failures, "shortfall": "", "size_bytes": 0}
        part = self.part.prepared
        if failures or part is None:
            return verdict
        try:
            files = [FileRecord(**message["file"]) for message in messages]
            parts = [manifest_module.optimizer_from_json(m["optimizer"]) for m in messages if m.get("optimizer")]
            part.optimizer = manifest_module.merge_optimizers(part.optimizer, parts)
            part.notes = agreement.notes_of(messages)
            made = commit_module.commit(
                self.storage, files, part, self.names.generation, proceed=lambda: self._step("_publishing")
            )
        except CoordinationError:
            raise
        except Exception as err:
            verdict["uncertain"] = isinstance(err, UncertainCommitError)
            failures.append(failure_of(err, 0).to_json())
            return verdict
        verdict["committed"], verdict["size_bytes"] = True, made.size_bytes
        self.saver.tell(self.save.directory, part.notes)
        if not made.durable:
            verdict["shortfall"] = f"{self.save.directory} is committed, but may not outlast a crash of the machine"
        if self.request.save_latest:
            try:
                open_storage(self.request.save_dir).write_atomic(LATEST_FILE, self.request.tag.encode())
            except Exception as err:  # the checkpoint is there, and all ranks wait to hear of it
                verdict["shortfall"] = f"{self.save.directory} is committed, but 'latest' could not be updated: {err}"
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


def _notify(on_commit: Callable[[str], None], directory: str) -> None:
    try:
        on_commit(directory)
    except Exception as err:  # the checkpoint is there
        logger.warning("unickpt: %s is saved, but what should follow failed (%s: %s)", directory, type(err).__name__, err)
