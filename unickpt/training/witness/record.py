"""What a job has passed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def passed_by_all(last_passed: Mapping[int, Mapping[str, int]], checks: Iterable[str]) -> tuple[int, tuple[str, ...]]:
    """Return the last step that passed all checks on all ranks, or 0, and the names of the checks, ascending.

    Args:
        last_passed: of each rank, the last step that passed each check.
        checks: the checks of the job.
    """
    names = tuple(sorted(checks))
    steps = [of_rank.get(name, 0) for of_rank in last_passed.values() for name in names]
    return min(steps, default=0), names
