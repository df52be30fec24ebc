"""The order of a rank's calls, and what usually comes after its newest ones.

Steps repeat. The longest piece of earlier calls that is like the newest ones shows which call should come next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unickpt.diagnosis.recording.records import Op
from unickpt.diagnosis.snapshot.snapshot import Calls
from unickpt.diagnosis.snapshot.steps import StepRows

CallKey = tuple[int, ...]  # of calls that are alike: communicator, source, destination, operation, data type, shape
_KEY = ["comm", "source", "destination", "op", "dtype", "shape"]
_ALIKE = 12  # newest calls that are compared
FEWEST = 2  # of them that must be like earlier ones
_AHEAD = 64  # calls that a rank may have left out


@dataclass(frozen=True, slots=True)
class CallCounts:
    """Attributes: calls of one kind that a rank, and another one, have made since the begin of a step."""

    made: int
    of: int
    since_step: int


class CallOrder:
    """The newest calls of every rank."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def place(self, rank: int, comm: int, seq: int) -> tuple[Sequence[CallKey], int]:
        """Return the keys of a rank's calls, and the position of one of its collectives among them; -1 if it is not there."""
        own = self._calls[self._calls["rank"] == rank]
        own = own[np.lexsort((own["seq"], own["call_ns"]))]
        at = np.flatnonzero((own["comm"] == comm) & (own["seq"] == seq) & (own["source"] < 0))
        return [tuple(key) for key in own[_KEY].tolist()], int(at[-1]) if len(at) else -1

    def comes_as_before(self, rank: int, comm: int, seq: int) -> bool:
        """Return whether a call comes where it came earlier."""
        keys, at = self.place(rank, comm, seq)
        usual = usual_after(keys[:at]) if at >= 0 else []
        return bool(usual) and usual[0] == keys[at]

    def is_new(self, comm: int, op: Op, seq: int) -> bool:
        """Return whether no rank is known to have made a call of this operation in a communicator before call ``seq``."""
        calls = self._calls
        return not ((calls["comm"] == comm) & (calls["op"] == op) & (calls["seq"] < seq) & (calls["source"] < 0)).any()

    def left_out(self, rank: int, own: tuple[int, int], other_rank: int, other: tuple[int, int]) -> tuple[bool, int]:
        """Compare a rank's call with that of another rank.

        Args:
            rank: rank whose earlier calls show the order.
            own: communicator and number of its call.
            other_rank: rank in the other call.
            other: communicator and number of that call.

        Returns:
            Whether the other call comes next by the order of ``rank``, and how many calls ``rank`` has left out; 0 if its own
            call does not follow in that order.
        """
        keys, at = self.place(rank, *own)
        theirs, there = self.place(other_rank, *other)
        if at < 0 or there < 0:
            return False, 0
        usual = usual_after(keys[:at])
        if not usual or usual[0] != theirs[there] or usual[0] == keys[at]:
            return False, 0
        return True, usual.index(keys[at]) if keys[at] in usual else 0

    def made(self, rank: int, other_rank: int, comm: int, op: Op, steps: StepRows) -> CallCounts | None:
        """Return how many calls of an operation in a communicator two ranks have made since the first step known of both.

        None without such a step. The oldest calls of a rank may be lost in the middle of a step.
        """
        both = [self._calls[self._calls["rank"] == each] for each in (rank, other_rank)]
        if not all(len(calls) for calls in both):
            return None
        begins: list[dict[int, int]] = []
        for each, calls in zip((rank, other_rank), both, strict=True):
            own = steps[(steps["rank"] == each) & (steps["begin_ns"] >= calls["call_ns"].min())]
            begins.append(dict(own[["number", "begin_ns"]].tolist()))
        common = begins[0].keys() & begins[1].keys()
        if not common:
            return None
        first = min(common)
        counts = [
            int(((calls["comm"] == comm) & (calls["op"] == op) & (calls["call_ns"] >= begin[first])).sum())
            for calls, begin in zip(both, begins, strict=True)
        ]
        return CallCounts(counts[0], counts[1], first)


def usual_after(keys: Sequence[CallKey]) -> list[CallKey]:
    """Return the calls that came after the newest earlier piece that is like the end of ``keys``; empty without one."""
    best, length = -1, FEWEST - 1
    for end in range(len(keys) - 1, 0, -1):
        same = 0
        while same < min(_ALIKE, end) and keys[end - 1 - same] == keys[len(keys) - 1 - same]:
            same += 1
        if same > length:
            best, length = end, same
        if length >= _ALIKE:
            break
    return list(keys[best : best + _AHEAD]) if best >= 0 else []
