"""Results of runs with a fault: the file that keeps them, and the table and the goals of the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from evidence.steering.jobs import SETTINGS
from evidence.steering.readings import seconds
from evidence.steering.scenarios import RETURN, RETURNED, SCENARIOS

GOAL_STARTED_S = 5.0
BEGIN, FINISH = (
    "<!-- table: made by python -m evidence.steering.framework_faults -->\n\n",
    "\n<!-- end of framework table -->",
)


@dataclass(frozen=True)
class Run:
    """Result of one run. Times are seconds.

    Attributes:
        scenario, framework, seed: what was run.
        rank, host, step: of the fault.
        right: whether exactly the right hosts were out, and no order was wrong.
        repaired: whether the job went on.
        equal: whether all states after the resume were those of the checkpoint.
        samples: whether every step had the samples of the uninterrupted job.
        loss, noise: largest distance from the reference, and within it.
        verdict_s: from the fault to the first verdict.
        order_s: from the first verdict to the order.
        started_s: from the order, or else from the fault, until the last worker of the next round began.
        import_s: import of the framework.
        resumed_s: from then until all workers had resumed.
        first_s: from then until all had done a step, without the comparison with the checkpoint.
        whole_s: from the fault to that step.
        problem: what was wrong.
        lost_steps: steps that were done again.
    """

    scenario: str
    framework: str
    seed: int
    rank: int
    host: str
    step: int
    right: bool
    repaired: bool
    equal: bool
    samples: bool
    loss: float
    noise: float
    verdict_s: float | None = None
    order_s: float | None = None
    started_s: float | None = None
    import_s: float | None = None
    resumed_s: float | None = None
    first_s: float | None = None
    whole_s: float | None = None
    problem: str = ""
    lost_steps: int | None = None

    @property
    def good(self) -> bool:
        """Whether everything was as it must be."""
        return not self.problem


def kept(path: Path) -> list[Run]:
    """Return the runs in a file."""
    lines = path.read_text().splitlines() if path.exists() else []
    names = {each.name for each in fields(Run)}
    return [Run(**{key: value for key, value in json.loads(line).items() if key in names}) for line in lines]


def table(runs: Sequence[Run]) -> str:
    """Return one row for each fault, and one for each job, as two Markdown tables."""
    faults = [
        "| fault | jobs | runs | right | fault -> verdict | -> order | -> workers started | fault -> first step | "
        "steps done again, most |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in [*SCENARIOS, RETURN]:
        if those := [run for run in runs if run.scenario == name]:
            title = SCENARIOS[name].title if name in SCENARIOS else RETURNED
            jobs = ", ".join(each for each in SETTINGS if any(run.framework == each for run in those))
            lost = max((run.lost_steps for run in those if run.lost_steps is not None), default="-")
            times = _times(those, ("verdict_s", "order_s", "started_s", "whole_s"))
            faults.append(f"| {title} | {jobs} | {len(those)} | {sum(run.good for run in those)} | {times} | {lost} |")
    by_job = ["| job | runs | import | -> resumed | -> first step | fault -> first step |", "|---|---|---|---|---|---|"]
    for framework in SETTINGS:
        if those := [run for run in runs if run.framework == framework]:
            times = _times(those, ("import_s", "resumed_s", "first_s", "whole_s"))
            by_job.append(f"| `{framework}` | {len(those)} | {times} |")
    return "\n".join([*faults, "", *by_job])


def _times(runs: Sequence[Run], names: Sequence[str]) -> str:
    return " | ".join(seconds([getattr(run, each) for run in runs]) for each in names)


def goals(runs: Sequence[Run]) -> str:
    """Return the goals, and what all runs together reach, as a Markdown table.

    Only a call that does not match gives an order without a deadline of the policy. Without an order, the time until workers
    start contains the notice of the loss (``expiry_seconds``).
    """

    def share(good: int, count: int) -> str:
        return f"{good} of {count} ({good / max(1, count):.1%})"

    orders = [run.order_s for run in runs if run.scenario == "skip" and run.order_s is not None]
    started = [run.started_s for run in runs if run.order_s is not None and run.started_s is not None]
    rows = ["| goal | all runs |", "|---|---|"]
    for text, name in (
        ("exactly the right hosts are out, at least 99%", "right"),
        ("the job is repaired", "repaired"),
        ("states equal", "equal"),
        ("samples equal", "samples"),
    ):
        rows.append(f"| {text} | {share(sum(getattr(run, name) for run in runs), len(runs))} |")
    rows.append(f"| verdict -> order at most 1 s, for an order without a deadline | {seconds(orders)}, {len(orders)} runs |")
    quick = sum(value <= GOAL_STARTED_S for value in started)
    rows.append(
        f"| order -> workers started at most {GOAL_STARTED_S:.0f} s | {share(quick, len(started))}; {seconds(started)} |"
    )
    return "\n".join(rows)


def written(page: Path, runs: Sequence[Run]) -> None:
    """Write the table to a page."""
    head, rest = page.read_text().split(BEGIN, 1)
    page.write_text(head + BEGIN + table(runs) + "\n\n" + goals(runs) + "\n" + FINISH + rest.split(FINISH, 1)[1])
