"""Saves that copy behind training, until the next step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

from tests.jobs.deepspeed.jobs import build, train
from tests.jobs.deepspeed.logs import Log
from tests.jobs.deepspeed.resumes import ADAM, here
from tests.jobs.deepspeed.scenario_worker import scenario
from tests.jobs.deepspeed.truth import consolidated, differences
from tests.jobs.late_copies import held_copies
from tests.support.extent import some
from unickpt.checkpoint.coordination.failure import FailureKind

LATE = {"enabled": True, "async_save": True}


def _second_save(layout: Any, folder: Path) -> Any:
    """Return an engine whose next save copies late: the first one shows which weights are casts of their masters."""
    engine = build(layout, seed=1, unickpt=LATE)
    train(engine, 1)
    assert engine.save_checkpoint(str(folder), tag="first")
    engine.checkpoint_engine.saver.finish()
    train(engine, 1)
    return engine


@scenario(2)
def a_step_waits_for_the_copies_of_a_save(folder: Path) -> None:
    for layout in some((here(1, "bf16"), here(3), here(0), here(2), here(3, "bf16"), here(0, "bf16"), here(1, "bf16o")), 3):
        place = folder / layout.name
        engine = _second_save(layout, place)
        truth = consolidated(engine, ADAM)
        with held_copies() as copies:
            assert engine.save_checkpoint(str(place), tag="late")
            assert len(copies) == 1, layout
            train(engine, 2)
            engine.checkpoint_engine.saver.finish()
        assert engine.checkpoint_engine.last_save.committed, (layout, engine.checkpoint_engine.last_save)
        target = build(here((layout.stage + 1) % 4, layout.precision), seed=2)
        target.load_checkpoint(str(place), tag="late")
        assert not differences(truth, consolidated(target, ADAM)), layout


@scenario(2)
def deepspeeds_setters_wait_for_the_copies_of_a_save(folder: Path) -> None:
    for layout in some((here(1, "bf16"), here(3, "bf16"), here(2)), 2):
        place = folder / layout.name
        engine = _second_save(layout, place)
        truth = consolidated(engine, ADAM)
        with held_copies() as copies:
            assert engine.save_checkpoint(str(place), tag="late")
            assert len(copies) == 1, layout
            for parameter in engine.module.parameters():
                shape = getattr(parameter, "ds_shape", parameter.shape)
                if parameter.requires_grad and shape.numel() % 2 == 0:  # ZeRO-3 raises for a part that is empty on a rank
                    safe_set_full_fp32_param(parameter, torch.full(shape, 0.25))
                    safe_set_full_optimizer_state(parameter, torch.full(shape, 0.5), "exp_avg")
            engine.checkpoint_engine.saver.finish()
        assert engine.checkpoint_engine.last_save.committed, (layout, engine.checkpoint_engine.last_save)
        target = build(here(1, layout.precision), seed=2)
        target.load_checkpoint(str(place), tag="late")
        assert not differences(truth, consolidated(target, ADAM)), layout


@scenario(2)
def a_write_between_two_steps_gives_the_save_up_and_the_next_one_copies_at_the_call(folder: Path) -> None:
    engine = _second_save(here(1, "bf16"), folder)
    with held_copies() as copies, Log() as log:
        assert engine.save_checkpoint(str(folder), tag="late")
        engine.optimizer.single_partition_of_fp32_groups[0].detach().add_(1.0)
        train(engine, 1)
        engine.checkpoint_engine.saver.finish()
        save = engine.checkpoint_engine.last_save
        assert not save.committed
        assert {failure.kind for failure in save.failures} == {FailureKind.CHANGED}
        truth = consolidated(engine, ADAM)
        for tag in ("synchronous", "next"):
            assert engine.save_checkpoint(str(folder), tag=tag)
            engine.checkpoint_engine.saver.finish()
            assert engine.checkpoint_engine.last_save.committed
        assert len(copies) == 1
    assert any("was changed between two steps of the optimizer" in line for line in log.lines) or engine.global_rank
    target = build(here(3, "bf16"), seed=2)
    target.load_checkpoint(str(folder))
    assert not differences(truth, consolidated(target, ADAM))
