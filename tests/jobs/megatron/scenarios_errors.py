"""Damaged checkpoints, and jobs that a checkpoint does not fit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject

import megatron_unickpt
from megatron_unickpt.framework import marks
from megatron_unickpt.framework.errors import MegatronSaveError
from megatron_unickpt.testing.jobs import Job
from megatron_unickpt.testing.layouts import Layout
from tests.jobs.megatron.scenarios import scenario
from tests.jobs.megatron.sharded_state import halves, made, shards_begin_anywhere, strategy
from unickpt.base.options.job import MemoryOptions


@scenario(2)
def a_key_missing_on_one_rank_fails_the_load_on_all_ranks(folder: Path) -> None:
    where = made(folder / "ck")
    dist_checkpointing.save({"a": halves("a", torch.ones(4, 2))}, where, strategy())
    wanted: dict[str, Any] = {"a": halves("a", torch.zeros(4, 2))}
    if dist.get_rank() == 1:
        wanted["b"] = ShardedTensor.from_rank_offsets("b", torch.zeros(2))
    with pytest.raises(CheckpointingException):
        dist_checkpointing.load(wanted, where, strict="raise_unexpected")


@scenario(2)
def a_model_that_one_rank_cannot_describe_fails_on_all_ranks(folder: Path) -> None:
    """Without waiting for the time limit: a program that catches the error goes on, and its process does not end."""
    job, where = Job(Layout(dp=2)), str(folder / "ck")
    megatron_unickpt.save(where, job.chunks, job.optimizer, iteration=1)
    describe = job.modules[0].sharded_state_dict

    def refusing(*_: Any, **__: Any) -> Any:
        raise AssertionError("tied embeddings")

    if dist.get_rank() == 1:
        job.modules[0].sharded_state_dict = refusing
    (folder / "memory").mkdir(exist_ok=True)
    in_memory = MemoryOptions(4, folder=str(folder / "memory"))
    ways: list[dict[str, Any]] = [{}, {"asynchronous": True}, {"memory": in_memory}]
    for way in ways:
        with pytest.raises(MegatronSaveError, match=r"rank 1.*tied embeddings"):
            megatron_unickpt.save(str(folder / "no"), job.chunks, job.optimizer, iteration=2, timeout_s=60, **way)
    own = AssertionError if dist.get_rank() == 1 else CheckpointingException
    with pytest.raises(own, match="tied embeddings"):
        megatron_unickpt.load(where, job.chunks, job.optimizer, timeout_s=60)
    with pytest.raises(own, match="tied embeddings"):
        megatron_unickpt.resume_or_start(str(folder), job.chunks, job.optimizer, timeout_s=60)
    job.modules[0].sharded_state_dict = describe
    assert megatron_unickpt.load(where, job.chunks, job.optimizer)["iteration"] == 1
    megatron_unickpt.save(str(folder / "no"), job.chunks, job.optimizer, iteration=2)


@scenario(2)
def another_number_of_layers_is_refused_by_names_and_shapes(folder: Path) -> None:
    """The error does not list objects that are stored by position, such as ``_extra_state``, which do not fit either."""
    source = Job(Layout(tp=2))
    megatron_unickpt.save(folder / "ck", source.chunks, source.optimizer)
    other = Job(Layout(tp=2), layers=2)
    described: dict[str, Any] = {"model": other.modules[0].sharded_state_dict()}
    described["extra"] = ShardedObject("decoder.layers._extra_state", None, (2,), (0,), replica_id=dist.get_rank())
    with pytest.raises(CheckpointingException) as caught:
        dist_checkpointing.load(described, str(folder / "ck"))
    assert "of another shape" in str(caught.value)
    assert "_extra_state" not in str(caught.value)


def _saved(folder: Path) -> Path:
    dist_checkpointing.save({"a": halves("a", torch.arange(8.0).view(4, 2)), "iteration": 3}, made(folder / "ck"), strategy())
    return folder / "ck"


def _refusal(where: Path) -> str:
    with pytest.raises(CheckpointingException) as caught:
        dist_checkpointing.load({"a": halves("a", torch.zeros(4, 2))}, str(where))
    return str(caught.value)


@scenario(2)
def a_flipped_bit_is_found_and_named_on_every_rank(folder: Path) -> None:
    where = _saved(folder)
    if dist.get_rank() == 0:
        path = next((where / "data").glob("rank00001*"))
        data = bytearray(path.read_bytes())
        data[-3] ^= 4
        path.write_bytes(data)
    dist.barrier()
    message = _refusal(where)
    assert "rank00001" in message
    assert "checksum" in message


@scenario(2)
def a_missing_or_truncated_file_and_a_missing_manifest_are_refused(folder: Path) -> None:
    for name, damage in (
        ("missing", lambda p: p.unlink()),
        ("bytes, expected", lambda p: p.write_bytes(p.read_bytes()[:-1])),
    ):
        where = _saved(folder)
        if dist.get_rank() == 0:
            damage(next((where / "data").glob("rank00000*")))
        dist.barrier()
        assert name in _refusal(where)
        dist.barrier()
    where = _saved(folder)
    if dist.get_rank() == 0:
        os.remove(where / "manifest.json")
    dist.barrier()
    with pytest.raises(CheckpointingException, match=r"no manifest\.json, so this is not a checkpoint"):
        dist_checkpointing.load({"a": halves("a", torch.zeros(4, 2))}, str(where))


@scenario(2)
def an_error_lists_every_tensor_that_does_not_fit(folder: Path) -> None:
    where = _saved(folder)
    wanted = {
        "a": ShardedTensor.from_rank_offsets("a", torch.zeros(3, 2), replica_id=dist.get_rank()),
        "x": ShardedTensor.from_rank_offsets("x", torch.zeros(3), replica_id=dist.get_rank()),
        "y": ShardedTensor.from_rank_offsets("y", torch.zeros(3), replica_id=dist.get_rank()),
    }
    with pytest.raises(CheckpointingException) as caught:
        dist_checkpointing.load(wanted, str(where))
    message = str(caught.value)
    assert "not in the checkpoint (2): x; y" in message
    assert "a: (4, 2) in the checkpoint, (3, 2) in this job" in message


@scenario(2)
def holes_and_overlaps_are_not_committed(folder: Path) -> None:
    rank = dist.get_rank()
    cases = [("hole", 0 if rank == 0 else 3), ("overlap", 0 if rank == 0 else 1)]
    for name, offset in cases if shards_begin_anywhere() else cases[:1]:
        where = made(folder / name)
        part = torch.ones(2 if name == "overlap" or rank == 0 else 1)
        state = {"a": ShardedTensor("a", part, part.dtype, part.shape, (3 if name == "overlap" else 4,), (offset,), None)}
        with pytest.raises(MegatronSaveError, match="a"):
            dist_checkpointing.save(state, where, strategy())
        assert not marks.recognises(where)


@scenario(2)
def another_model_is_refused_with_the_names(folder: Path) -> None:
    job = Job(Layout(tp=2))
    megatron_unickpt.save(folder / "ck", job.chunks, job.optimizer)
    other = Job(Layout(tp=2), width=64)
    with pytest.raises(CheckpointingException) as caught:
        megatron_unickpt.load(folder / "ck", other.chunks, other.optimizer)
    assert "of another shape" in str(caught.value)
    assert "in the checkpoint" in str(caught.value)


@scenario(2)
def nothing_is_saved_if_ranks_pass_different_directories(folder: Path) -> None:
    """Megatron's scripts do not save in their own format then: each rank would write to a folder of its own."""
    state: dict[str, Any] = {"a": halves("a", torch.arange(8.0).view(4, 2)), "iteration": 3}
    with pytest.raises(MegatronSaveError, match=r"of-rank1.*of-rank0") as caught:
        dist_checkpointing.save(state, made(folder / f"of-rank{dist.get_rank()}"), strategy())
    assert not caught.value.framework_saves
    dist.barrier()
    assert not list(folder.glob("of-rank*/*"))


@scenario(2)
def the_checkpoint_of_another_model_is_not_replaced(folder: Path) -> None:
    actor, critic = Job(Layout(tp=2), seed=1), Job(Layout(tp=2), seed=2)
    megatron_unickpt.save(folder / "ck", actor.chunks, actor.optimizer, extra={"who": "actor"})
    for asynchronous in (False, True):
        with pytest.raises(MegatronSaveError, match=r"another model.*a tag of its own") as caught:
            megatron_unickpt.save(folder / "ck", critic.chunks, critic.optimizer, asynchronous=asynchronous)
        assert not caught.value.framework_saves
    assert megatron_unickpt.load(folder / "ck", actor.chunks, actor.optimizer)["extra"] == {"who": "actor"}
    megatron_unickpt.save(folder / "ck", actor.chunks, actor.optimizer, extra={"who": "actor again"})
    megatron_unickpt.save(folder / "other", critic.chunks, critic.optimizer)
    assert megatron_unickpt.load(folder / "ck", critic.chunks)["extra"] == {"who": "actor again"}, "its weights"
