"""What checkpoints say of the witness, which one a roll-back needs, and which ones a fault has made suspect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unickpt.base.errors import FormatError


@dataclass(frozen=True, slots=True)
class Passed:
    """The member ``witness`` of a manifest.

    Attributes:
        passed_until: last step that passed all checks on all ranks; 0: none.
        checks: names of the checks, ascending.
        faults: number of the faults of its folder from which the job had gone back.
    """

    passed_until: int
    checks: tuple[str, ...]
    faults: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"passed_until": self.passed_until, "checks": list(self.checks), "faults": self.faults}


def passed_of(value: Any, *, where: str) -> Passed | None:
    """Return the record of a parsed JSON value; None for None, which says that no witness ran.

    Raises:
        FormatError: it is no such object. ``where`` names the file.
    """
    if value is None:
        return None
    found = value if isinstance(value, dict) else {}
    until, checks, faults = found.get("passed_until"), found.get("checks"), found.get("faults", 0)
    for name, number in (("passed_until", until), ("faults", faults)):
        if not _is_count(number):
            raise FormatError(f"{where}: member 'witness' must have a whole number {name!r}, not {number!r}")
    if not isinstance(checks, list) or not all(isinstance(each, str) for each in checks):
        raise FormatError(f"{where}: member 'witness' must have a list of names 'checks', not {checks!r}")
    return Passed(until, tuple(sorted(checks)), faults)  # type: ignore[arg-type]  # a count


def passed_until(records: Iterable[Passed | None]) -> int:
    """Return the last step that a job has passed, by what its checkpoints say; 0: none."""
    return max((each.passed_until for each in records if each is not None), default=0)


def needed(checkpoints: Sequence[tuple[int, str]], until: int) -> str | None:
    """Return the checkpoint that must not be deleted: the newest one that is not after the last passed step.

    A fault that is found later may have begun just after this step, so every newer checkpoint may have its traces.

    Args:
        checkpoints: complete checkpoints, ``(step, name)``.
        until: last step that passed all checks on all ranks.
    """
    return max((each for each in checkpoints if each[0] <= until), default=(0, None))[1]


@dataclass(frozen=True, slots=True)
class WitnessFault:
    """A fault that the witness of a job has found.

    Attributes:
        after: last step that had passed. Later states may have traces of the fault.
        found: step of the check that has found it.
        text: the verdict.
        gone_back: a job has loaded a checkpoint since.
    """

    after: int
    found: int
    text: str
    gone_back: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return asdict(self)


def fault_of(value: Any, *, where: str) -> WitnessFault:
    """Return the fault of a parsed JSON value.

    Raises:
        FormatError: it is none. ``where`` names the file.
    """
    found = value if isinstance(value, dict) else {}
    fault = WitnessFault(found.get("after", -1), found.get("found", -1), found.get("text", ""), found.get("gone_back", False))
    if not _is_count(fault.after) or not _is_count(fault.found) or type(fault.text) is not str:
        raise FormatError(f"{where}: {value!r} is no fault that a witness has found")
    if type(fault.gone_back) is not bool:
        raise FormatError(f"{where}: {value!r} is no fault that a witness has found")
    return fault


def suspicion(step: int, record: Passed | None, faults: Sequence[WitnessFault]) -> WitnessFault | None:
    """Return the fault of which a checkpoint may have traces; None if there is none.

    Args:
        step: of the checkpoint.
        record: what it says of the witness.
        faults: of its folder, in the order in which they were found.
    """
    later = faults[0 if record is None else record.faults :]
    return next((fault for fault in reversed(later) if step > fault.after), None)


def suspicion_in_memory(step: int, faults: Sequence[WitnessFault]) -> WitnessFault | None:
    """Return the same of a checkpoint in memory: a job that goes back gives up the newer ones there."""
    return next((fault for fault in reversed(faults) if step > fault.after and not fault.gone_back), None)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62
