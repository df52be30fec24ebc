"""Members of a process group in a few numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


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
