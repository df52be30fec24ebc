"""Options, request, result and counters of saves, and the handle of a pending save."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real

from unickpt.base.errors import ConfigError, CoordinationError, UnsafePathError
from unickpt.base.io_times import IoTime
from unickpt.base.options.job import Options, check
from unickpt.checkpoint.checkpoint_folder import plain_tag
from unickpt.checkpoint.coordination.failure import Failure, FailureKind, sentence
from unickpt.checkpoint.coordination.message_exchange import Message
from unickpt.checkpoint.coordination.owners import Claim
from unickpt.checkpoint.coordination.pending import Pending
from unickpt.checkpoint.save.failure import FRAMEWORK_SAVES, NOTHING_SAVES
from unickpt.checkpoint.save.retention import Retention
from unickpt.checkpoint.save.shards import Contribution
from unickpt.checkpoint.save.upload import PendingUpload
from unickpt.checkpoint.storage.base import absolute, join, resolved


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """Options of all saves of a job.

    Attributes:
        asynchronous: return after the copy. Otherwise a save returns when the checkpoint is durable or has failed.
        on_busy: behaviour of a save that begins while another is being written: ``wait`` for it, ``skip`` the new
            save, or ``queue`` the new save with a second copy, if the budget allows.
        staging_bytes: maximum host memory for copies. State beyond it is written before the save returns. None:
            as much as the state needs.
        pinned_staging: copy from CUDA devices in the background, into locked memory.
        copy_behind_training: with ``asynchronous``, copy what only a step of the optimizer changes after the call, until the
            next step.
        bandwidth_bytes_per_s: limit of the write bandwidth per rank. None: no limit.
        direct_io: write data files with O_DIRECT if the file system supports it.
        grace_s: seconds that SIGTERM waits for pending saves. At a normal exit this rank first writes its file,
            then waits so long for the other ranks.
        retention: which checkpoints stay in ``save_dir`` after a commit.
        upload_to: URL or path to which every committed checkpoint is copied in the background, or ''.

    Raises:
        ConfigError: a value has a wrong type, is negative, or is not one of the words of ``on_busy``.
    """

    asynchronous: bool = False
    on_busy: str = "wait"
    staging_bytes: int | None = None
    pinned_staging: bool = True
    copy_behind_training: bool = True
    bandwidth_bytes_per_s: float | None = None
    direct_io: bool = True
    grace_s: float = 25.0
    retention: Retention = field(default_factory=Retention)
    upload_to: str = ""

    def __post_init__(self) -> None:
        check(on_busy=self.on_busy)
        for name in ("staging_bytes", "bandwidth_bytes_per_s", "grace_s"):
            value = getattr(self, name)
            if not (value is None and name != "grace_s") and not (isinstance(value, Real) and float(value) >= 0):
                raise ConfigError(f"{name} must be a number, at least 0, not {value!r}")
        if not isinstance(self.retention, Retention):
            raise ConfigError(f"retention must be a Retention, not {self.retention!r}")
        if self.upload_to:  # the working directory may change before the upload begins
            object.__setattr__(self, "upload_to", absolute(self.upload_to))


def save_options(options: Options, *, asynchronous: bool) -> SaveOptions:
    """Return the save options of a job. ``asynchronous``: return from a save after the copy, in place of ``async_save``."""
    staging, bandwidth = options.staging_gigabytes * 1e9, options.write_megabytes_per_second * 1e6
    return SaveOptions(
        asynchronous=asynchronous,
        on_busy=options.on_busy,
        staging_bytes=None if math.isinf(staging) else int(staging),
        pinned_staging=options.pinned_staging,
        copy_behind_training=options.copy_behind_training,
        bandwidth_bytes_per_s=None if math.isinf(bandwidth) else bandwidth,
        direct_io=options.direct_io,
        grace_s=options.grace_seconds,
        retention=Retention(options.keep_last, options.keep_every),
        upload_to=options.upload_to,
    )


@dataclass(frozen=True, slots=True)
class SaveResult:
    """Result of a save, the same on every rank except for the times.

    Attributes:
        committed: the checkpoint exists.
        skipped: the save was skipped because another was being written and ``on_busy`` is ``skip``.
        failures: why there is no checkpoint; at most one per rank, in rank order.
        shortfall: what failed although the checkpoint is committed (such as the update of 'latest'), or ''.
        size_bytes: size of all files except the manifest; 0 unless committed.
        seconds: wall time on this rank, from the call to the commit.
        stall_s: the part of ``seconds`` in which training on this rank was blocked.
        times: phases of the save on this rank.
    """

    committed: bool
    skipped: bool = False
    failures: tuple[Failure, ...] = ()
    shortfall: str = ""
    size_bytes: int = 0
    seconds: float = 0.0
    stall_s: float = 0.0
    times: tuple[IoTime, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether the checkpoint is committed and durable and, if requested, named by ``latest``."""
        return self.committed and not self.shortfall

    @property
    def framework_saves(self) -> bool:
        """Whether another attempt would fail in the same way, so that only the save of the framework can succeed."""
        kinds = {failure.kind for failure in self.failures}
        return bool(kinds & FRAMEWORK_SAVES) and not kinds & NOTHING_SAVES

    @property
    def unsupported(self) -> str:
        """Why the state cannot be described as a universal checkpoint, or ''."""
        return next((failure.text for failure in self.failures if failure.kind is FailureKind.UNSUPPORTED), "")

    def has(self, kind: FailureKind) -> bool:
        """Return whether a rank has a failure of this kind."""
        return any(failure.kind is kind for failure in self.failures)


@dataclass
class SaveCounts:
    """Counters of the saves of one rank, for its metrics. ``stall_s`` and ``size_bytes`` are sums over committed saves."""

    committed: int = 0
    skipped: int = 0
    unsupported: int = 0
    failed: int = 0
    stall_s: float = 0.0
    size_bytes: int = 0

    def add(self, result: SaveResult | None) -> None:
        """Count a finished save. The result is None if the ranks could not agree."""
        if result is not None and result.committed:
            self.committed += 1
            self.stall_s += result.stall_s
            self.size_bytes += result.size_bytes
        elif result is not None and result.skipped:
            self.skipped += 1
        elif result is not None and result.unsupported:
            self.unsupported += 1
        else:
            self.failed += 1


@dataclass
class SaveRequest:
    """Request for one save.

    Attributes:
        contribute: returns the part of this rank; receives the announcement of the coordinator.
        save_dir, tag: the checkpoint is ``<save_dir>/<tag>``, a path or a URL. A relative path is resolved at once. A tag that
            leads out of ``save_dir`` is the failure of this rank.
        save_latest: update ``<save_dir>/latest``.
        announce: returns a message of the coordinator that all ranks receive before they contribute.
        early: begins ``contribute`` with what does not depend on that message. The other ranks call it before they wait for
            the message. If it raises, ``contribute`` raises the same.
        forget: releases what the three functions above keep for each other. It is called when the call of the save ends.
        one_writer: the checkpoints of ``save_dir`` are those of one training, so that only one copy of the job may write there.
        must_match: further arguments of the call by name, which must be equal on all ranks.
        claim: of the model to the directory. The save of another model is not replaced.
        framework_stands_in: the caller can save the same state in another way. After a save that failed for an
            unexpected reason, such requests are refused without another attempt.
        failed: exception that this rank raised before it knew the other fields. The rank still takes part, so that
            the other ranks do not wait for it.
        on_commit: called on the coordinator with the directory of the committed checkpoint, before other ranks learn
            of the commit. After an upload it is called again with the location of the copy.
        on_end: called on every rank when ``result`` or ``error`` is known, in the thread that knows it.
    """

    contribute: Callable[[Message], Contribution]
    save_dir: str
    tag: str
    save_latest: bool = False
    announce: Callable[[], Message] | None = None
    early: Callable[[], None] | None = None
    forget: Callable[[], None] | None = None
    one_writer: bool = False
    must_match: Message = field(default_factory=dict)
    claim: Claim | None = None
    framework_stands_in: bool = True
    failed: BaseException | None = None
    on_commit: Callable[[str], None] | None = None
    on_end: Callable[[PendingSave], None] | None = None

    def __post_init__(self) -> None:
        self.save_dir = absolute(self.save_dir)
        if self.failed is None:
            try:
                self.tag = plain_tag(self.tag, self.save_dir)
            except UnsafePathError as err:  # the other ranks learn it in the save
                self.failed, self.tag = err, ""

    @property
    def directory(self) -> str:
        return absolute(join(self.save_dir, self.tag))

    @property
    def place(self) -> Message:
        """The directory for other ranks. Of ``save_dir`` and its other name ``resolved``, one may differ between ranks."""
        return {"save_dir": self.save_dir, "resolved": resolved(self.save_dir), "tag": self.tag}

    @property
    def arguments(self) -> Message:
        """The arguments that must be equal on all ranks, but for what may differ in a ``place``."""
        return {**self.place, **self.must_match}


class PendingSave(Pending[SaveResult]):
    """Handle of one save of this rank, which may be pending.

    Attributes:
        directory: directory of the checkpoint.
        rank: this rank.
        stall_s: duration of the call in seconds.
        agreed: all ranks have described their parts and proceed to write them.
        background: the save continues in a thread after the call has returned.
        upload: upload of this checkpoint, or None; set before the save ends.
    """

    def __init__(self, directory: str, rank: int, counts: SaveCounts) -> None:
        super().__init__()
        self.directory, self.rank, self._counts = directory, rank, counts
        self.stall_s = 0.0
        self.agreed = self.background = False
        self.upload: PendingUpload | None = None

    def cause(self) -> str:
        """Return why there is no checkpoint, or which step after the commit failed."""
        if self.error is not None:
            return f"{type(self.error).__name__}: {self.error}"
        if self.result is None:
            return "it is still being written"
        if self.result.skipped:
            return "the previous save was still being written"
        return self.result.shortfall or sentence(self.result.failures)

    def end(
        self,
        result: SaveResult | None,
        error: CoordinationError | None = None,
        notify: Callable[[PendingSave], None] | None = None,
    ) -> None:
        """Store the result. The saver calls this once."""
        self._known(result, error)
        self._counts.add(result)
        try:
            if notify is not None:
                with contextlib.suppress(Exception):  # an error of the callback does not affect the save
                    notify(self)
        finally:  # also after Ctrl-C: later saves and the end of the process wait for this one
            self._over.set()
