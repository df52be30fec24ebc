"""What an agent tells: lines of the training log, each once, and entries of the file of verdicts beside the rings."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unickpt.base.logs import printable
from unickpt.base.private_files import append
from unickpt.diagnosis.detectors.verdicts import Syndrome, Verdict
from unickpt.diagnosis.reports.start_text import start_notices
from unickpt.diagnosis.reports.verdict_text import VerdictText
from unickpt.diagnosis.snapshot.snapshot import RankSnapshot, Snapshot
from unickpt.diagnosis.snapshot.stacks import can_answer

PREFIX = "unickpt: "  # of lines for a person
VERDICTS = "verdicts.jsonl"  # beside the rings
PLACE_S = 3.5  # that a verdict waits to be told for the stack of a rank on another host
OF_PROGRAM = (Syndrome.MISMATCH, Syndrome.DEADLOCK)  # orders come at once, and end the ranks: not before their place is known
_HAS_PLACE = (Syndrome.NON_COMMUNICATION_HANG, Syndrome.NON_COMMUNICATION_SLOW, *OF_PROGRAM)
# Steps before a slow rank or link is reported. Links take longer: a late rank is known by then.
_LASTING_STEPS = {Syndrome.NON_COMMUNICATION_SLOW: 4, Syndrome.COMMUNICATION_SLOW: 8}
_AGAIN_S = 60.0  # a lasting verdict is written again
_GONE_S = 3.0  # a verdict that was absent for so long is new
_LONGEST = 4096  # characters of a line

Tell = Callable[[str], None]


def tell(line: str) -> None:
    """Write a line to the training log, which is the standard error of an agent."""
    print(printable(line), file=sys.stderr, flush=True)


def with_role(line: str, role: str) -> str:
    """Return a line of the log with the role of the ranks that it is about; unchanged without one."""
    if not role:
        return line
    return f"unickpt ({role}): {line.removeprefix(PREFIX)}" if line.startswith(PREFIX) else f"{line} role={role}"


def notice(text: str) -> None:
    """Write a line for a person to the training log."""
    tell(f"{PREFIX}{text}")


def place_comes(syndrome: Syndrome, asked: RankSnapshot | None) -> bool:
    """Return whether the place of a rank that is asked where it is will come."""
    return syndrome in _HAS_PLACE and asked is not None and can_answer(asked)


class Telling:
    """Tells findings that last, each once in a while.

    Args:
        folder: folder of the rings.
        tell: writes a line to the log.
    """

    def __init__(self, folder: Path, tell: Tell) -> None:
        self._folder, self._tell = folder, tell
        self._last_told: dict[str, float] = {}
        self._last_found: dict[str, float] = {}
        self._first_found: dict[str, float] = {}
        self._slow: dict[str, tuple[int, float]] = {}
        self._seen_once: set[str] = set()
        self._told_of_start: set[str] = set()

    def tell(self, line: str) -> None:
        """Write a line to the log. Names in it come from rings and from other hosts."""
        cut = line if len(line) <= _LONGEST else f"{line[:_LONGEST]}... ({len(line)} characters)"
        self._tell(printable(cut))

    def lasts(self, verdict: Verdict, step: int) -> bool:
        """Return whether a finding has lasted long enough: beside other work, every rank is slow for a moment.

        Args:
            verdict: a finding of this look.
            step: newest step of the job.
        """
        equal_sides = verdict.syndrome is Syndrome.MISMATCH and verdict.confidence < 1.0
        if verdict.syndrome is Syndrome.FAILED or equal_sides:
            # the status of the last process to end comes after the look at which it is dead, as do the calls of other hosts
            again = verdict.key in self._seen_once
            self._seen_once.add(verdict.key)
            return again
        if verdict.syndrome not in _LASTING_STEPS:
            return True
        now, key = time.monotonic(), verdict.key
        first, seen = self._slow.get(key, (step, now))
        if now - seen > _GONE_S or step < first:
            first = step
        self._slow[key] = (first, now)
        return step - first >= _LASTING_STEPS[verdict.syndrome]

    def once(self, key: str, text: VerdictText, *, awaits: bool = False) -> bool:
        """Tell a verdict unless it was told lately, or ``awaits`` its place; return whether it was."""
        now = time.monotonic()
        if now - self._last_found.get(key, -_GONE_S) > _GONE_S:
            self._last_told.pop(key, None)
            self._first_found[key] = now
        self._last_found[key] = now
        if awaits and self.is_new(key):
            return False
        for old in [known for known, at in self._last_found.items() if now - at > _AGAIN_S]:
            self._last_found.pop(old)
            self._first_found.pop(old, None)
            self._last_told.pop(old, None)
        if now - self._last_told.get(key, -_AGAIN_S) < _AGAIN_S:
            return False
        self._last_told[key] = now
        self.tell(text.line)
        self.tell(f"{PREFIX}{text.sentence}")
        if text.next:
            self.tell(f"{PREFIX}next: {text.next}")
        return True

    def is_new(self, key: str) -> bool:
        """Return whether there was no time yet to ask a rank on another host for its stack."""
        return time.monotonic() - self._first_found.get(key, 0.0) < PLACE_S

    def start(self, snapshot: Snapshot, *, whole: bool) -> None:
        """Tell once which ranks the others wait for that have not begun to record. ``whole``: as in ``start_notices``."""
        for key, (sentence, then) in start_notices(snapshot, whole=whole).items():
            if key not in self._told_of_start:
                self._told_of_start.add(key)
                self.tell(f"{PREFIX}{sentence}")
                self.tell(f"{PREFIX}next: {then}")

    def keep(self, entry: Mapping[str, Any], at_ns: int) -> None:
        """Add an entry to the file of verdicts."""
        with contextlib.suppress(OSError):
            append(self._folder / VERDICTS, f"{json.dumps({**entry, 'at_ns': at_ns})}\n".encode())
