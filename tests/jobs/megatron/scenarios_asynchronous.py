"""Asynchronous saves through Megatron's queue."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import check_is_distributed_checkpoint
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from megatron_unickpt.framework import marks
from tests.jobs.megatron.scenarios import scenario
from tests.jobs.megatron.sharded_state import halves, made, strategy
from unickpt.checkpoint.load.checkpoint import Checkpoint


@scenario(2)
def asynchronous_saves_use_megatrons_queue_and_fork_no_process(folder: Path) -> None:
    import multiprocessing

    whole = torch.rand(600, 50)
    dist.broadcast(whole, 0)
    where, finalized = made(folder / "ck"), []
    live = halves("a", whole)
    before = len(multiprocessing.active_children())
    request = dist_checkpointing.save({"a": live}, where, strategy(), async_sharded_save=True)
    request.add_finalize_fn(lambda: finalized.append(Checkpoint.open(where).manifest.step))
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    live.data.fill_(-1)  # training continues
    assert queue.get_num_unfinalized_calls() == 1
    assert len(multiprocessing.active_children()) == before
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert finalized == [0]
    loaded = dist_checkpointing.load({"a": halves("a", torch.zeros(600, 50))}, where)
    assert torch.equal(loaded["a"], whole.chunk(2)[dist.get_rank()])


@scenario(2)
def two_asynchronous_saves_and_a_load_run_at_the_same_time(folder: Path) -> None:
    queue, places = AsyncCallsQueue(), [made(folder / str(at)) for at in range(3)]
    dist_checkpointing.save({"a": halves("a", torch.full((4, 2), 2.0))}, places[2], strategy())
    for at, where in enumerate(places[:2]):
        state = {"a": halves("a", torch.full((4000, 500), float(at)))}
        queue.schedule_async_request(dist_checkpointing.save(state, where, strategy(), async_sharded_save=True))
    loaded = dist_checkpointing.load({"a": halves("a", torch.zeros(4, 2))}, places[2])
    assert loaded["a"].unique().tolist() == [2.0]
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
    for at, where in enumerate(places[:2]):
        assert dist_checkpointing.load({"a": halves("a", torch.zeros(4000, 500))}, where)["a"].unique().tolist() == [float(at)]


@scenario(2)
def a_failed_asynchronous_save_logs_a_warning_and_is_not_finalized(folder: Path) -> None:
    where, finalized = made(folder / "ck"), []
    if dist.get_rank() == 1:
        blocked = folder / "ck" / "data"
        blocked.write_text("a file in place of the folder")
    dist.barrier()
    request = dist_checkpointing.save({"a": halves("a", torch.ones(4, 2))}, where, strategy(), async_sharded_save=True)
    request.add_finalize_fn(lambda: finalized.append(1))
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    assert finalized == []
    assert not check_is_distributed_checkpoint(where)
    assert not marks.recognises(where)


@scenario(2)
def an_asynchronous_save_runs_in_the_queue_of_another_package(folder: Path) -> None:
    """As in that of NVIDIA's resiliency extension, whose worker process ignores requests of Megatron's class."""
    state = {"a": halves("a", torch.ones(4, 2))}
    request = dist_checkpointing.save(state, made(folder / "ck"), strategy(), async_sharded_save=True)
    done: list[str] = []
    request.add_finalize_fn(lambda: done.append("finalized"))
    assert request.async_fn is None  # no process is started
    assert request.freeze()._replace(call_idx=3).execute_finalize_fns(validate_matching_call_idx=True) == 3
    assert marks.recognises(str(folder / "ck"))
    assert done == ["finalized"]
