"""Saves that copy behind training, until the next step."""

from __future__ import annotations

from pathlib import Path

import unickpt
from tests.jobs.late_copies import held_copies
from tests.jobs.torch.pairs_worker import differences
from tests.jobs.torch.registry import job_of, scenario


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
