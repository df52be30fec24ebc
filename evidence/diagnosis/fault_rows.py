"""What the log of a job tells of a fault, and the rows of the tables of faults."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from unickpt.base.errors import FormatError
from unickpt.diagnosis.reports.verdict_line import VerdictLine, parse_line

COLUMNS = ("named", "cause", "host", "place", "action")
_ORDER = re.compile(r"steering: order: ((?:park|restart|stop)\b[^\n]*)")
_NEAR = 4  # lines of a verdict that may stand apart from each other, with those of other processes between them


@dataclass(frozen=True)
class Told:
    """A verdict in a log: its line, the sentence, and what to do next."""

    line: VerdictLine
    sentence: str
    next: str


@dataclass(frozen=True)
class Row:
    """What was right in one job, with the line and the order. ``None``: there is no such thing."""

    case: str
    named: bool
    cause: bool
    host: bool
    place: bool | None
    action: bool
    line: str
    next: str
    order: str
    seconds: float


def told_in(text: str) -> Iterator[Told]:
    """Yield the verdicts in a log."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if " unickpt " in f" {line}":
            with contextlib.suppress(FormatError):
                found = parse_line(line)
                after = [each.partition("unickpt: ")[2] for each in lines[number + 1 : number + _NEAR] if "unickpt: " in each]
                sentence = next((each for each in after if not each.startswith("next: ")), "")
                hint = next((each for each in after if each.startswith("next: ")), "")
                yield Told(found, sentence, hint.removeprefix("next: "))


def orders_in(text: str) -> list[str]:
    """Return the orders in a log of an agent that has given them."""
    return list(dict.fromkeys(_ORDER.findall(text)))


def right(row: dict[str, Any]) -> bool:
    """Return whether all columns of a row are right."""
    return all(row[column] in (True, None) for column in COLUMNS)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of a page, and how many rows are right."""
    lines = [f"| fault | {' | '.join(COLUMNS)} | order | s |", f"|---|{'---|' * (len(COLUMNS) + 2)}"]
    shown = {True: "yes", False: "**no**", None: "-"}
    for row in rows:
        marks = " | ".join(shown[row[column]] for column in COLUMNS)
        seconds = f"{row['seconds']:.0f}" if row["seconds"] else "-"
        lines.append(f"| {row['case']} | {marks} | {row['order'] or 'none'} | {seconds} |")
    return "\n".join([*lines, "", f"All right in {sum(map(right, rows))} of {len(rows)} jobs."])
