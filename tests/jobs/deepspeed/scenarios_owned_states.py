"""Optimizers whose states are not of the parameter's shape: carried exactly to the same owners, refused by all others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

import unickpt
from tests.jobs.deepspeed.jobs import build, scramble, train
from tests.jobs.deepspeed.model import Model
from tests.jobs.deepspeed.odd_optimizers import (
    BlockPreconditioned,
    BlockwiseMomentum,
    adafactor,
    copied,
    equal_states,
    raw_states,
)
from tests.jobs.deepspeed.resumes import assert_resumes, assert_trains_on, assert_weights_equal, here
from tests.jobs.deepspeed.scenario_worker import scenario
from unickpt.base.errors import MismatchError


def _engine(make: Any, stage: int, seed: int, precision: str = "fp32") -> Any:
    torch.manual_seed(seed)
    model = Model()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    return build(here(stage, precision), seed=seed, model=model, client_optimizer=optimizer, scheduler={})


def _saved(make: Any, stage: int, folder: Path, precision: str = "fp32") -> tuple[Any, list[dict[str, Any]], list[float]]:
    source = _engine(make, stage, 1, precision)
    train(source, 3)
    assert source.save_checkpoint(str(folder)) is True
    assert source.checkpoint_engine.last_save.committed, source.checkpoint_engine.last_save
    return source, raw_states(source), train(source, 2)


def _assert_refused(make: Any, stage: int, folder: Path, reason: str) -> None:
    """The target keeps its own state, and the weights alone load."""
    target = _engine(make, stage, 2)
    train(target, 1)
    before = raw_states(target)
    with pytest.raises(MismatchError, match=reason):
        target.load_checkpoint(str(folder))
    assert equal_states(before, raw_states(target))
    path, _ = target.load_checkpoint(str(folder), load_optimizer_states=False)
    assert path is not None


@scenario(1, 2)
def adafactor_keeps_factors_of_whole_matrices(folder: Path) -> None:
    """Without ZeRO its states are rows and columns. They belong to a parameter, so any number of ranks gets them."""
    source, states, losses = _saved(adafactor, 0, folder)
    assert any("exp_avg_sq_row" in state for state in states)
    target = _engine(adafactor, 0, 2)
    scramble(target)
    target.load_checkpoint(str(folder))
    assert equal_states(raw_states(target), states)
    assert train(target, 2) == losses
    assert_weights_equal(source, target)
    other = folder.parent / f"{folder.name.removesuffix('-w2')}-w1"
    if dist.get_world_size() == 2 and (other / "latest").exists():
        of_one = _engine(adafactor, 0, 3)
        of_one.load_checkpoint(str(other))
        assert sum("exp_avg_sq_row" in state for state in raw_states(of_one)) == sum("exp_avg_sq_row" in s for s in states)
        assert_trains_on(of_one, losses, other)
        of_one = _engine(adafactor, 0, 4)
        of_one.load_checkpoint(str(other), load_optimizer_states=False)
        with pytest.raises(AssertionError, match="rounding explains"):
            assert_trains_on(of_one, losses, other)


@scenario(1)
def a_loop_of_torch_refuses_factors_of_deepspeed_or_begins_them_anew(folder: Path) -> None:
    """Its first step would end in ``KeyError: 'exp_avg_sq_row'``: those of ZeRO 0 belong to DeepSpeed, ZeRO 1 has none."""
    for stage, reason in (
        (0, r"states of Adafactor that are not of the shape of their parameters: of .*embed\.weight"),
        (1, r"lacks states that this job's Adafactor needs: exp_avg_sq_col, exp_avg_sq_row of .*embed\.weight"),
    ):
        _saved(adafactor, stage, folder / str(stage))
        torch.manual_seed(2)
        model = Model()
        optimizer = adafactor([p for p in model.parameters() if p.requires_grad])
        with pytest.raises(MismatchError, match=reason):
            unickpt.load_training(model, optimizer, folder / str(stage))
        assert not optimizer.state
        start = unickpt.load_training(model, optimizer, folder / str(stage), missing_state="fresh")
        anew = {entry.name for entry in start.report.entries if entry.outcome == "re-seeded"}
        assert {name for name, each in model.named_parameters() if each.requires_grad and each.dim() > 1} <= anew
        for each in model.parameters():
            each.grad = torch.ones_like(each)
        optimizer.step()
        unickpt.load_training(model, None, folder / str(stage))


@scenario(2)
def adafactor_under_zero_is_elementwise(folder: Path) -> None:
    """ZeRO's partitions have one dimension, so it factors nothing: each ZeRO stage loads the states of each other."""
    keys = ("exp_avg", "exp_avg_sq")
    assert_resumes(folder / "13", _engine(adafactor, 1, 1), _engine(adafactor, 3, 2), keys, ignore=("groups",))
    _saved(adafactor, 0, folder / "0")
    _assert_refused(adafactor, 2, folder / "0", "cannot be cut. In this job the optimizer steps on a tensor of shape")
    _assert_refused(adafactor, 0, folder / "13", "lacks the state exp_avg_sq_col, exp_avg_sq_row, which Adafactor keeps for")
    fresh = _engine(adafactor, 0, 4)
    with pytest.raises(MismatchError, match="lacks the state exp_avg_sq_col, exp_avg_sq_row, which Adafactor keeps for"):
        fresh.load_checkpoint(str(folder / "13"))


@scenario(2)
def states_of_blocks_go_to_equal_partitions(folder: Path) -> None:
    """ZeRO 1 and 2 have the same partitions. ZeRO 3 and other wrappers have others."""
    for make in (BlockPreconditioned, BlockwiseMomentum):
        place = folder / make.__name__
        for a, b in ((1, 2), (3, 3), (0, 0)):
            _, states, losses = _saved(make, a, place / f"{a}{b}")
            target = _engine(make, b, 2)
            scramble(target)
            target.load_checkpoint(str(place / f"{a}{b}"))
            assert equal_states(raw_states(target), states), (make, a, b)
            assert train(target, 2) == losses
        _assert_refused(make, 3, place / "12", "cannot be cut. In this job the optimizer steps on a tensor of shape")
        _assert_refused(make, 1, place / "00", "cannot be cut. In this job the optimizer steps on a tensor of shape")


@scenario(2)
def states_of_blocks_under_bf16_optimizer(folder: Path) -> None:
    _, states, losses = _saved(BlockPreconditioned, 1, folder, "bf16o")
    target = _engine(BlockPreconditioned, 1, 2, "bf16o")
    target.load_checkpoint(str(folder))
    assert equal_states(raw_states(target), states)
    assert train(target, 2) == losses


@scenario(2)
def residuals_of_compressed_gradients_return_to_their_ranks(folder: Path) -> None:
    """Training goes on bit by bit. A job without the residuals has other losses."""

    def engine(stage: int, seed: int) -> Any:
        compression = {"scheme": "sign", "least_elements": 64}
        return build(here(stage), seed=seed, unickpt={"enabled": True, "async_save": False, "compression": compression})

    for stage in (0, 2):
        source = engine(stage, 1)
        train(source, 3)
        assert source.save_checkpoint(str(folder / str(stage))) is True
        own = copied(source.checkpoint_engine.compressed.exchange.residuals.sent)
        losses = train(source, 2)
        target = engine(stage, 2)
        train(target, 1)
        target.load_checkpoint(str(folder / str(stage)))
        found = target.checkpoint_engine.compressed.exchange.residuals.sent
        assert own
        assert equal_states(found, own)
        assert train(target, 2) == losses
        assert_weights_equal(source, target)
        target.load_checkpoint(str(folder / str(stage)))
        target.checkpoint_engine.compressed.exchange.residuals.sent.clear()
        assert train(target, 2) != losses
