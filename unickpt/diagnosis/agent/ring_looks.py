"""Looks at the rings of a host: how many records each reads, and whether the ranks have moved and ended."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np

from unickpt.diagnosis.host.process_exits import ExitWatcher
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.recording.records import Op, Records
from unickpt.diagnosis.recording.ring import RingReader
from unickpt.diagnosis.recording.ring_folder import HostRings, read_folder

RECORDS, FEWEST = 16_384, 256  # newest records of every rank that are read: most, fewest
_WITHOUT_STEPS = 2048  # fewest, while the length of a step is unknown
_ALL_LOOKS = 10  # of so many looks without a whole step, one reads RECORDS: steps may have become longer


class RingLooks:
    """Looks at the rings of a folder: each reads what may be new, and now and then more. Watches the processes, too.

    Attributes:
        exits: ends of the processes of the ranks.
        moved: whether every rank has made a call between the last look and the one before.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._looks, self.moved = folder, 0, False
        self._before: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._steps: deque[int] = deque(maxlen=_ALL_LOOKS)  # of each look: records of the longest step that was seen whole
        self._readers: dict[Path, RingReader] = {}
        self.exits = ExitWatcher()

    def read(self) -> HostRings:
        """Look once.

        Raises:
            UnickptError, OSError: there is no readable ring.
        """
        step = max(self._steps, default=0)
        whole = not step and self._looks % _ALL_LOOKS == 0
        last = RECORDS if whole else window(self._before, self._numbers, step)
        job = read_folder(self._folder, last=last, readers=self._readers)
        self._looks += 1
        self._steps.append(max((_longest_step(ring.records) for ring in job.ranks.values()), default=0))
        self.exits.watch(
            ring.identity.pid for rank, ring in job.ranks.items() if job.states[rank] not in (State.DEAD, State.UNKNOWN)
        )
        self._before = self._numbers
        self._numbers = {rank: int(ring.records["begun"].max(initial=0)) for rank, ring in job.ranks.items()}
        self.moved = all(number > self._before.get(rank, number) for rank, number in self._numbers.items())
        return job


def _longest_step(records: Records) -> int:
    """Return the largest number of records from the end of one step to that of the next; 0 if none is whole."""
    ends = records["begun"][records["op"] == Op.STEP]
    return int(np.diff(ends).max(initial=0))


def window(before: dict[int, int], now: dict[int, int], step: int) -> int:
    """Return how many records the next look reads: twice the number that came since the last one, and two whole steps.

    Args:
        before: number of the newest record of each rank, at the look before the last.
        now: the same at the last look.
        step: records of the longest step; 0 if unknown.
    """
    new = max((number - before.get(rank, 0) for rank, number in now.items()), default=RECORDS)
    return min(max(2 * (new + step), FEWEST if step else _WITHOUT_STEPS), RECORDS)


def over(job: HostRings) -> bool:
    """Return whether all ranks of this host have ended."""
    return all(job.states[rank] is State.DEAD or ring.closed for rank, ring in job.ranks.items())
