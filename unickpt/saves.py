"""What a save is asked, told and counted by: options, request, result, and the save that is still going on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from unickpt.contribution import Contribution
from unickpt.coordination import Message
from unickpt.errors import CoordinationError
from unickpt.failures import FRAMEWORK_SAVES, Kind, SaveFailure, sentence
from unickpt.pending import Pending
from unickpt.retention import Retention
from unickpt.storage import absolute, join
from unickpt.uploading import PendingUpload

ON_BUSY = ("wait", "skip", "queue")


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How saves are made.

    Attributes:
        asynchronous: return after the copy. Otherwise a save returns when the checkpoint is durable, or has failed.
        on_busy: what a save does that begins while one is still being written: ``wait`` for it,
            ``skip`` itself, or ``queue`` behind it with a second copy, if the budget has room for one.
        staging_bytes: host memory for copies, at most; what a state has beyond it is written before
            the save returns. None: as much as the state needs.
        bandwidth_bytes_per_s: of writing, per rank. None: no limit.
        direct_io: write data files past the page cache, where the file system takes it.
        grace_s: how long SIGTERM waits for a save that was begun; an ordinary end of the process lets this
            rank write its file first, and waits that long for the other ranks.
        retention: which checkpoints stay in ``save_dir`` once this one is committed.
        upload_to: a URL or path where every committed checkpoint is copied to, behind training; '' for none.
    """

    asynchronous: bool = False
    on_busy: str = "wait"
    staging_bytes: int | None = None
    bandwidth_bytes_per_s: float | None = None
    direct_io: bool = True
    grace_s: float = 25.0
    retention: Retention = field(default_factory=Retention)
    upload_to: str = ""

    def __post_init__(self) -> None:
        if self.upload_to:  # the working directory may be another one when the upload begins
            object.__setattr__(self, "upload_to", absolute(self.upload_to))


@dataclass(frozen=True, slots=True)
class SaveResult:
    """How a save ended, the same on every rank.

    Attributes:
        committed: the checkpoint exists.
        skipped: another save was still being written, and ``on_busy`` is ``skip``.
        failures: why there is no checkpoint; at most one of each rank, in the ranks' order.
        shortfall: of a committed checkpoint, what did not succeed all the same ('latest' could not be written), or ''.
        size_bytes: bytes of all files (0 unless committed).
        seconds: wall time on this rank, from the call to the commit.
        stall_s: of these, how long this rank's training stood still.
    """

    committed: bool
    skipped: bool = False
    failures: tuple[SaveFailure, ...] = ()
    shortfall: str = ""
    size_bytes: int = 0
    seconds: float = 0.0
    stall_s: float = 0.0

    @property
    def complete(self) -> bool:
        """The checkpoint exists, will outlast a crash, and ``latest`` names it if it shall."""
        return self.committed and not self.shortfall

    @property
    def framework_saves(self) -> bool:
        """Another try would end the same way: the framework's own save is what can still make a checkpoint."""
        return any(failure.kind in FRAMEWORK_SAVES for failure in self.failures)

    @property
    def unsupported(self) -> str:
        """Why the layout cannot be described, or ''."""
        return next((failure.text for failure in self.failures if failure.kind == "unsupported"), "")

    def has(self, kind: Kind) -> bool:
        """Whether a rank failed for this reason."""
        return any(failure.kind == kind for failure in self.failures)


@dataclass
class SaveCounts:
    """What became of the saves of one rank, for its metrics; ``stall_s`` and ``size_bytes`` of the committed ones together."""

    committed: int = 0
    skipped: int = 0
    unsupported: int = 0
    failed: int = 0
    stall_s: float = 0.0
    size_bytes: int = 0

    def add(self, result: SaveResult | None) -> None:
        """Count a save that is over; None if the ranks could not agree."""
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
class Request:
    """A save that is asked for.

    Attributes:
        contribute: gives this rank's part; receives the coordinator's announcement.
        save_dir, tag: the checkpoint is ``<save_dir>/<tag>``; a path or a URL. A relative path is resolved at once.
        save_latest: whether ``<save_dir>/latest`` shall name it.
        announce: called on the coordinator: a message that all ranks receive before they contribute.
        alike: further arguments of the call by name, which have to be the same on all ranks.
        framework_stands_in: the caller has another way to save the same state. Once a state was found to be described
            wrongly, such requests are refused without another try.
        failed: what this rank has raised before it came to know the other fields. It takes part so that no rank waits for it.
        on_commit: on the coordinator, called with the checkpoint's directory when it exists and before any rank
            learns of it; then again with the place of its copy, if it was uploaded.
        on_end: on every rank, called when ``result`` or ``error`` is known, in the thread that knows it.
    """

    contribute: Callable[[Message], Contribution]
    save_dir: str
    tag: str
    save_latest: bool = False
    announce: Callable[[], Message] | None = None
    alike: Message = field(default_factory=dict)
    framework_stands_in: bool = True
    failed: BaseException | None = None
    on_commit: Callable[[str], None] | None = None
    on_end: Callable[[PendingSave], None] | None = None

    def __post_init__(self) -> None:
        self.save_dir = absolute(self.save_dir)

    @property
    def directory(self) -> str:
        return absolute(join(self.save_dir, self.tag))

    @property
    def arguments(self) -> Message:
        """What has to be the same on all ranks."""
        return {"save_dir": self.save_dir, "tag": self.tag, **self.alike}


class PendingSave(Pending[SaveResult]):
    """One save of this rank, which may still be going on.

    Attributes:
        directory: of the checkpoint.
        rank: this one.
        stall_s: how long the call took.
        agreed: all ranks have described their part, and go on to write it.
        background: the call returns, or has returned, before the save is over.
        upload: of this checkpoint, if there is to be one; set before the save is over.
    """

    def __init__(self, directory: str, rank: int, counts: SaveCounts) -> None:
        super().__init__()
        self.directory, self.rank, self._counts = directory, rank, counts
        self.stall_s = 0.0
        self.agreed = self.background = False
        self.upload: PendingUpload | None = None

    def cause(self) -> str:
        """Why there is no checkpoint, or what of it failed."""
        if self.error is not None:
            return f"{type(self.error).__name__}: {self.error}"
        if self.result is None:
            return "it is still being written"
        if self.result.skipped:
            return "the save before it was still being written"
        return self.result.shortfall or sentence(self.result.failures)

    def end(
        self,
        result: SaveResult | None,
        error: CoordinationError | None = None,
        tell: Callable[[PendingSave], None] | None = None,
    ) -> None:
        """Called once, by the saver."""
        self._known(result, error)
        self._counts.add(result)
        if tell is not None:
            with contextlib.suppress(Exception):  # it has nothing to decide
                tell(self)
        self._over.set()
