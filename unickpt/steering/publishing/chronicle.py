"""History of the job, as this agent sees it: entries for the file of the history and for whoever else is given them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from unickpt.base.logs import logger, printable
from unickpt.base.private_files import append, file_name, make_named_folder, open_regular
from unickpt.diagnosis.recording.ring_folder import fresh_folder
from unickpt.steering.policy.reports import HubReport
from unickpt.steering.state.history import LONGEST_LINE, HistoryEntry, Kind, entries, entry_of, line_of
from unickpt.steering.state.membership import JobPhase, Membership
from unickpt.steering.wire.outbox import Outbox

SUFFIX = ".history.jsonl"
ALIVE_S = 60.0
KEPT = 10_000  # entries that metrics are made from
CLOSE_S = 2.0
Take = Callable[[HistoryEntry], None]


class Chronicle:
    """Makes entries from the states and reports that this agent sees. No method raises or waits, but ``close``.

    Args:
        takers: functions that take each entry. They must neither wait nor raise.
        clock: seconds since the epoch.
        reporters: functions that take each report and its time, in the same way.
    """

    def __init__(
        self,
        takers: Sequence[Take],
        clock: Callable[[], float] = time.time,
        reporters: Sequence[Callable[[HubReport, float], None]] = (),
    ) -> None:
        self._takers, self._clock, self._reporters = (self._keep, *takers), clock, tuple(reporters)
        self._lock = threading.Lock()
        self._kept: deque[HistoryEntry] = deque(maxlen=KEPT)
        self._state: Membership | None = None
        self._moved: tuple[tuple[int, int], int, float] = ((0, 0), 0, 0.0)  # round, its last step, and when it was new
        self._runs = (0, 0)  # round that runs
        self._failed = False

    def changed(self, before: Membership | None, after: Membership) -> None:
        """Take a new state of the job."""
        try:
            found = entries(before, after, time.monotonic(), self._clock())
            with self._lock:
                epoch, step, moved_s = self._moved
                self._state = after
                self._runs = after.round.epoch if after.round is not None and after.phase is JobPhase.RUNNING else (0, 0)
            for entry in found:
                if entry.kind in (Kind.ENDED, Kind.CLOSED) and entry.epoch == epoch and step:
                    self._tell(HistoryEntry(Kind.STEP, entry.at_s, epoch, step=step, furthest=after.furthest, moved_s=moved_s))
                self._tell(entry)
        except Exception as err:
            self._warn(err)

    def reported(self, report: HubReport) -> None:
        """Take a report about the running round: the time of its last step is known exactly only here."""
        with self._lock:
            epoch, step, _ = self._moved
            if report.epoch != epoch or report.step > step:
                self._moved = (report.epoch, report.step, self._clock())
        try:
            for take in self._reporters:
                take(report, self._clock())
        except Exception as err:
            self._warn(err)

    def alive(self) -> None:
        """Add a sign of life, with the last step."""
        with self._lock:
            (epoch, step, moved_s), runs = self._moved, self._runs
        same = epoch == runs
        self._tell(
            HistoryEntry(Kind.ALIVE, self._clock(), runs, step=step if same else 0, moved_s=moved_s if same and step else 0.0)
        )

    def known(self) -> tuple[Membership | None, list[HistoryEntry]]:
        """Return the newest state, and the newest entries by time, the last of them up to date."""
        with self._lock:
            (epoch, step, moved_s), found = self._moved, list(self._kept)
            if step and epoch == self._runs:
                found.append(HistoryEntry(Kind.ALIVE, self._clock(), epoch, step=step, moved_s=moved_s))
            return self._state, sorted(found, key=lambda entry: entry.at_s)

    def _keep(self, entry: HistoryEntry) -> None:
        if entry.kind is not Kind.ALIVE:
            with self._lock:
                self._kept.append(entry)

    def _tell(self, entry: HistoryEntry) -> None:
        for take in self._takers:
            take(entry)

    def _warn(self, err: Exception) -> None:
        if not self._failed:
            self._failed = True
            logger.warning(
                "unickpt: steering: the history has a gap. Training is not affected (%s: %s)",
                type(err).__name__,
                printable(str(err)[:200]),
            )


class HistoryFile:
    """File with the history that this agent keeps. The file appears with the first entry.

    Args:
        folder: folder that the user has named; '' for a new one in shared memory, below ``parent``.
        parent: shared memory.
        run_id: ``--rdzv-id``.
        host: name of this host.
        incarnation: identifier of this process.

    Attributes:
        folder: the folder.

    Raises:
        OSError: the folder cannot be created, or others can write to it.
    """

    def __init__(self, folder: str, parent: Path, run_id: str, host: str, incarnation: str) -> None:
        if folder:
            self.folder = Path(folder).absolute()
            make_named_folder(self.folder)
        else:
            self.folder = fresh_folder(parent, f"{run_id[:40]}-history")
        self._path = self.folder / f"{file_name(host)[:64]}-{incarnation}{SUFFIX}"
        self._chronicle: Chronicle | None = None
        self._outbox: Outbox[HistoryEntry] = Outbox("keeping the history", self._write, idle_s=ALIVE_S, idle=self._alive)

    def attend(self, chronicle: Chronicle) -> None:
        """Ask this chronicle for signs of life."""
        self._chronicle = chronicle

    def take(self, entry: HistoryEntry) -> None:
        """Add an entry. Never raises or waits."""
        self._outbox.put(entry)

    def close(self) -> None:
        """Write what waits."""
        self._outbox.close(CLOSE_S)

    def _write(self, entry: HistoryEntry) -> None:
        append(self._path, line_of(entry))

    def _alive(self) -> None:
        if self._chronicle is not None:
            self._chronicle.alive()


def is_history(folder: Path) -> bool:
    """Return whether a folder has files of a history."""
    return folder.is_dir() and any(folder.glob(f"*{SUFFIX}"))


def read_history(folder: Path) -> tuple[list[list[HistoryEntry]], list[str]]:
    """Return the entries of each file in a folder, and what could not be read.

    A last line without an end is being written, and is left out.
    """
    files, problems = [], []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        found, bad = [], 0
        try:
            with open_regular(path) as file:
                while line := file.readline(LONGEST_LINE):
                    try:
                        found += [entry_of(line)] if line.endswith(b"\n") else []
                    except ValueError:
                        bad += 1
        except OSError as err:
            problems.append(f"{path}: {err}")
        if bad:
            problems.append(f"{path}: {bad} lines are not entries of a history")
        files.append(found)
    return files, problems
