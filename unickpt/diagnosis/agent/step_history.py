"""What the job's first agent remembers of the steps of a job over many looks."""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np

from unickpt.diagnosis.detectors.hangs import LONGEST_S
from unickpt.diagnosis.snapshot.snapshot import Snapshot, kept_steps
from unickpt.diagnosis.snapshot.steps import STEP

_LOOKS = 4096  # of which the waits for a processor are kept


class StepHistory:
    """Newest steps of every rank and the longest wait, beyond the records of one look.

    Attributes:
        deadline_s: last deadline. Longer waits were reported as hangs and do not count.
    """

    def __init__(self) -> None:
        self.deadline_s = LONGEST_S
        self._steps = np.zeros(0, STEP)
        self._pids: dict[int, int] = {}
        self._longest_ns = 0
        self._waits: deque[tuple[int, float]] = deque(maxlen=_LOOKS)

    def with_more(self, snapshot: Snapshot) -> Snapshot:
        """Return a snapshot with the steps and the longest wait of earlier ones."""
        pids = {rank: one.pid for rank, one in snapshot.ranks.items()}
        if any(self._pids.get(rank, pid) != pid for rank, pid in pids.items()):  # another job in the same folder
            self._steps, self._longest_ns = self._steps[:0], 0
            self._waits.clear()
        self._pids = pids
        every = np.concatenate([self._steps, snapshot.steps])
        every = every[np.lexsort((every["number"], every["rank"]))]
        if len(every):
            last = np.r_[(every["rank"][1:] != every["rank"][:-1]) | (every["number"][1:] != every["number"][:-1]), True]
            every = every[last]
            end = np.searchsorted(every["rank"], every["rank"], side="right")
            every = every[end - np.arange(len(every)) <= kept_steps(len(pids))]
        self._steps = every
        waits = [one.cpu_wait for one in snapshot.ranks.values()]
        begin_ns = int(every["begin_ns"].min()) if len(every) else snapshot.now_ns
        self._waits.append((snapshot.now_ns, float(np.median(waits)) if waits else 0.0))
        while self._waits[0][0] < begin_ns:
            self._waits.popleft()
        if snapshot.longest_wait_ns <= self.deadline_s * 1e9:
            self._longest_ns = max(self._longest_ns, snapshot.longest_wait_ns)
        return dataclasses.replace(snapshot, steps=every, longest_wait_ns=self._longest_ns, cpu_waits=tuple(self._waits))
