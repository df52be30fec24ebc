"""For workers: jobs that are saved in one of Megatron's formats, converted and loaded, and also saved by unickpt.

Under torchrun on four ranks, a worker with a format's ``native`` takes

    WORKER DIR SOURCE[:TARGET] ...

and leaves DIR/<source>/iter_0000002, .../ours and .../converted. What is loaded into a TARGET afterwards is told in
DIR/<source>-<target>.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from megatron_unickpt.testing.jobs import Job  # before anything of megatron

import torch
import torch.distributed as dist

import megatron_unickpt
from megatron_unickpt.edge import RUNTIME
from unickpt.testing.launch import leave
from megatron_unickpt.testing.layouts import Layout
from megatron_unickpt.testing.truth import consolidated
from tests.jobs.megatron.compared import differences, in_a_group
from tests.support.turns import in_turn
from unickpt.cli.main import main as unickpt

STEPS = 2


def iteration(folder: Path) -> Path:
    """Return the directory of a checkpoint in Megatron's scripts."""
    return folder / f"iter_{STEPS:07d}"


def save(folder: Path, layout: Layout, native: Callable[[Job, Path], None], *, truth: bool) -> None:
    """Save a job in both formats, and its state in DIR/<layout>.truth."""
    job = Job(layout, seed=1, tied=not layout.moe)
    job.train(STEPS)
    place = folder / layout.name
    native(job, place)
    megatron_unickpt.save(place / "ours", job.chunks, job.optimizer, iteration=job.step)
    held = consolidated(job, folder / "scratch") if truth else None
    if dist.get_rank() == 0:
        (place / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
        torch.save(held, folder / f"{layout.name}.truth")


def load(folder: Path, source: str, target: Layout) -> None:
    job = Job(target, seed=9, tied=not target.moe)
    found = megatron_unickpt.load(folder / source / "converted", job.chunks, job.optimizer)
    state, report = consolidated(job, folder / "scratch"), RUNTIME.last_report
    if state is None or report is None:
        return
    problems = differences(torch.load(folder / f"{source}.truth"), state)
    problems += [f"{e.name} ({e.state}): {e.reason}" for e in report.entries if e.outcome == "left out" and e.state != "object"]
    groups = sorted((group["wd_mult"], group["lr"], group.get("step")) for group in job.hyperparameters())
    result = {"iteration": found["iteration"], "problems": problems, "groups": groups}
    (folder / f"{source}-{target.name}.json").write_text(json.dumps(result))


def main(native: Callable[[Job, Path], None], finish: Callable[[Path], None] | None = None) -> None:
    """Run a worker. ``native`` saves a job in the format. ``finish`` is called with DIR while the last job exists."""
    folder, named = Path(sys.argv[1]), [each.partition(":") for each in sys.argv[2:]]

    def saves() -> None:
        for name, _, target in named:
            save(folder, Layout.parse(name), native, truth=bool(target))
        if finish is not None:
            finish(folder)

    def conversions() -> None:
        for name, _, _ in named:
            assert unickpt(["convert", str(folder / name), str(folder / name / "converted")]) == 0

    loads = [(source, Layout.parse(target)) for source, _, target in named if target]
    in_turn([
        (4, partial(in_a_group, saves)), (1, conversions),
        *((target.world, partial(in_a_group, partial(load, folder, source, target))) for source, target in loads),
    ])  # fmt: skip
    leave()
