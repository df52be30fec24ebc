"""Members of process groups as arithmetic progressions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Progressions = tuple[tuple[int, int, int], ...]
MOST_RANKS = 1 << 20  # of the largest job that is accepted from untrusted data
MOST_MEMBERS = 1 << 24  # of all groups of a snapshot together
AXES = {"tensor": "tp", "pipeline": "pp", "data": "dp", "context": "cp", "expert": "ep", "sequence": "sp"}


def progressions(ranks: Sequence[int]) -> list[list[int]]:
    """Return ranks as ``[first, step, count]``. Groups of a large job need only a few of these."""
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
    """Return the ranks of progressions as a list."""
    return [first + step * at for first, step, count in parts for at in range(count)]


def expanded(parts: Progressions) -> npt.NDArray[np.int64]:
    """Return the ranks of progressions as an int64 array."""
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(count) * step + first for first, step, count in parts)])


def count_of(parts: Progressions) -> int:
    """Return the number of ranks."""
    return sum(count for _, _, count in parts)


def position(rank: int, parts: Progressions) -> int | None:
    """Return the position of a rank, from 0; None if it is not a member."""
    before = 0
    for first, step, count in parts:
        at, rest = divmod(rank - first, step) if step else (0, rank - first)
        if not rest and 0 <= at < count:
            return before + at
        before += count
    return None


def checked_progressions(parts: Any, world: int = MOST_RANKS) -> Progressions:
    """Check untrusted progressions before anything of that size is allocated.

    Raises:
        ValueError: ``parts`` are not progressions, or contain ranks that the job does not have.
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


def members_in(entry: Mapping[str, Any], world: int) -> Progressions:
    """Return the members of a group in the table of a rank, which is untrusted; none if they are not sound."""
    try:
        return checked_progressions(entry.get("ranks", []), world)
    except ValueError:
        return ()


def axis_of(label: str) -> str:
    """Return the short name of a kind of group: ``dp`` for ``data parallel``; '' if it has none."""
    return AXES.get(label.removesuffix(" parallel").removesuffix(" model"), "")


def coordinates(rank: int, groups: Iterable[tuple[str, Progressions]]) -> dict[str, int]:
    """Return a rank's place in the parallel layout: ``{"tp": 1, "pp": 0, "dp": 2}``.

    Args:
        rank: global rank.
        groups: name in the framework (``tensor model parallel``) and members of each group of the rank. The first group of a
            kind counts.
    """
    found: dict[str, int] = {}
    for label, parts in groups:
        axis = axis_of(label)
        if axis and axis not in found and count_of(parts) > 1:
            at = position(rank, parts)
            if at is not None:
                found[axis] = at
    return {axis: found[axis] for axis in AXES.values() if axis in found}
