"""The history of the benchmarks: one line per run, and a comparison of the last two runs of each row."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.questions import Result, tracked

HISTORY = Path(__file__).resolve().parent.parent / "results" / "benchmarks-history.jsonl"
Spread = tuple[float, float, float]  # median, smallest and largest ratio of the rounds


def record(results: Sequence[Result], about: dict[str, Any]) -> dict[str, Any]:
    """Return the line of a run. ``about``: date, machine and versions."""
    found = {key: [round(f(of), 4) for f in (statistics.median, min, max)] for key, of in tracked(results)}
    return {**about, "ratios": found}


def append(line: dict[str, Any], path: Path = HISTORY) -> None:
    """Add a run to the history, unless all of it failed."""
    if not line["ratios"]:
        return
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def read(path: Path = HISTORY) -> list[dict[str, Any]]:
    """Return all runs, the oldest first."""
    return [json.loads(line) for line in path.read_text().splitlines() if line] if path.is_file() else []


def worse(before: Spread, now: Spread) -> bool:
    """Return whether a ratio grew by more than the spread: each median is outside the range of the other run."""
    return now[0] > before[2] and before[0] < now[1]


def compare(runs: Sequence[dict[str, Any]]) -> str:
    """Return a text table with the last two runs of every row side by side, and a mark where a ratio got worse.

    A run may have some rows only. The two runs of a row are the last two that have it.
    """
    keys = dict.fromkeys(key for run in reversed(runs) for key in run["ratios"])
    lines, marks = [], 0
    width = max((len(key) for key in keys), default=0)
    for key in sorted(keys):
        last = [(run["date"], tuple(run["ratios"][key])) for run in runs if key in run["ratios"]][-2:]
        cells = [f"{_text(of)} {date:<10.10}" for date, of in last]
        mark = ""
        if len(last) == 2:
            (_, before), (_, now) = last
            mark = "WORSE" if worse(before, now) else "better" if worse(now, before) else ""
            marks += mark == "WORSE"
        else:
            cells.insert(0, "-".ljust(len(cells[0])))
        lines.append(f"{key:<{width}}  {'  '.join(cells)}  {mark}".rstrip())
    about = [(run["date"], run["machine"], ", ".join(map(" ".join, run["versions"].items()))) for run in runs[-2:]]
    return "\n".join(
        [*map("; ".join, about), "", *lines, "", f"{marks} of {len(keys)} ratios got worse by more than the spread."]
    )


def _text(of: Spread) -> str:
    return f"{of[0]:8.3f} ({of[1]:.3f} to {of[2]:.3f})".ljust(30)
