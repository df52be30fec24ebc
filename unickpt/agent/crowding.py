"""Ranks whose processes want a processor and have none: what starvation looks like from outside."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from unickpt.timing.processes import waited_ns


class Crowding:
    """What part of the last looks each rank's main thread has waited for a processor.

    Args:
        over: looks that it goes back.
    """

    def __init__(self, over: int = 5) -> None:
        self._looks: deque[tuple[int, Mapping[int, int]]] = deque(maxlen=over + 1)

    def shares(self, now_ns: int, pids: Mapping[int, int]) -> dict[int, float]:
        """Add a look.

        Args:
            now_ns: on the monotonic clock.
            pids: rank -> its process, of ranks of this host that are there.

        Returns:
            rank -> 0 to 1; none for those that were not there at the oldest look that is kept.
        """
        waited = {rank: waited_ns(pid) for rank, pid in pids.items()}
        self._looks.append((now_ns, {rank: ns for rank, ns in waited.items() if ns is not None}))
        (then_ns, before), (_, now) = self._looks[0], self._looks[-1]
        span = now_ns - then_ns
        return {rank: min(max(ns - before[rank], 0) / span, 1.0) for rank, ns in now.items() if rank in before and span > 0}
