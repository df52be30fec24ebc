"""Layers that compute in bf16 on one rank by a plan, in a Megatron job in float32, and checkpoints of such a job."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import TransformerLayer

import megatron_unickpt
from megatron_unickpt.measuring import precision
from megatron_unickpt.testing.jobs import Job
from megatron_unickpt.testing.layouts import Layout
from megatron_unickpt.testing.truth import consolidated
from tests.jobs.megatron.compared import differences
from megatron_unickpt.framework.versions import version
from tests.jobs.megatron.scenarios import scenario
from tests.support.extent import some
from unickpt.base import hooks
from unickpt.training.precision.policy import Policy


def _plan(folder: Path, **more: Any) -> str:
    policy = Policy(**{"dtypes": {"decoder.layers.1": "bf16", "decoder.layers.2": "bf16"}, "ranks": (1,), "world": 2, **more})
    path = folder / f"plan{dist.get_rank()}.json"
    path.write_text(json.dumps(policy.as_json()))
    return str(path)


def _dtypes(job: Job) -> dict[int, torch.dtype]:
    """Collect the dtype in which each layer multiplies, by its number from 0."""
    found: dict[int, torch.dtype] = {}
    for layer in (each for chunk in job.chunks for each in chunk.modules() if isinstance(each, TransformerLayer)):
        number = layer.layer_number - 1

        def note(_module: Any, _args: Any, output: Any, number: int = number) -> None:
            found[number] = output[0].dtype

        layer.mlp.linear_fc1.register_forward_hook(note)
    return found


def _assert_equal(expected: Any, found: Any) -> None:
    """Compare on rank 0, which has the states."""
    if dist.get_rank() == 0:
        assert differences(expected, found) == []


@scenario(2)
def layers_compute_in_the_dtype_of_a_plan_and_checkpoints_are_as_without(folder: Path) -> None:
    narrow, wide = torch.bfloat16, torch.float32
    cases = ((Layout(pp=2, optimizer="fp32"), (2, 3)), (Layout(dp=2, optimizer="fp32"), (0, 1, 2, 3)))
    for layout, mine in some(cases, 1):
        place = folder / layout.name
        place.mkdir(exist_ok=True)
        plan = _plan(place)
        job = Job(layout, seed=1)
        megatron_unickpt.apply_precision(job.chunks, plan)
        seen = _dtypes(job)
        losses = job.train(2)
        if dist.get_rank() == 1:
            assert seen == {at: narrow if at in (1, 2) else wide for at in mine}, (layout.name, seen)
        else:
            assert set(seen.values()) == {wide}, (layout.name, seen)
        megatron_unickpt.save(place / "ck", job.chunks, job.optimizer, iteration=2)
        truth = consolidated(job, place / "truth")
        expected = job.train(2)
        again = Job(layout, seed=9)
        megatron_unickpt.apply_precision(again.chunks, plan)
        megatron_unickpt.load(place / "ck", again.chunks, again.optimizer)
        _assert_equal(truth, consolidated(again, place / "again"))
        again.step = 2
        assert again.train(2) == expected, layout.name
        without = Job(Layout(tp=2, optimizer="fp32"), seed=5)
        megatron_unickpt.load(place / "ck", without.chunks, without.optimizer)
        _assert_equal(truth, consolidated(without, place / "without"))
        plain = Job(layout, seed=1)
        assert plain.train(2) != losses, layout.name


@scenario(2)
def the_hook_of_the_scripts_applies_a_plan_once(folder: Path) -> None:
    layout = Layout(dp=2, optimizer="fp32")
    plan = _plan(folder)
    by_hand = Job(layout, seed=1)
    megatron_unickpt.apply_precision(by_hand.chunks, plan)
    expected = by_hand.train(2)
    hook = precision.forward_hook(plan)
    assert hooks.install([hook], framework="Megatron", version=version())
    try:
        assert Job(layout, seed=1).train(2) == expected
    finally:
        hooks.uninstall([hook])
    assert Job(layout, seed=1).train(2) != expected


@scenario(2)
def narrow_weights_are_a_warning(folder: Path) -> None:
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Lines()
    logging.getLogger("unickpt").addHandler(handler)
    job = Job(Layout(dp=2), seed=1)
    megatron_unickpt.apply_precision(job.chunks, _plan(folder))
    logging.getLogger("unickpt").removeHandler(handler)
    assert any("a plan needs float32 weights" in line for line in lines) == (dist.get_rank() == 1), lines
    assert job.train(1) == Job(Layout(dp=2), seed=1).train(1)


@scenario(2)
def ranks_that_share_layers_have_a_plan_together_or_not_at_all(folder: Path) -> None:
    layout = Layout(tp=2, optimizer="fp32")
    expected = Job(layout, seed=1).train(2)
    job = Job(layout, seed=1)
    megatron_unickpt.apply_precision(job.chunks, _plan(folder))
    seen = _dtypes(job)
    assert job.train(2) == expected
    assert set(seen.values()) == {torch.float32}
    own = {f"decoder.layers.{dist.get_rank()}": "bf16"}  # another file on each rank
    job = Job(layout, seed=1)
    megatron_unickpt.apply_precision(job.chunks, _plan(folder, ranks=(0, 1), dtypes=own))
    assert job.train(2) == expected
    job = Job(layout, seed=1)
    megatron_unickpt.apply_precision(job.chunks, _plan(folder, ranks=(0, 1)))
    seen = _dtypes(job)
    assert job.train(2) != expected
    assert [seen[at] for at in range(4)] == [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]
