"""Saves that copy behind training, until the next step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

from ds_unickpt.framework import internals
from ds_unickpt.held_state.engine_view import EngineView
from tests.jobs.deepspeed.jobs import build, train
from tests.jobs.deepspeed.logs import Log
from tests.jobs.deepspeed.resumes import ADAM, here
from tests.jobs.deepspeed.scenario_worker import scenario
from tests.jobs.deepspeed.truth import consolidated, differences
from tests.jobs.late_copies import held_copies
from tests.support.extent import some
from unickpt.checkpoint.coordination.failure import FailureKind
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.save.late_copy import settle_all

LATE = {"enabled": True, "async_save": True}


def _second_save(layout: Any, folder: Path) -> Any:
    """Return an engine whose next save copies late: the first one shows which weights are casts of their masters."""
    engine = build(layout, seed=1, unickpt=LATE)
    train(engine, 1)
    assert engine.save_checkpoint(str(folder), tag="first")
    engine.checkpoint_engine.saver.finish()
    train(engine, 1)
    return engine


def _saves_late(layout: Any, folder: Path, acts: Callable[[Any], None], target: Any) -> None:
    """Save, let a writer act while nothing is copied yet, and compare what another job loads with the state at the call."""
    engine = _second_save(layout, folder)
    truth = consolidated(engine, ADAM)
    with held_copies() as copies:
        assert engine.save_checkpoint(str(folder), tag="late")
        assert len(copies) == 1, layout
        acts(engine)
        engine.checkpoint_engine.saver.finish()
    assert engine.checkpoint_engine.last_save.committed, (layout, engine.checkpoint_engine.last_save)
    other = build(target, seed=2)
    other.load_checkpoint(str(folder), tag="late")
    assert not differences(truth, consolidated(other, ADAM)), layout


@scenario(2)
def a_step_waits_for_the_copies_of_a_save(folder: Path) -> None:
    for layout in some((here(1, "bf16"), here(3), here(0), here(2), here(3, "bf16"), here(0, "bf16"), here(1, "bf16o")), 3):
        target = here((layout.stage + 1) % 4, layout.precision)
        _saves_late(layout, folder / layout.name, lambda engine: train(engine, 2), target)


def _set_everything(engine: Any) -> None:
    for parameter in engine.module.parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if parameter.requires_grad and shape.numel() % 2 == 0:  # ZeRO-3 raises for a part that is empty on a rank
            safe_set_full_fp32_param(parameter, torch.full(shape, 0.25))
            safe_set_full_optimizer_state(parameter, torch.full(shape, 0.5), "exp_avg")


@scenario(2)
def deepspeeds_setters_wait_for_the_copies_of_a_save(folder: Path) -> None:
    for layout in some((here(1, "bf16"), here(3, "bf16"), here(2)), 2):
        _saves_late(layout, folder / layout.name, _set_everything, here(1, layout.precision))


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


def _held(engine: Any) -> list[torch.Tensor]:
    """Return the masters and moments of this rank without padding."""
    view = EngineView(engine)
    return [
        flat.detach().reshape(-1)[piece.at : piece.at + piece.hi - piece.lo]
        for part in view.parts
        for flat in (part.elements, *(view.base.state[part.master][key] for key in ADAM))
        for piece in part.pieces
    ]


class _Saves:
    """Saves of one engine, each followed by a step and a load into an engine of the same layout."""

    def __init__(self, layout: Any, folder: Path) -> None:
        self.layout, self.folder = layout, folder
        self.engine = build(layout, seed=1, unickpt=LATE)
        self.known, self.number = self.engine.checkpoint_engine.known, 0

    def check(self, *, described: bool, steps: bool = True) -> Checkpoint:
        """Save. ``described``: the description of the save before does not serve this one."""
        before, truth, tag = self.known.described, [each.clone() for each in _held(self.engine)], f"save{self.number}"
        self.number += 1
        with held_copies() as copies:
            assert self.engine.save_checkpoint(str(self.folder), tag=tag)
            assert self.known.described - before == described, (self.layout, tag)
            if steps:
                train(self.engine, 1)
            else:
                settle_all()
            self.engine.checkpoint_engine.saver.finish()
            assert copies or self.number == 1
        assert self.engine.checkpoint_engine.last_save.committed, (tag, self.engine.checkpoint_engine.last_save)
        other = build(self.layout, seed=2)
        other.load_checkpoint(str(self.folder), tag=tag, load_module_strict=False)
        for one, found in zip(truth, _held(other), strict=True):
            assert torch.equal(one, found), (self.layout, tag)
        dist.barrier()
        return Checkpoint.open(self.folder / tag)


@scenario(2)
def what_a_save_describes_serves_the_next_one_until_it_is_another(folder: Path) -> None:
    for layout in some((here(1, "bf16"), here(3), here(0), here(2), here(3, "bf16"), here(0, "bf16"), here(1, "bf16o")), 3):
        saves = _Saves(layout, folder / layout.name)
        engine = saves.engine
        base = internals.base_optimizer(engine)
        train(engine, 1)
        saves.check(described=True)
        saves.check(described=False)
        for part in EngineView(engine).parts:
            part.master.data = part.master.data + 1.0
        saves.check(described=True)
        saves.check(described=False)
        for state in base.state.values():
            state["exp_avg"] = state["exp_avg"] + 1.0
        saves.check(described=True)
        frozen = next(p for p in engine.module.parameters() if not p.requires_grad)
        frozen.requires_grad_(True)
        saves.check(described=True, steps=False)
        frozen.requires_grad_(False)
        saves.check(described=True)
        engine.load_checkpoint(str(folder / layout.name), tag="save0")
        saves.check(described=saves.known.described < 0)
        if layout.stage != 3:
            engine.module.added = torch.nn.Parameter(torch.full((3,), 7.0), requires_grad=False)
            found = saves.check(described=True)
            assert found.read_tensor("added", "weight").tolist() == [7.0] * 3
            del engine.module.added
            found = saves.check(described=True)
            assert "added" not in {info.name for info in found.index.tensors}


@scenario(2)
def a_state_that_appears_in_the_first_step_is_in_the_next_save(folder: Path) -> None:
    engine = build(here(0), seed=1, unickpt=LATE)
    for tag in ("new", "new again"):
        assert engine.save_checkpoint(str(folder), tag=tag)
        engine.checkpoint_engine.saver.finish()
    train(engine, 1)
    truth = consolidated(engine, ADAM)
    assert engine.save_checkpoint(str(folder), tag="stepped")
    engine.checkpoint_engine.saver.finish()
    target = build(here(1), seed=2)
    target.load_checkpoint(str(folder), tag="stepped")
    assert not differences(truth, consolidated(target, ADAM))
