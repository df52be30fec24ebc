"""What came of one kind of fault, counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.jobs.faults.state import Resumed

NEWEST = "new checkpoint complete and resumed"
PREVIOUS = "new checkpoint absent, previous one resumed"
UNNAMED = "new checkpoint complete, `latest` could not be written, previous one resumed"


@dataclass
class Tally:
    """Outcomes of one fault.

    Attributes:
        fault, how: what it is, and how it is made.
        outcomes: kind -> how often.
        wrong: resumes that gave other bits than those of their step. Must stay empty.
        deaths: trainings that a save ended, or that hung. Must stay empty.
        lost: a checkpoint that was committed could no longer be resumed. Must stay empty.
        notes: what else is to be told, such as where the faults hit.
    """

    fault: str
    how: str
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return self.outcomes.total()

    @property
    def bad(self) -> list[str]:
        return [*self.wrong, *self.deaths, *self.lost]

    def judge(self, found: Resumed, *, at_least: int | None, newest: int | None, where: str) -> None:
        """Count one resume.

        Args:
            found: by ``state.resume``.
            at_least: step of the last checkpoint that was known to be committed.
            newest: step of the save that the fault met.
            where: names the case.
        """
        if found.wrong:
            self.wrong.append(f"{where}: {found}")
        if at_least is not None and (found.step is None or found.step < at_least):
            self.lost.append(f"{where}: at least step {at_least} was committed, {found}")
        if found.step is None:
            self.outcomes["no checkpoint yet, nothing resumed"] += 1
        else:
            self.outcomes[NEWEST if found.step == newest else PREVIOUS] += 1

    def add(self, before: dict[str, Any]) -> None:
        """Add the counts of another run, from its ``to_json``."""
        assert before["fault"] == self.fault
        self.outcomes.update(before["outcomes"])
        self.wrong += before["wrong"]
        self.deaths += before["deaths"]
        self.lost += before["lost"]
        self.notes = together([*before["notes"], *self.notes])

    def to_json(self) -> dict[str, object]:
        return {"fault": self.fault, "how": self.how, "count": self.count, "outcomes": dict(self.outcomes), "wrong": self.wrong,
                "deaths": self.deaths, "lost": self.lost, "notes": self.notes}  # fmt: skip


def spread(places: Counter[str], limit: int = 14) -> str:
    """Where the faults hit, the most frequent first."""
    shown = ", ".join(f"{place} {count}" for place, count in places.most_common(limit))
    return shown + (f", {len(places) - limit} more places" if len(places) > limit else "")


_COUNTED = re.compile(r"(.+?) (\d+)(?:, |$)")


def together(notes: Sequence[str]) -> list[str]:
    """Return notes, with the counts of those added that say how often the same thing happened where (``spread``)."""
    counts: dict[str, Counter[str]] = {}
    for note in notes:
        head, _, rest = note.partition(": ")
        places = _COUNTED.findall(rest)
        whole = ", ".join(f"{place} {count}" for place, count in places) == rest
        counts.setdefault(head if whole else note, Counter()).update({place: int(count) for place, count in places if whole})
    return [f"{head}: {spread(places)}" if places else head for head, places in counts.items()]
