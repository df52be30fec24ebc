"""Checkpoints and jobs that do not have the same parameters and states. See also ``partial_loads``, of which CI runs a part."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException

import megatron_unickpt
from megatron_unickpt.framework import cpu_offload, optimizer_internals
from megatron_unickpt.edge import RUNTIME
from megatron_unickpt.testing import cpu
from megatron_unickpt.testing.jobs import Job
from megatron_unickpt.testing.layouts import Layout
from tests.jobs.megatron import partial_loads
from tests.jobs.megatron.scenarios import scenario
from unickpt.checkpoint.load.checkpoint import Checkpoint


def _chosen() -> list[str]:
    layers = importlib.util.find_spec("megatron.core.optimizer.layer_wise_optimizer") is not None  # since 0.15
    return [name for name in partial_loads.CHOSEN if layers or not name.endswith("-layers")]


@scenario(2)
def a_job_that_has_trained_is_after_a_load_as_a_new_one(folder: Path) -> None:
    problems = {name: partial_loads.run(partial_loads.Cell.parse(name), folder) for name in _chosen()}
    assert not any(problems.values()), problems


@scenario(2)
def trained_parameters_are_dropped_only_if_the_caller_says_so(folder: Path) -> None:
    """The checkpoint has a layer more than the model."""
    source = Job(Layout(tp=2), predictions=1)
    source.train(1)
    megatron_unickpt.save(folder / "ck", source.chunks, source.optimizer)
    target = Job(Layout(dp=2), seed=3)
    before = [p.detach().clone() for p in target.modules[0].parameters()]
    with pytest.raises(CheckpointingException, match=r"no rank of this job loads .* parameters of the checkpoint: mtp"):
        megatron_unickpt.load(folder / "ck", target.chunks, target.optimizer)
    assert all(map(torch.equal, before, target.modules[0].parameters()))
    megatron_unickpt.load(folder / "ck", target.chunks, target.optimizer, strict=False)
    left = {e.name for e in RUNTIME.last_report.entries if e.outcome == "left out" and e.state == "master"}
    stored = dist_checkpointing.load_plain_tensors(str(folder / "ck"))
    name = "embedding.word_embeddings.weight"
    assert torch.equal(dict(target.modules[0].named_parameters())[name], stored[name])
    if dist.get_rank() == 0:
        tensors = Checkpoint.open(folder / "ck").index.tensors
        assert left == {info.name for info in tensors if info.name.startswith("mtp.") and info.state == "master"}
    target.train(1)


@scenario(2)
def weights_that_dist_checkpointing_loads_alone_survive_the_next_step(folder: Path) -> None:
    """A loop of its own loads the model first or last, and its optimizer from the same folder or not at all."""
    source = Job(Layout(tp=2))
    source.train(2)
    megatron_unickpt.save(folder / "ck", source.chunks, source.optimizer, iteration=2)
    expected = source.train(2)
    for optimizer in ("dist", "plain"):
        job = Job(Layout(tp=2, optimizer=optimizer), seed=4)
        job.train(1)
        dist_checkpointing.load({"model": job.modules[0].sharded_state_dict()}, str(folder / "ck"))
        loaded = [p.detach().clone() for p in job.modules[0].parameters()]
        for group in job.optimizer.param_groups:
            group.update(lr=0.0, weight_decay=0.0)
        job.train(1)
        assert all(map(torch.equal, loaded, job.modules[0].parameters()))
    again = Job(Layout(tp=2), seed=6)
    again.train(1)
    megatron_unickpt.load(folder / "ck", again.chunks, again.optimizer)
    dist_checkpointing.load({"model": again.modules[0].sharded_state_dict()}, str(folder / "ck"))  # keeps the masters' bits
    again.step = 2
    assert again.train(2) == expected
    if cpu.has_grouped_experts():
        _masters_of_copied_weights(folder)


def _masters_of_copied_weights(folder: Path) -> None:
    """A load fills copies of the weights of ``GroupedMLP``. The parameters have them only after ``load_state_dict``."""
    layout = Layout(tp=2, moe=True, grouped=True)
    source = Job(layout, tied=False)
    source.train(1)
    megatron_unickpt.save(folder / "grouped", source.chunks, source.optimizer)
    expected = _masters(source)
    assert any("experts.weight1" in name for name in expected)
    for with_optimizer in (True, False):
        job = Job(layout, seed=5, tied=False)
        if with_optimizer:
            megatron_unickpt.load(folder / "grouped", job.chunks, job.optimizer)
            with torch.no_grad():
                for parameter in job.modules[0].parameters():  # the caller's loop sets them again
                    parameter.zero_()
        job.modules[0].load_state_dict(
            dist_checkpointing.load({"model": job.modules[0].sharded_state_dict()}, str(folder / "grouped"))["model"]
        )
        found = _masters(job)
        wrong = [name for name, master in found.items() if not torch.equal(master.bfloat16(), expected[name].bfloat16())]
        lost = [name for name, master in found.items() if with_optimizer and not torch.equal(master, expected[name])]
        assert wrong + lost == [], with_optimizer


def _masters(job: Job) -> dict[str, torch.Tensor]:
    names = {id(parameter): name for name, parameter in job.modules[0].named_parameters()}
    held = (held for leaf in optimizer_internals.leaves(job.optimizer, allocate=False) for held in leaf.held)
    return {names[id(each.parameter)]: each.main.detach().clone().view(-1) for each in held}


@scenario(2)
def a_parameter_that_had_no_gradient_begins_to_count_at_zero(folder: Path) -> None:
    """Its optimizer counts the steps of each parameter, and has no state for this one."""
    layout = Layout(tp=2, optimizer="fp32offload")
    source = Job(layout)
    source.train(2)
    leaf = optimizer_internals.leaves(source.optimizer, allocate=False)[0]
    copies = [each for each in leaf.copies.values() if cpu_offload.steps_per_parameter(each.optimizer)]
    new = next(held for held in leaf.held for copy in copies if copy.stepped is held.main)
    for copy in copies:
        if copy.stepped is new.main:
            del copy.optimizer.state[copy.stepped]
    megatron_unickpt.save(folder / "ck", source.chunks, source.optimizer)
    name = next(n for n, parameter in source.modules[0].named_parameters() if parameter is new.parameter)
    target = Job(layout, seed=3)
    target.train(1)
    megatron_unickpt.load(folder / "ck", target.chunks, target.optimizer)
    names = {id(parameter): n for n, parameter in target.modules[0].named_parameters()}
    held = [held for leaf in optimizer_internals.leaves(target.optimizer, allocate=False) for held in leaf.held]
    steps = {names[id(each.parameter)]: float(each.scalars["step"]) for each in held}
    assert steps == {each: 0.0 if each == name else 2.0 for each in steps}


@scenario(2)
def a_checkpoint_without_optimizer_is_a_warning(folder: Path) -> None:
    source = Job(Layout(tp=2))
    megatron_unickpt.save(folder / "ck", source.chunks)
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("unickpt").addHandler(handler)
    target = Job(Layout(dp=2), seed=3)
    megatron_unickpt.load(folder / "ck", target.chunks, target.optimizer)
    logging.getLogger("unickpt").removeHandler(handler)
    said = [line for line in lines if "the checkpoint has no optimizer" in line and "begins anew" in line]
    assert len(said) == (dist.get_rank() == 0)
