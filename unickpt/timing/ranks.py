"""Members of process groups: in a few numbers, and where a rank is among them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

Progressions = tuple[tuple[int, int, int], ...]
MOST_RANKS = 1 << 20  # of a job that is believed
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


def believable(parts: Any) -> Progressions:
    """What somebody says are progressions.

    Raises:
        ValueError: they are not, or are of ranks that no job has.
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
            or not 0 <= first < MOST_RANKS
            or not 0 <= first + step * (count - 1) < MOST_RANKS
            or total > MOST_RANKS
        ):
            raise ValueError(f"members of a group that are no ranks: {count} from {first} in steps of {step}")
    return found


def coordinates(rank: int, groups: Iterable[tuple[str, Sequence[int]]]) -> dict[str, int]:
    """A rank's place in the parallel layout: ``{"tp": 1, "pp": 0, "dp": 2}``.

    Args:
        rank: whose.
        groups: that it is in: what the framework calls them (``tensor model parallel``), and their members. Of groups of one
            kind the first counts.
    """
    found: dict[str, int] = {}
    for label, ranks in groups:
        axis = _AXES.get(label.removesuffix(" parallel").removesuffix(" model"))
        if axis is not None and axis not in found and len(ranks) > 1 and rank in ranks:
            found[axis] = list(ranks).index(rank)
    return {axis: found[axis] for axis in _AXES.values() if axis in found}
