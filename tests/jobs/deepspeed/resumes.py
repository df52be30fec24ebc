"""Assertions about an engine that resumes from the checkpoint of another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist

from tests.jobs.deepspeed.jobs import Layout, build, scramble, train
from tests.jobs.deepspeed.truth import consolidated, differences
from tests.support.rounding import assert_continues

ADAM = ("exp_avg", "exp_avg_sq")


def here(stage: int, precision: str = "fp32") -> Layout:
    return Layout(stage, dist.get_world_size(), precision)


def assert_resumes(
    folder: Path, source: Any, target: Any, states: tuple[str, ...] = ADAM, *, ignore: tuple[str, ...] = (), **load: Any
) -> dict[str, Any]:
    """Train, save, load into another engine, compare all states, and compare the losses of further steps."""
    train(source, 3)
    assert source.save_checkpoint(str(folder)) is True, source.checkpoint_engine.last_save
    truth = consolidated(source, states)
    scramble(target)
    path, client_state = target.load_checkpoint(str(folder), **load)
    assert path is not None
    problems = differences(truth, consolidated(target, states), ignore=ignore)
    assert problems == [], problems
    assert_trains_on(target, train(source, 2), folder, **load)
    found: dict[str, Any] = client_state
    return found


def assert_trains_on(engine: Any, expected: list[float], folder: Path, *, training: Any = train, **load: Any) -> None:
    """Train an engine that has loaded a checkpoint, and compare its losses with the expected ones within rounding.

    What rounding does is measured: the engine loads the checkpoint twice more, and trains with weights that move in the last
    place, and without.

    Args:
        engine: it has trained further from the checkpoint afterwards.
        expected: losses of the next steps in another layout.
        folder, load: arguments of ``load_checkpoint``.
        training: as ``jobs.train``.
    """
    runs = [training(engine, len(expected))]
    for moved in (1, None):
        engine.load_checkpoint(str(folder), **load)
        runs.append(training(engine, len(expected), moved=moved))
    found, *others = runs
    assert_continues(found, expected, *others)


def assert_weights_equal(a: Any, b: Any) -> None:
    """Compare the gathered weights. DeepSpeed's accessors miss second groups in some versions."""
    for (name, p), (_, q) in zip(a.module.named_parameters(), b.module.named_parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
            left = p.detach().clone()
        with deepspeed.zero.GatheredParameters([q], enabled=hasattr(q, "ds_id")):
            assert torch.equal(left, q.detach()), name


def unsupported_engine() -> Any:
    """Build an engine with an optimizer wrapper that unickpt does not know, as in a new DeepSpeed release. Train one step."""
    engine = build(here(1), seed=1)
    train(engine, 1)
    engine.optimizer.__class__ = type("NewZeroOptimizer", (type(engine.optimizer),), {})
    return engine
