"""One check and its result, and the table of all."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED, SKIPPED, MEASURED = "passed", "failed", "skipped", "measured"


class NotHereError(Exception):
    """A check that cannot be made here. The message is the reason."""


@dataclass
class Row:
    """One check.

    Attributes:
        group: group of checks.
        name: name in the group.
        on: device and backend that it ran on.
        goal: what it must show; '' if it only measures.
        status: ``passed``, ``measured`` (without a goal), ``failed``, or ``skipped``.
        values: what was measured, with the unit in the name.
        reason: why it failed or was skipped.
    """

    group: str
    name: str
    on: str
    goal: str = ""
    status: str = FAILED
    values: dict[str, float | int | str] = field(default_factory=dict)
    reason: str = ""

    def require(self, held: bool, otherwise: str) -> None:
        """Fail unless a condition holds."""
        if not held:
            self.reason = "; ".join(filter(None, [self.reason, otherwise]))


class Rows:
    """The rows of one group, written to a file one by one, so that what was measured before a crash is kept.

    Args:
        path: JSON lines; None on ranks that do not write.
        group: group of checks.
        on: device and backend.
        only: names of the checks to make; None for all.
    """

    def __init__(self, path: Path | None, group: str, on: str) -> None:
        self._path, self._group, self._on = path, group, on

    @contextlib.contextmanager
    def row(self, name: str, goal: str = "") -> Iterator[Row]:
        """Make one check. An exception inside fails it, and does not leave the block."""
        row = Row(self._group, name, self._on, goal)
        try:
            yield row
        except NotHereError as err:
            row.status, row.reason = SKIPPED, str(err)
        except Exception as err:
            traceback.print_exc()  # into the output of the ranks
            row.reason = f"{type(err).__name__}: {err}"[:600]
        else:
            row.status = FAILED if row.reason else PASSED if goal else MEASURED
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")


def read(path: Path) -> list[Row]:
    """Return the rows of a file."""
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.is_file() else []


def table(rows: Sequence[Row]) -> str:
    """Return all rows as Markdown."""
    lines = ["| check | on | result | measured | goal |", "|---|---|---|---|---|"]
    for row in rows:
        values = ", ".join(f"{name} {_short(value)}" for name, value in row.values.items())
        result = f"{row.status}: {row.reason}" if row.reason else row.status
        cells = [f"{row.group}: {row.name}", row.on, result, values, row.goal]
        lines.append("| " + " | ".join(" ".join(cell.replace("|", "/").split()) for cell in cells) + " |")
    return "\n".join(lines)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
