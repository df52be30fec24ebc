"""What is told: a syndrome, who has it, since when, and what shows it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field


class Syndrome(enum.Enum):
    """C4's four (arXiv 2406.04594, section 4), and the two kinds of hang that are nobody's hardware."""

    COMMUNICATION_HANG = "communication hang"
    NON_COMMUNICATION_HANG = "non-communication hang"
    COMMUNICATION_SLOW = "communication slow"
    NON_COMMUNICATION_SLOW = "non-communication slow"
    MISMATCH = "mismatched collectives"
    DEADLOCK = "deadlock between groups"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One finding.

    Attributes:
        syndrome: what it is.
        ranks: at fault, by their global numbers; of a mismatch, those that differ from most.
        link: source and destination, if it is one link.
        communicator: name of the one in question, '' if there is none.
        seq: number of the collective there (of the pair's call, if there is a link), 0 if there is none.
        since_ns: the earliest moment that shows it, on the clock that the records were put on.
        victims: how many ranks wait because of it.
        confidence: 0 to 1.
        cause: ``data``, ``garbage collection``, ``compute``, ``communication`` or ``checkpoint``; '' if nothing tells.
        evidence: sentences, the most telling one first.
    """

    syndrome: Syndrome
    ranks: tuple[int, ...]
    since_ns: int
    communicator: str = ""
    seq: int = 0
    link: tuple[int, int] | None = None
    victims: int = 0
    confidence: float = 1.0
    cause: str = ""
    evidence: tuple[str, ...] = field(default_factory=tuple)


def some(ranks: Sequence[int]) -> str:
    """The first of many ranks, for a sentence."""
    return ", ".join(map(str, sorted(ranks)[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def counted(ranks: Sequence[int], verb: str = "") -> str:
    """Ranks, and what they do: 'rank 3 waits', 'ranks 4, 5 wait'."""
    one = len(ranks) == 1
    return f"rank{'s' * (not one)} {some(ranks)}" + (f" {verb}{'s' * one}" if verb else "")
