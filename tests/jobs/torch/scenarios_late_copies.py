"""Saves that copy behind training, until the next step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import unickpt
from tests.jobs.late_copies import held_copies
from tests.jobs.torch.pairs_worker import differences
from tests.jobs.torch.registry import job_of, scenario
from torch_unickpt.edge import RUNTIME


@scenario(2)
def a_step_waits_for_the_copies_of_a_save(folder: Path) -> None:
    options = unickpt.SaveOptions(asynchronous=True)
    for name in ("fsdp2", "ddp2"):
        job = job_of(name, 1)
        for step in (1, 2):  # the first save shows which weights are casts of their masters
            job.train(1)
            truth = job.truth()
            with held_copies() as copies:
                saved = unickpt.save_training(
                    job.model, job.optimizer, folder / name / f"step{step}", step=step, scheduler=job.scheduler, options=options
                )
                assert copies or step == 1, name
                job.train(1)
                saved.wait()  # type: ignore[union-attr]
            assert saved.committed  # type: ignore[union-attr]
        other = job_of("fsdp2", 6)
        unickpt.load_training(other.model, other.optimizer, folder / name / "step2", scheduler=other.scheduler)
        assert differences(truth, other.truth()) == []


@scenario(2)
def what_a_save_describes_serves_the_next_one_until_it_is_another(folder: Path) -> None:
    options = unickpt.SaveOptions(asynchronous=True)
    for name in ("fsdp2", "ddp2"):
        job, number = job_of(name, 1), [0]

        def check(*, described: bool, job: Any = job, name: str = name, number: list[int] = number) -> None:
            number[0] += 1
            place, known, truth = folder / name / f"step{number[0]}", RUNTIME.known(job.model), job.truth()
            before = known.described
            with held_copies() as copies:
                saved = unickpt.save_training(
                    job.model, job.optimizer, place, step=number[0], scheduler=job.scheduler, options=options
                )
                assert known.described - before == described, (name, number)
                job.train(1)
                saved.wait()  # type: ignore[union-attr]
                assert copies or number[0] == 1
            assert saved.committed  # type: ignore[union-attr]
            other = job_of(name, 6)
            unickpt.load_training(other.model, other.optimizer, place, scheduler=other.scheduler)
            assert differences(truth, other.truth()) == [], (name, number)

        check(described=True)  # without states
        check(described=True)
        check(described=False)
        check(described=False)
        for state in job.optimizer.state.values():
            state["exp_avg"] = state["exp_avg"] + 1.0
        check(described=True)
        check(described=False)
        parameter = next(iter(job.model.parameters()))
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if name == "ddp2":
            local.data = local.data + 1.0
            check(described=True)
        job.optimizer.param_groups[0]["lr"] *= 0.5  # read at each call
        check(described=False)
