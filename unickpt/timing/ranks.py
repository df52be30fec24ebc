"""Members of process groups: in a few numbers, and where a rank is among them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Progressions = tuple[tuple[int, int, int], ...]
MOST_RANKS = 1 << 20  # of a job that is believed
MOST_MEMBERS = 1 << 24  # of all groups of a view together
_AXES = {"tensor": "tp", "pipeline": "pp", "data": "dp", "context": "cp", "expert": "ep", "sequence": "sp"}


def progressions(ranks: Sequence[int]) -> list[list[int]]:
    """Ranks as ``[first, step, count]``: those of a large job's groups are a few of these."""
    found: list[list[int]] = []
    waiting = deque(ranks)
    while waiting:
        first = waiting.popleft()
        step = waiting[0] - first if waiting else 1
        count = 1
        while waiting and waiting[0] == first + count * step:
            waiting.popleft()
            count += 1
        found.append([first, step, count])
    return found


def members(parts: Sequence[Sequence[int]]) -> list[int]:
    """The ranks that ``progressions`` has made short."""
    return [first + step * at for first, step, count in parts for at in range(count)]


def expanded(parts: Progressions) -> npt.NDArray[np.int64]:
    """int64: the same as ``members``, for groups of any size."""
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(count) * step + first for first, step, count in parts)])


def count_of(parts: Progressions) -> int:
    """How many ranks they are."""
    return sum(count for _, _, count in parts)


def position(rank: int, parts: Progressions) -> int | None:
    """The place of a rank among them, from 0; None if it is not one of them."""
    before = 0
    for first, step, count in parts:
        at, rest = divmod(rank - first, step) if step else (0, rank - first)
        if not rest and 0 <= at < count:
            return before + at
        before += count
    return None


def believable(parts: Any, world: int = MOST_RANKS) -> Progressions:
    """What somebody says are progressions, checked before anything is as large as they say.

    Args:
        parts: from a ring, or from the network.
        world: ranks of the job.

    Raises:
        ValueError: they are not, or are of ranks that the job does not have.
    """
    try:
        found = tuple((int(first), int(step), int(count)) for first, step, count in parts)
    except (TypeError, OverflowError) as err:
        raise ValueError(f"members of a group that are no progressions: {err}") from None
    total = 0
    for first, step, count in found:
        total += max(count, 0)
        if (
            count < 1
            or (step == 0 and count > 1)
            or not 0 <= first < world
            or not 0 <= first + step * (count - 1) < world
            or total > world
        ):
            raise ValueError(f"members of a group that are no ranks: {count} from {first} in steps of {step}")
    return found


def coordinates(rank: int, groups: Iterable[tuple[str, Progressions]]) -> dict[str, int]:
    """A rank's place in the parallel layout: ``{"tp": 1, "pp": 0, "dp": 2}``.

    Args:
        rank: whose.
        groups: that it is in: what the framework calls them (``tensor model parallel``), and their members. Of groups of one
            kind the first counts.
    """
    found: dict[str, int] = {}
    for label, parts in groups:
        axis = _AXES.get(label.removesuffix(" parallel").removesuffix(" model"))
        if axis is not None and axis not in found and count_of(parts) > 1:
            at = position(rank, parts)
            if at is not None:
                found[axis] = at
    return {axis: found[axis] for axis in _AXES.values() if axis in found}
