"""The benchmark page: made from the results, with a history that marks what got worse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import history, page, run
from benchmarks.questions import QUESTIONS, goals_table, table

RESULT = {
    "title": "two ranks", "ranks": 2, "mine": 100, "bytes": {"unickpt": 220, "DeepSpeed": 300},
    "seconds": {"memory copy": [1.0, 2.0, 1.0], "unickpt stall": [1.5, 2.0, 1.2], "DeepSpeed save": [15.0, 10.0, 24.0]},
}  # fmt: skip


def test_the_page_is_what_the_results_give() -> None:
    data = json.loads(run.DATA.read_text())
    for path, made in ((page.PAGE, run.body(data)), (page.MEMORY_PAGE, run.memory_body(data))):
        found = path.read_text().partition(page.BEGIN)[2].partition(page.END)[0]
        assert found.strip() == made.strip(), f"{path.name}: run python -m benchmarks.run --page-only"


def test_a_cell_has_the_median_and_the_ratios_within_rounds() -> None:
    line = table(QUESTIONS[0], [RESULT]).splitlines()[2]
    assert line == "| two ranks | 1.000 s | 1.500 s<br>1.20 (1.00 to 1.50) | 15.000 s<br>10.00 (5.00 to 20.00) |"


def test_a_goal_is_reached_or_missed_in_the_median_round() -> None:
    lines = goals_table(
        [RESULT, {**RESULT, "title": "slow", "seconds": {**RESULT["seconds"], "unickpt stall": [1.0, 1.1, 1.1]}}]
    )
    assert "| stall at most 1.15 memory copies plus 5 ms | 1 of 2 layouts | two ranks: 1.04 times the goal (1.500 s) |" in lines
    crowded = {**RESULT, "ranks": 4, "cores": 2}
    assert "stall" not in goals_table([crowded])
    assert "| 0 of 1 layouts |" in goals_table([crowded, {**RESULT, "ranks": 2, "cores": 2}])


@pytest.mark.parametrize(
    ("before", "now", "mark"),
    [
        ([1.0, 1.1, 1.2], [1.3, 1.4, 1.5], "WORSE"),
        ([1.3, 1.4, 1.5], [1.0, 1.1, 1.2], "better"),
        ([1.0, 1.1, 2.0], [1.3, 1.4, 1.5], ""),  # the new median is within the old range
        ([1.0, 1.1, 1.2], [1.0, 1.4, 1.5], ""),  # the old median is within the new range
    ],
)
def test_the_history_marks_what_got_worse_by_more_than_the_spread(
    tmp_path: Path, before: list[float], now: list[float], mark: str
) -> None:
    about = {"date": "2026-01-01", "machine": "2 cores", "versions": {"torch": "2"}}
    path = tmp_path / "history.jsonl"
    for stall in (before, now):
        seconds = {"memory copy": [1.0, 1.0, 1.0], "unickpt stall": stall}
        history.append(history.record([{"title": "two ranks", "seconds": seconds}], about), path)
    only_other = history.record([{"title": "four ranks", "seconds": {"raw write": [1.0], "unickpt committed": [2.0]}}], about)
    history.append(only_other, path)  # a run without this row: its last two runs are compared
    row = next(line for line in history.compare(history.read(path)).splitlines() if "two ranks" in line)
    assert row.split()[-1] == (mark or "2026-01-01")
