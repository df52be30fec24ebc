"""Save and resume of training jobs: model, optimizer, generators and vocabulary."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import unittest
import unittest.mock
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

import megatron_unickpt
from megatron_unickpt.edge import RUNTIME
from megatron_unickpt.held_state.optimizer import METADATA
from megatron_unickpt.testing import cpu
from megatron_unickpt.testing.jobs import Job
from megatron_unickpt.testing.layouts import Layout
from megatron_unickpt.testing.truth import consolidated, optimizers_take_metadata, own_forms
from tests.support.extent import FULL, some
from tests.jobs.megatron.compared import differences
from tests.jobs.megatron.moved import moved_losses
from tests.jobs.megatron.scenarios import scenario
from tests.jobs.megatron.sharded_state import made, strategy
from tests.support.rounding import assert_continues
from unickpt.checkpoint.load.checkpoint import Checkpoint


@scenario(2)
def the_same_shape_resumes_bit_for_bit(folder: Path) -> None:
    job = Job(Layout(tp=2), seed=1)
    job.train(2)
    megatron_unickpt.save(folder / "ck", job.chunks, job.optimizer, iteration=2)
    expected = job.train(3)
    again = Job(Layout(tp=2), seed=9)
    megatron_unickpt.load(folder / "ck", again.chunks, again.optimizer)
    again.step = 2
    assert again.train(3) == expected


@scenario(2)
def nothing_is_gathered_and_every_byte_is_written_once(folder: Path) -> None:
    """Bytes on disk: 12 per parameter (master and two moments), whatever the wrapper and the number of ranks."""
    for optimizer in ("dist", "plain", "fp32"):
        job = Job(Layout(dp=2, optimizer=optimizer), width=64)
        job.train(1)
        megatron_unickpt.save(folder / optimizer, job.chunks, job.optimizer)
        count = sum(p.numel() for module in job.modules for p in module.parameters())
        size = RUNTIME.last_save.size_bytes
        assert 12 * count <= size < 12.6 * count + 60_000, (optimizer, size / count)
        sizes = [f.size_bytes for f in Checkpoint.open(folder / optimizer).manifest.files if f.path.startswith("data/")]
        assert max(sizes) < 1.1 * min(sizes), (optimizer, sizes)


@scenario(2)
def a_weight_changed_by_hand_is_not_replaced_by_the_cast_of_its_master(folder: Path) -> None:
    job = Job(Layout(dp=2))
    job.train(1)
    weight = dict(job.modules[0].named_parameters())["decoder.final_layernorm.weight"]
    with torch.no_grad():
        weight[3] = 42.0
    megatron_unickpt.save(folder / "ck", job.chunks, job.optimizer)
    other = Job(Layout(tp=2, optimizer="plain"), seed=5)
    megatron_unickpt.load(folder / "ck", other.chunks, other.optimizer)
    assert float(dict(other.modules[0].named_parameters())["decoder.final_layernorm.weight"][3]) == 42.0


@scenario(2)
def weights_load_without_optimizer_and_an_optimizer_loads_before_its_first_step(folder: Path) -> None:
    job = Job(Layout(tp=2, optimizer="plain"))
    job.train(1)
    truth = consolidated(job, folder / "scratch")
    megatron_unickpt.save(folder / "weights", job.chunks)
    megatron_unickpt.save(folder / "all", job.chunks, job.optimizer)
    for name in ("weights", "all"):
        other = Job(Layout(dp=2, optimizer="plain"), seed=3)
        other.train(1)
        megatron_unickpt.load(folder / name, other.chunks)
        found = consolidated(other, folder / "scratch")
        if dist.get_rank() == 0:
            weights = {k: v for k, v in truth.items() if k.startswith("weight/")}
            assert differences(weights, {k: v for k, v in found.items() if k.startswith("weight/")}) == []
    fresh = Job(Layout(dp=2))
    megatron_unickpt.save(folder / "fresh", fresh.chunks, fresh.optimizer)
    again = Job(Layout(tp=2), seed=8)
    megatron_unickpt.load(folder / "fresh", again.chunks, again.optimizer)
    again.train(1)


@scenario(2)
def generators_and_trackers_continue_at_the_same_positions(folder: Path) -> None:
    from megatron.core.tensor_parallel import random as trackers

    job = Job(Layout(tp=2))
    job.train(1)
    megatron_unickpt.save(folder / "ck", job.chunks, job.optimizer)

    def draw() -> list[float]:
        with trackers.get_cuda_rng_tracker().fork():
            inside = torch.rand(3)
        return [*inside.tolist(), *torch.rand(3).tolist()]

    expected = draw()
    again = Job(Layout(tp=2), seed=5)
    megatron_unickpt.load(folder / "ck", again.chunks, again.optimizer)
    assert draw() == expected
    other = Job(Layout(dp=2), seed=5)
    started = draw()
    other = Job(Layout(dp=2), seed=5)
    megatron_unickpt.load(folder / "ck", other.chunks, other.optimizer)
    entry = next(e for e in RUNTIME.last_report.entries if e.name.startswith("unickpt_rng"))
    assert entry.outcome == "re-seeded"
    assert draw() not in (expected, started)


@scenario(2)
def padded_vocabularies_of_different_sizes_load_into_each_other(folder: Path) -> None:
    small, large = Job(Layout(tp=2), vocabulary=96), None
    small.train(1)
    megatron_unickpt.save(folder / "ck", small.chunks, small.optimizer)
    before = dist_checkpointing.load_plain_tensors(str(folder / "ck"))
    large = Job(Layout(dp=2), vocabulary=104, seed=4)
    megatron_unickpt.load(folder / "ck", large.chunks, large.optimizer)
    weight = dict(large.modules[0].named_parameters())["embedding.word_embeddings.weight"]
    assert torch.equal(weight[:96], before["embedding.word_embeddings.weight"])
    large.train(1)


@scenario(2)
def token_rows_are_never_dropped_and_padding_may_change(folder: Path) -> None:
    source = Job(Layout(tp=2), vocabulary=104)
    source.train(1)
    megatron_unickpt.save(folder / "unknown", source.chunks, source.optimizer)
    megatron_unickpt.save(folder / "known", source.chunks, source.optimizer, vocabulary=96)
    stored = dist_checkpointing.load_plain_tensors(str(folder / "known"))
    name = "embedding.word_embeddings.weight"
    refused = (("unknown", 96, "does not record how many"), ("known", 80, "96 of them entries of its tokenizer"))
    for where, rows, reason in refused:
        smaller = Job(Layout(dp=2), vocabulary=rows, seed=4)
        before = {key: value.clone() for key, value in smaller.modules[0].state_dict().items() if torch.is_tensor(value)}
        with pytest.raises(CheckpointingException, match=f"104 rows in the checkpoint.* {rows} in this job") as caught:
            megatron_unickpt.load(folder / where, smaller.chunks, smaller.optimizer)
        assert reason in str(caught.value)
        assert "unickpt edit" in str(caught.value)
        assert all(torch.equal(value, smaller.modules[0].state_dict()[key]) for key, value in before.items())
    smaller = Job(Layout(dp=2, optimizer="plain"), vocabulary=96, seed=4)
    megatron_unickpt.load(folder / "known", smaller.chunks, smaller.optimizer)
    assert torch.equal(dict(smaller.modules[0].named_parameters())[name], stored[name][:96])
    megatron_unickpt.save(folder / "again", smaller.chunks, smaller.optimizer)
    found = dist_checkpointing.load_plain_tensors(str(folder / "again"))
    for key, value in stored.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value[:96] if name in key else value), key


@scenario(2)
def a_parameter_that_became_trainable_begins_with_an_empty_optimizer_state(folder: Path) -> None:
    """Everything else is restored. A frozen parameter has a weight, but no group and no moments."""

    def frozen(name: str) -> bool:
        return "linear_fc2" in name

    for kind in ("dist", "plain"):
        source = Job(Layout(tp=2, optimizer=kind), frozen=frozen)
        source.train(2)
        megatron_unickpt.save(folder / kind, source.chunks, source.optimizer)
        targets = (Layout(dp=2, optimizer="dist" if kind == "plain" else "plain"), Layout(tp=2, optimizer=kind))
        for target in some(targets, 1):
            trainable = Job(target, seed=7)
            before = [p.detach().clone() for p in trainable.modules[0].parameters()]
            with pytest.raises(CheckpointingException, match=r"linear_fc2.weight.*not trained.*missing_state=fresh"):
                megatron_unickpt.load(folder / kind, trainable.chunks, trainable.optimizer)
            assert all(map(torch.equal, before, trainable.modules[0].parameters()))
            megatron_unickpt.load(folder / kind, trainable.chunks, trainable.optimizer, missing_state="fresh")
            untrained = [entry for entry in RUNTIME.last_report.entries if entry.reason.startswith("it was not trained")]
            assert {entry.state for entry in untrained} == {"exp_avg", "exp_avg_sq"}
            megatron_unickpt.save(folder / "again", trainable.chunks, trainable.optimizer)
            old, new = Checkpoint.open(folder / kind), Checkpoint.open(folder / "again")
            for info in new.index.tensors:
                if info.kind == "object":
                    continue
                value = new.read_tensor(info.name, info.state)
                if old.info(info.name, info.state) is not None:
                    assert torch.equal(value, old.read_tensor(info.name, info.state)), info.key
                elif info.state == "master":
                    assert torch.equal(value, old.read_tensor(info.name, "weight").float()), info.key
                else:
                    assert not value.any(), info.key
            trainable.train(1)


def _assert_loads(folder: Path, source: Layout, target: Layout, *, trains: bool = True, **options: Any) -> None:
    """Compare all states of two jobs through Megatron's own sharded state dicts, and with ``trains`` one further step."""
    job = Job(source, **options)
    job.train(2)
    expected = consolidated(job, folder / "expected")
    megatron_unickpt.save(folder / "ck", job.chunks, job.optimizer, iteration=2)
    losses, moved = _going_on(job, folder / "ck") if trains else ([], [])
    job = Job(target, seed=5, **options)
    megatron_unickpt.load(folder / "ck", job.chunks, job.optimizer)
    job.step = 2
    found = consolidated(job, folder / "found")
    if expected is not None and found is not None:
        assert not differences(expected, found), differences(expected, found)[:5]
    if trains:
        assert_continues(job.train(1), losses, losses, *moved)


def _going_on(job: Job, checkpoint: Path) -> tuple[list[float], list[list[float]]]:
    """Return the loss of the next step of a job, and those of jobs that differ from it by rounding."""
    return job.train(1), [moved_losses(job, checkpoint, 2, 1, seed=seed) for seed in range(3)]


@scenario(2)
def multi_token_prediction_layers_are_restored(folder: Path) -> None:
    _assert_loads(folder, Layout(tp=2), Layout(dp=2, optimizer="plain"), predictions=1)


@scenario(2)
def the_layer_wise_and_the_distributed_optimizer_load_each_others_state(folder: Path) -> None:
    """Both have bf16 weights and fp32 masters."""
    if importlib.util.find_spec("megatron.core.optimizer.layer_wise_optimizer") is None:
        raise unittest.SkipTest("needs the layer-wise optimizer of 0.15")
    _assert_loads(folder / "1", Layout(dp=2, optimizer="layers"), Layout(tp=2))
    _assert_loads(folder / "2", Layout(dp=2), Layout(dp=2, optimizer="layers"), trains=FULL)
    if FULL:
        experts = Layout(dp=2, ep=2, moe=True, optimizer="layers")
        _assert_loads(folder / "3", experts, Layout(pp=2, moe=True, optimizer="plain"))


@scenario(2)
def grouped_and_sequential_experts_load_each_others_state(folder: Path) -> None:
    """``GroupedMLP`` has the experts of a rank in one parameter, with input and output exchanged."""
    if not cpu.has_grouped_experts():
        raise unittest.SkipTest("this Megatron has no GroupedMLP")
    sequential, grouped = Layout(dp=2, ep=2, moe=True), Layout(tp=2, moe=True, grouped=True)
    _assert_same_tensors(folder / "1", sequential, grouped)
    _assert_same_tensors(folder / "2", grouped, sequential, trains=FULL)
    if FULL:
        other = Layout(dp=2, ep=2, moe=True, grouped=True)
        _assert_same_tensors(folder / "3", replace(grouped, optimizer="plain"), other)


def _assert_same_tensors(folder: Path, source: Layout, target: Layout, *, trains: bool = True) -> None:
    """Load into a job of another layout and save again: both checkpoints have the same tensors, and training continues."""
    job = Job(source, tied=False)
    job.train(2)
    megatron_unickpt.save(folder / "a", job.chunks, job.optimizer, iteration=2)
    losses, moved = _going_on(job, folder / "a") if trains else ([], [])
    job = Job(target, seed=5, tied=False)
    megatron_unickpt.load(folder / "a", job.chunks, job.optimizer)
    job.step = 2
    megatron_unickpt.save(folder / "b", job.chunks, job.optimizer, iteration=2)
    if trains:
        assert_continues(job.train(1), losses, losses, *moved)
    old, new = Checkpoint.open(folder / "a"), Checkpoint.open(folder / "b")
    kept = [{info.key for info in each.index.tensors if info.kind != "object"} for each in (old, new)]
    assert kept[0] == kept[1], kept[0] ^ kept[1]
    unequal = [key for key in kept[0] if not torch.equal(old.read_tensor(*key), new.read_tensor(*key))]
    assert not unequal, unequal


@scenario(2)
def the_log_has_the_report_of_a_load(folder: Path) -> None:
    job = Job(Layout(tp=2))
    job.train(1)
    megatron_unickpt.save(folder / "ck", job.chunks, job.optimizer)
    other = Job(Layout(dp=2, optimizer="fp32"), seed=3)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("unickpt").addHandler(handler)
    megatron_unickpt.load(folder / "ck", other.chunks, other.optimizer)
    logging.getLogger("unickpt").removeHandler(handler)
    if dist.get_rank() == 0:
        heading, *others = lines
        assert "TP2 PP1 DP1 on 2 ranks" in heading.replace(" ETP2", "")
        assert "into TP1 PP1 DP2 on 2 ranks" in heading
        assert not [line for line in others if "restored" in line or "bytes read on this rank" in line]
        json.dumps(RUNTIME.last_report.to_json())


@scenario(2)
def optimizers_keep_megatrons_sharding_types_without_unickpts_metadata(folder: Path) -> None:
    """unickpt can also store Megatron's own sharding types."""
    if not optimizers_take_metadata():
        raise unittest.SkipTest("needs the metadata of 0.13")
    job = Job(Layout(dp=2))
    job.train(1)
    kind = own_forms()[0]
    native = {"distrib_optim_sharding_type": kind, "chained_optim_avoid_prefix": True}
    state: dict[str, Any] = {"model": job.modules[0].sharded_state_dict(metadata=native)}
    state["optimizer"] = job.optimizer.sharded_state_dict(state, metadata=native)
    dist_checkpointing.save(state, made(folder / "ck"), strategy(), content_metadata=native)
    assert METADATA["unickpt"] is True
    again = Job(Layout(dp=2), seed=4)
    state = {"model": again.modules[0].sharded_state_dict(metadata=native)}
    state["optimizer"] = again.optimizer.sharded_state_dict(state, is_loading=True, metadata=native)
    loaded = dist_checkpointing.load(state, str(folder / "ck"))
    again.modules[0].load_state_dict(loaded["model"])
    again.optimizer.load_state_dict(loaded["optimizer"])
    again.step = 1
    assert again.train(2) == job.train(2)


def _schedule(job: Job, highest: float, lowest: float, *, override: bool) -> OptimizerParamScheduler:
    """Return a scheduler whose bounds are also in the groups, as the scripts make it."""
    for group in job.optimizer.param_groups:
        group |= {"max_lr": highest, "min_lr": lowest}
    return OptimizerParamScheduler(
        job.optimizer, 0.0, highest, lowest, 0, 100, "cosine", 0.1, 0.1, 100, "constant",
        use_checkpoint_opt_param_scheduler=not override, override_opt_param_scheduler=override,
    )  # fmt: skip


@scenario(2)
def a_schedule_that_overrides_has_the_bounds_of_the_job(folder: Path) -> None:
    """``--override-opt_param-scheduler``: Megatron itself keeps the bounds of the checkpoint's groups."""
    job = Job(Layout(tp=2))
    scheduler = _schedule(job, 6e-4, 6e-4, override=False)
    job.train(1)
    scheduler.step(50)
    megatron_unickpt.save(folder / "ck", job.chunks, job.optimizer, scheduler=scheduler)
    for override, highest, lowest in ((False, 6e-4, 6e-4), (True, 2e-4, 2e-5)):
        other = Job(Layout(dp=2), seed=7)
        scheduler = _schedule(other, 2e-4, 2e-5, override=override)
        megatron_unickpt.load(folder / "ck", other.chunks, other.optimizer, scheduler=scheduler)
        assert scheduler.num_steps == 50
        for group in other.optimizer.param_groups:
            assert (group["max_lr"], group["min_lr"]) == (highest, lowest)
            assert group["lr"] == lowest + 0.5 * (math.cos(math.pi * 0.5) + 1.0) * (highest - lowest)
