"""Saves that copy behind training, until the next step."""

from __future__ import annotations

from pathlib import Path

import megatron_unickpt
from megatron_unickpt.edge import RUNTIME
from megatron_unickpt.testing.jobs import Job
from megatron_unickpt.testing.layouts import Layout
from megatron_unickpt.testing.truth import consolidated
from tests.jobs.late_copies import held_copies
from tests.jobs.megatron.compared import differences
from tests.jobs.megatron.scenarios import scenario
from tests.support.extent import some

LAYOUTS = (
    Layout(dp=2), Layout(tp=2, optimizer="plain"), Layout(dp=2, optimizer="offload"), Layout(pp=2, optimizer="fp32"),
    Layout(dp=2, moe=True, ep=2), Layout(dp=2, optimizer="aware"), Layout(dp=2, optimizer="layers"),
    Layout(dp=2, optimizer="fp32dist"),
)  # fmt: skip


@scenario(2)
def a_step_waits_for_the_copies_of_a_save(folder: Path) -> None:
    for layout in some(LAYOUTS, 3):
        place = folder / layout.name
        job = Job(layout, seed=1)
        job.train(1)
        megatron_unickpt.save(place / "first", job.chunks, job.optimizer, iteration=1, asynchronous=True).conclude()
        job.train(1)
        truth = consolidated(job, place / "truth")
        with held_copies() as copies:
            save = megatron_unickpt.save(place / "late", job.chunks, job.optimizer, iteration=2, asynchronous=True)
            assert len(copies) == 1, layout
            job.train(2)
            save.conclude()
        RUNTIME.saver().finish()
        target = Job(layout, seed=7)
        megatron_unickpt.load(place / "late", target.chunks, target.optimizer)
        found = consolidated(target, place / "found")
        assert truth is None or not differences(truth, found), layout


KEPT = (Layout(dp=2), Layout(tp=2, optimizer="plain"), Layout(dp=2, moe=True, ep=2), Layout(pp=2, optimizer="fp32"))


@scenario(2)
def a_save_uses_what_an_earlier_one_has_described(folder: Path) -> None:
    for layout in some(KEPT, 2):
        place, described = folder / layout.name, []
        job = Job(layout, seed=1)
        for number, change in enumerate((_nothing, _nothing, _other_memory, _nothing)):
            job.train(1)
            change(job)
            truth, before = consolidated(job, place / f"truth{number}"), RUNTIME.known.described
            save = megatron_unickpt.save(
                place / f"save{number}", job.chunks, job.optimizer, iteration=job.step, asynchronous=bool(number)
            )
            job.train(1)
            save.conclude() if number else None
            RUNTIME.saver().finish()
            described.append(RUNTIME.known.described - before)
            target = Job(layout, seed=7 + number, groups=False)
            megatron_unickpt.load(place / f"save{number}", target.chunks, target.optimizer)
            found = consolidated(target, place / f"found{number}")
            assert truth is None or not differences(truth, found), (layout, number)
        assert described == [1, 0, 1, 0], (layout, described)


def _nothing(job: Job) -> None:
    """Leave a job as it is."""


def _other_memory(job: Job) -> None:
    """Give a moment of the optimizer, or a master, other memory with the same values."""
    optimizer = next(each for each in getattr(job.optimizer, "chained_optimizers", [job.optimizer]))
    state = next(iter(optimizer.optimizer.state.values()))
    state["exp_avg"] = state["exp_avg"].clone()
