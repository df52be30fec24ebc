"""Ranks of this host that are asked where they are, because others wait for them: their stacks, and whether they move."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from unickpt.diagnosis.host import stack_dumps
from unickpt.diagnosis.host.movement import ProcessSample, Traffic, same_place_s, sample, still_s
from unickpt.diagnosis.host.stack_dumps import Frame
from unickpt.diagnosis.snapshot.snapshot import Snapshot
from unickpt.diagnosis.snapshot.stacks import can_answer, stacks_of, with_early_stacks

_STACK_S, _EAGER_LOOKS = 10.0, 10  # interval between requests for the stack of a rank, after one at each of the first looks
_SAMPLES = 4096  # looks at the movement of a rank that are kept


class AskedRanks:
    """Stacks and movement of the ranks that were asked at the last look.

    Args:
        folder: folder of the rings.
        movement: whether to look at the movement of ranks that others wait for.

    Attributes:
        traffic: bytes that ranks have sent and received.
    """

    def __init__(self, folder: Path, *, movement: bool) -> None:
        self._folder, self._movement, self.traffic = folder, movement, Traffic()
        self._stacks: dict[int, tuple[tuple[Frame, ...], float]] = {}
        self._moves: dict[int, deque[ProcessSample]] = {}
        self._starting: tuple[float, dict[int, tuple[Frame, ...]]] = -_STACK_S, {}  # when stacks were asked for, by process

    def ask(self, ranks: Sequence[int], own: Snapshot) -> bool:
        """Ask ranks of this host for their stacks; return whether any was asked."""
        self._stacks = {rank: found for rank, found in self._stacks.items() if rank in ranks}
        self._moves = {rank: found for rank, found in self._moves.items() if rank in ranks}
        wanted: dict[int, int] = {}
        for rank in ranks:
            one = own.ranks.get(rank)
            if one is None:
                continue
            eager = self._movement and len(self._moves.get(rank, ())) < _EAGER_LOOKS
            if eager or rank not in self._stacks or time.monotonic() - self._stacks[rank][1] > _STACK_S:
                wanted[rank] = one.pid
        if wanted:
            found = stacks_of(self._folder, own, wanted)
            self._stacks |= {rank: (stack, time.monotonic()) for rank, stack in found.items()}
        for rank in ranks if self._movement else ():
            if rank in own.ranks and can_answer(own.ranks[rank]):
                self._sample(rank, own.ranks[rank].pid)
        return bool(wanted)

    def _sample(self, rank: int, pid: int) -> None:
        """Look at the movement of a rank. What it writes because it is asked for its stack does not count."""
        try:
            written = stack_dumps.path_of(self._folder, rank).stat().st_size
        except OSError:
            written = 0
        taken = sample(pid, time.monotonic(), self._stacks[rank][0], written, self.traffic.of(rank))
        if taken is not None:
            self._moves.setdefault(rank, deque(maxlen=_SAMPLES)).append(taken)

    def stacks(self) -> dict[int, tuple[Frame, ...]]:
        """Return the stacks of the ranks that were asked."""
        return {rank: stack for rank, (stack, _) in self._stacks.items()}

    def stood(self, rank: int) -> tuple[float, float]:
        """Return for how many seconds a rank has not moved, and has been in one place; 0 for ranks that were not asked."""
        moves = self._moves.get(rank, ())
        return (still_s(moves), same_place_s(moves)) if moves else (0.0, 0.0)

    def with_stacks(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot of a job with the stacks of the ranks that were asked."""
        ranks = {
            rank: dataclasses.replace(one, stack=self._stacks[rank][0]) if rank in self._stacks else one
            for rank, one in snapshot.ranks.items()
        }
        return dataclasses.replace(snapshot, ranks=ranks)

    def with_early_stacks(self, own: Snapshot) -> Snapshot:
        """Return the snapshot of this host with the stacks of ranks that have not begun, unless the job makes steps."""
        if not own.absent or len(own.steps):
            return own
        asked_s, before = self._starting
        if time.monotonic() - asked_s > _STACK_S:
            before = {one.pid: one.stack for one in with_early_stacks(own.absent).values()}
            self._starting = time.monotonic(), before
        absent = {rank: dataclasses.replace(one, stack=before.get(one.pid, ())) for rank, one in own.absent.items()}
        return dataclasses.replace(own, absent=absent)
