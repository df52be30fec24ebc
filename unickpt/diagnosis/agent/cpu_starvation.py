"""Fraction of time that ranks wait for a processor."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from unickpt.diagnosis.host.process_state import waited_ns


class CpuWaitSampler:
    """Measures how long each rank's main thread waits for a processor.

    Args:
        over: number of looks that a measurement covers.
    """

    def __init__(self, over: int = 5) -> None:
        self._looks: deque[tuple[int, Mapping[int, int]]] = deque(maxlen=over + 1)

    def shares(self, now_ns: int, pids: Mapping[int, int]) -> dict[int, float]:
        """Add a look.

        Args:
            now_ns: time on the monotonic clock.
            pids: process number of each living rank of this host.

        Returns:
            Fraction of time, 0 to 1, for each rank that was there at the oldest look that is kept.
        """
        waited = {rank: waited_ns(pid) for rank, pid in pids.items()}
        self._looks.append((now_ns, {rank: ns for rank, ns in waited.items() if ns is not None}))
        (then_ns, before), (_, now) = self._looks[0], self._looks[-1]
        span = now_ns - then_ns
        return {rank: min(max(ns - before[rank], 0) / span, 1.0) for rank, ns in now.items() if rank in before and span > 0}
