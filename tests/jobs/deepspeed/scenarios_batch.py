"""The global batch on another number of ranks, for every spelling of the DeepSpeed JSON. One rank saves, two resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

import ds_unickpt
from tests.jobs.deepspeed.jobs import BATCH, build, move
from tests.jobs.deepspeed.logs import Log
from tests.jobs.deepspeed.model import batch
from tests.jobs.deepspeed.resumes import ADAM, assert_trains_on, here
from tests.jobs.deepspeed.scenario_worker import scenario
from tests.jobs.deepspeed.truth import consolidated, differences
from unickpt.base.errors import ConfigError

MICRO = 3
TOTAL, PER_DEVICE, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
SPELLINGS: dict[str, dict[str, Any]] = {  # each gives 4 micro batches of 3 on one rank; None removes the key
    "total and micro": {TOTAL: BATCH, PER_DEVICE: MICRO},
    "all": {TOTAL: BATCH, PER_DEVICE: MICRO, ACCUMULATION: 4},
    "total": {TOTAL: BATCH},
    "total and accumulation": {TOTAL: BATCH, ACCUMULATION: 4},
    "micro and accumulation": {TOTAL: None, PER_DEVICE: MICRO, ACCUMULATION: 4},
}
STOCK: dict[str, tuple[int, int, int] | type[Exception]] = {  # what DeepSpeed makes of it on two ranks
    "total and micro": (12, 3, 2),
    "all": AssertionError,
    "total": (12, 6, 1),
    "total and accumulation": AssertionError,
    "micro and accumulation": (24, 3, 4),
}


def engine_of(spelling: dict[str, Any], seed: int, **options: Any) -> Any:
    return build(here(2), seed=seed, unickpt={"enabled": True, **options}, **spelling)


def sizes(engine: Any) -> tuple[int, int, int]:
    return engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()


def train(engine: Any, steps: int, *, moved: int | None = None) -> list[float]:
    """Train on the micro batches that the engine's own sizes give this rank, and return the losses of the global batches."""
    rank, world, (_, micro, accumulation) = dist.get_rank(), dist.get_world_size(), sizes(engine)
    losses = []
    for step in range(steps):
        move(engine, moved, step)
        tokens, targets = batch(engine.global_steps, BATCH, 0, 1)
        total = torch.zeros(1)
        for at in range(accumulation):
            rows = slice((at * world + rank) * micro, (at * world + rank + 1) * micro)
            loss = engine(tokens[rows], targets[rows])
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / world / accumulation)
    return losses


@scenario(1, 2)
def every_spelling_keeps_the_global_batch_of_the_checkpoint(folder: Path) -> None:
    before = folder.parent / "every_spelling_keeps_the_global_batch_of_the_checkpoint-w1"
    if dist.get_world_size() == 1:
        engine = engine_of(SPELLINGS["all"], 1)
        train(engine, 2)
        engine.save_checkpoint(str(before / "out"))
        manifest = json.loads((before / "out" / "global_step2" / "manifest.json").read_text())
        assert manifest["objects"]["batch"] == {"total": 12, "per_device": 3, "accumulation": 4, "ranks": 1}
        torch.save((consolidated(engine, ADAM), train(engine, 2)), before / "truth.pt")
        return
    truth, expected = torch.load(before / "truth.pt")
    for name, spelling in SPELLINGS.items():
        engine = engine_of(spelling, 2, keep_global_batch="always", resume_from=str(before / "out"))
        assert sizes(engine) == (12, 3, 2), name
        with Log() as log:
            start = ds_unickpt.resume_or_start(engine)
        assert (start.step, start.samples) == (2, 2 * BATCH)
        assert differences(truth, consolidated(engine, ADAM)) == []
        assert not [line for line in log.lines if "the global batch changes" in line]
        logged = [line for line in log.lines if "resumed at" in line]
        line = "resumed at step 2 after 24 samples: world 1 -> 2, global batch 12, micro batch 3, accumulation 4 -> 2"
        assert logged == ([f"unickpt: {line}"] if dist.get_rank() == 0 else []), log.lines
    assert_trains_on(engine, expected, before / "out", training=train)


@scenario(2)
def without_the_option_deepspeeds_rule_decides(folder: Path) -> None:
    for name, spelling in SPELLINGS.items():
        expected = STOCK[name]
        if isinstance(expected, tuple):
            assert sizes(engine_of(spelling, 2, resume_from=str(folder))) == expected, name
        else:
            with pytest.raises(expected):
                engine_of(spelling, 2, resume_from=str(folder))


@scenario(2)
def under_steering_the_batch_is_kept_unless_it_is_switched_off(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNICKPT_ROUND", "1.2")
        assert sizes(engine_of(SPELLINGS["all"], 2)) == (12, 3, 2)
        with pytest.raises(AssertionError):
            engine_of(SPELLINGS["all"], 2, keep_global_batch="never")
        with pytest.raises(ConfigError, match=r"12 cannot be kept on 2 .* with micro batches of 4\. .*: 1, 3\. Start"):
            engine_of({TOTAL: BATCH, PER_DEVICE: 4, ACCUMULATION: 3}, 2)
        with Log() as log:
            near = engine_of({TOTAL: BATCH, PER_DEVICE: 4, ACCUMULATION: 3}, 2, batch_tolerance=0.4)
        assert sizes(near) == (8, 4, 1)
        told = "4 per device x 1 accumulated x 2 ranks), in place of 12: -33.33%, within batch_tolerance 40.00%"
        assert [line for line in log.lines if told in line] or dist.get_rank()
        train(near, 1)
        assert near.global_steps == 1
