"""The witness of a model names bits that flip in the memory of one rank. Sound training has no verdict and the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_unickpt
from megatron_unickpt.testing.jobs import Job
from megatron_unickpt.testing.layouts import Layout
from tests.jobs.megatron.scenarios import scenario
from tests.support.extent import some
from unickpt.training.witness.vote import Kind, Verdict

NAME = "decoder.layers.0.mlp.linear_fc1.weight"


def _flip(tensor: torch.Tensor) -> None:
    tensor.data.view({4: torch.int32, 2: torch.int16}[tensor.element_size()]).view(-1)[1] ^= 1 << 3


def _told(witness: megatron_unickpt.Witness) -> list[tuple[Kind, str, tuple[int, ...]]]:
    own = [(v.kind, v.subject.what, v.ranks) for v in witness.verdicts if isinstance(v, Verdict)]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    assert every == [own] * len(every)
    return own


def _parameter(job: Job) -> torch.Tensor:
    return next(p for module in job.modules for name, p in module.named_parameters() if name == NAME)


@scenario(2)
def a_bit_that_flips_in_a_weight_or_a_moment_is_named(folder: Path) -> None:
    for layout in some((Layout(dp=2, optimizer="plain"), Layout(tp=2, optimizer="fp32")), 2):
        job = Job(layout, seed=1)
        witness = megatron_unickpt.witness(job.chunks, job.optimizer, {"every": 1})
        job.train(2)
        assert _told(witness) == []
        (optimizer,) = getattr(job.optimizer, "chained_optimizers", [job.optimizer])
        states = optimizer.optimizer.state
        stepped = getattr(_parameter(job), "main_param", _parameter(job))
        if dist.get_rank() == 1:
            _flip(_parameter(job))
            _flip(states[stepped]["exp_avg"])
        job.train(1)
        alone = [(Kind.NO_MAJORITY, NAME, (1,)), (Kind.NO_MAJORITY, f"exp_avg of {NAME}", (1,))]
        assert sorted(_told(witness))[: len(alone)] == sorted(alone), (layout, _told(witness))
        copies = [each for each in _told(witness) if each[2] == (0, 1)]
        assert bool(copies) == (layout.dp == 2), (layout, copies)
        witness.close()


@scenario(2)
def sound_training_has_no_verdict_and_the_same_weights(folder: Path) -> None:
    layouts = (
        Layout(dp=2), Layout(dp=2, optimizer="layers"), Layout(dp=2, moe=True, ep=2), Layout(pp=2, optimizer="fp32"),
        Layout(dp=2, optimizer="offload"), Layout(dp=2, optimizer="aware"),
    )  # fmt: skip
    for layout in some(layouts, 3):
        ends = []
        for options in (None, {"every": 1}):
            job = Job(layout, seed=1)
            witness = megatron_unickpt.witness(job.chunks, job.optimizer, options)
            job.train(3)
            assert _told(witness) == [], layout
            ends.append([p.detach().clone() for module in job.modules for p in module.parameters()])
            if options is not None:
                assert witness.passed.passed_until == 2, layout  # what is at rest after the third step is not yet seen
            witness.close()
        assert all(map(torch.equal, *ends)), layout
