"""What a checkpoint says of the checks, and which checkpoint a roll-back needs. No save writes it yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unickpt.base.errors import FormatError


@dataclass(frozen=True, slots=True)
class Passed:
    """The member ``witness`` of a manifest.

    Attributes:
        passed_until: last step that passed all checks on all ranks; 0: none.
        checks: names of the checks, ascending.
    """

    passed_until: int
    checks: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"passed_until": self.passed_until, "checks": list(self.checks)}


def passed_of(value: Any, *, where: str) -> Passed | None:
    """Return the record of a parsed JSON value; None for None, which says that no witness ran.

    Raises:
        FormatError: it is no such object. ``where`` names the file.
    """
    if value is None:
        return None
    until, checks = (value.get("passed_until"), value.get("checks")) if isinstance(value, dict) else (None, None)
    if type(until) is not int or not 0 <= until < 2**62:
        raise FormatError(f"{where}: member 'witness' must have a step 'passed_until', not {until!r}")
    if not isinstance(checks, list) or not all(isinstance(each, str) for each in checks):
        raise FormatError(f"{where}: member 'witness' must have a list of names 'checks', not {checks!r}")
    return Passed(until, tuple(sorted(checks)))


def passed_by_all(last_passed: Mapping[int, Mapping[str, int]], checks: Iterable[str]) -> Passed:
    """Return the record of a job.

    Args:
        last_passed: of each rank, the last step that passed each check.
        checks: the checks of the job.
    """
    names = tuple(sorted(checks))
    steps = [of_rank.get(name, 0) for of_rank in last_passed.values() for name in names]
    return Passed(min(steps, default=0), names)


def needed(checkpoints: Sequence[tuple[int, str]], passed_until: int) -> str | None:
    """Return the checkpoint that must not be deleted: the newest one that is not after the last passed step.

    A fault that is found later may have begun just after this step, so every newer checkpoint may have its traces.

    Args:
        checkpoints: complete checkpoints, ``(step, name)``.
        passed_until: last step that passed all checks on all ranks.
    """
    return max((each for each in checkpoints if each[0] <= passed_until), default=(0, None))[1]


def roll_back(checkpoints: Sequence[tuple[int, str]], last_passed: Mapping[str, int], accused: Iterable[str]) -> str | None:
    """Return the newest checkpoint that is not after the last passed step of each accused host; None if there is none.

    Args:
        checkpoints: complete checkpoints, ``(step, name)``.
        last_passed: last step that each host passed. A host that is missing has passed none.
        accused: hosts.
    """
    return needed(checkpoints, min((last_passed.get(host, 0) for host in accused), default=0))
