"""Run a job with slow ranks, and plan the precision of its layers."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from tests.jobs.plan.precision_job import SPEEDUP
from tests.support.cli import json_of
from tests.support.forked_jobs import fork_ranks
from tests.support.result_lines import results_in

STEPS, FIRST = 12, 3


def ran(job: dict[str, Any], folder: Path, name: str, **asked: Any) -> dict[str, Any]:
    """Run a job. Returns its losses, and its step: the median of those that are not sampled."""
    task = {**job, "rings": str(folder / name), "steps": STEPS, **asked}
    output = fork_ranks(
        job["world"], "tests.jobs.plan.precision_job", json.dumps(task), timeout_s=400, framework=job["kind"],
        env={"GLOO_SOCKET_IFNAME": "lo"},
    ).stdout  # fmt: skip
    found = results_in(output, "RUN")
    assert len(found) == 1, output[-3000:]
    run: dict[str, Any] = json.loads(found[0])
    return run | {"step_s": statistics.median(run["steps_s"][FIRST:])}


def planned(job: dict[str, Any], folder: Path, out: Path, *more: str) -> dict[str, Any]:
    """Return the plan from the records of the run ``before``."""
    ranks = ",".join(map(str, job["slow"]))
    return json_of(
        "plan", "precision", str(folder / "before"), "--ranks", ranks, "--speedup", str(SPEEDUP), "--out", str(out), *more,
        "--steps", f"{FIRST + 1}:{STEPS}",
    )  # fmt: skip
