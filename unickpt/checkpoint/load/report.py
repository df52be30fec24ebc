"""The load report: the outcome for every tensor and every piece of non-tensor state."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from unickpt.base.errors import MismatchError
from unickpt.base.io_times import IoTime, of_load
from unickpt.base.logs import logger
from unickpt.checkpoint.load.reader import ReadStats

Outcome = Literal["restored", "cast", "set", "re-seeded", "recreated", "on other ranks", "left out"]
_CLEAN: tuple[Outcome, ...] = ("restored", "cast", "recreated", "on other ranks")
OUTCOMES: tuple[Outcome, ...] = ("restored", "cast", "set", "re-seeded", "recreated", "on other ranks", "left out")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor or one piece of non-tensor state.

    Attributes:
        name: parameter, buffer or object name.
        state: ``weight``, ``master``, an optimizer key, or ``object``.
        outcome: ``restored`` (bit for bit), ``cast`` (to another dtype, or from the master), ``set`` (translated from the
            counters of another framework), ``re-seeded`` (given a new, deterministic value), ``recreated`` (computed by the
            model itself, as in a job without a checkpoint; nothing is lost), ``on other ranks`` (held by
            other ranks only, such as those of another pipeline stage), ``left out``.
        reason: reason for an outcome other than ``restored``.
    """

    name: str
    state: str
    outcome: Outcome
    reason: str = ""


@dataclass
class LoadReport:
    """Report of a load.

    Attributes:
        source: description of the checkpoint, one line.
        target: description of the job, one line.
        entries: outcome for every tensor and every piece of non-tensor state.
        bytes_read: bytes read from storage on this rank.
        bytes_needed: bytes that the tensors of this rank needed.
        seconds: wall time on this rank.
        read_seconds: part of ``seconds`` spent in reading and checksums.
        bytes_gathered: bytes that this rank needed and other ranks of its host have read.
        gather_seconds: part of ``read_seconds`` in which this rank only copied these bytes, or waited for them.
        skipped: newer checkpoints that were skipped, each with the reason.
        notes: warnings that the saving job stored in the checkpoint.
    """

    source: str = ""
    target: str = ""
    entries: list[Entry] = field(default_factory=list)
    bytes_read: int = 0
    bytes_needed: int = 0
    seconds: float = 0.0
    read_seconds: float = 0.0
    bytes_gathered: int = 0
    gather_seconds: float = 0.0
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, state: str, outcome: Outcome, reason: str = "") -> None:
        """Add an entry."""
        self.entries.append(Entry(name, state, outcome, reason))

    def add_read(self, stats: ReadStats) -> None:
        """Add what a read has cost."""
        self.bytes_read += stats.bytes_read
        self.bytes_needed += stats.bytes_needed
        self.read_seconds += stats.seconds
        self.bytes_gathered += stats.bytes_gathered
        self.gather_seconds += stats.gather_seconds

    def io_times(self, step: int) -> tuple[IoTime, ...]:
        """Return the phases of the load of a checkpoint of this step, which ends now."""
        return of_load(
            max(step, 0), time.monotonic_ns(), seconds=self.seconds, read_seconds=self.read_seconds,
            gather_seconds=self.gather_seconds, bytes_read=self.bytes_read, bytes_gathered=self.bytes_gathered,
        )  # fmt: skip

    def require(self, keys: Iterable[tuple[str, str]], *, what: str) -> None:
        """Check that every given (name, state) has an entry. ``what``: description of them for the message.

        Raises:
            MismatchError: entries are missing. The message names up to ten.
        """
        known = {(entry.name, entry.state) for entry in self.entries}
        missing = sorted(set(keys) - known)
        if missing:
            listed = ", ".join(f"{name} ({state})" for name, state in missing[:10])
            raise MismatchError(f"{len(missing)} of {what} have no outcome: {listed}. Please report this as a bug.")

    def count(self) -> dict[Outcome, int]:
        """Return the number of entries for each outcome."""
        counts = Counter(entry.outcome for entry in self.entries)
        return {outcome: counts[outcome] for outcome in OUTCOMES}

    def lines(self, *, most: int = 12) -> list[str]:
        """Return the report as lines for a log: a heading, one line per state, one line per reason, at most so many reasons."""
        return [text for text, _ in self.told(most=most)]

    def told(self, *, most: int = 12) -> list[tuple[str, bool]]:
        """Return ``lines``, each with whether an operator needs it. Of a clean load that is the heading alone.

        Clean is what leaves the state of the job as it was saved: tensors that are restored, cast, or recreated.
        """
        counts = ", ".join(f"{count:,} {outcome}" for outcome, count in self.count().items() if count)
        out = [(f"resumed {self.source} into {self.target}: {counts or 'nothing'}, in {self.seconds:.1f} s", True)]
        out += [(f"skipped {line}", True) for line in self.skipped]
        out += [(f"  note of the saving job: {note}", True) for note in self.notes]
        for state, outcomes in self._by_state().items():
            parts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items() if count)
            out.append((f"  {state}: {parts}", False))
        reasons = Counter((e.outcome, e.reason) for e in self.entries if e.reason and e.outcome != "restored")
        for (outcome, reason), count in reasons.most_common(most):
            names = [e.name for e in self.entries if (e.outcome, e.reason) == (outcome, reason)][:3]
            more = f" and {count - len(names)} more" if count > len(names) else ""
            out.append((f"  {outcome}: {', '.join(names)}{more}: {reason}", outcome not in _CLEAN))
        if len(reasons) > most:
            changed = any(outcome not in _CLEAN for outcome, _ in reasons)
            out.append((f"  and {len(reasons) - most} more reasons, in the report object", changed))
        times = f"in {self.read_seconds:.2f} s; the load took {self.seconds:.2f} s"
        return [*out, (f"  {self.bytes_read:,} bytes read on this rank {times}", False)]

    def log(self) -> None:
        """Log the report: what an operator needs as ``INFO``, the rest as ``DEBUG``."""
        for text, needed in self.told():
            logger.log(logging.INFO if needed else logging.DEBUG, "unickpt: %s", text)

    def _by_state(self) -> dict[str, Counter[str]]:
        order = {"weight": 0, "master": 1, "object": 9}
        states = sorted({entry.state for entry in self.entries}, key=lambda s: (order.get(s, 5), s))
        return {state: Counter(e.outcome for e in self.entries if e.state == state) for state in states}

    def to_json(self) -> dict[str, Any]:
        """Return the whole report as JSON-compatible values."""
        return {
            "source": self.source,
            "target": self.target,
            "counts": self.count(),
            "bytes_read": self.bytes_read,
            "bytes_needed": self.bytes_needed,
            "seconds": self.seconds,
            "read_seconds": self.read_seconds,
            "skipped": self.skipped,
            "notes": self.notes,
            "entries": [{"name": e.name, "state": e.state, "outcome": e.outcome, "reason": e.reason} for e in self.entries],
        }
