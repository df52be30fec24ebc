"""Checkpoints in the memory of hosts. A host is a folder in memory with a keeper of its own, and each rank has one."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

import megatron_unickpt
from megatron_unickpt import api
from megatron_unickpt.edge import RUNTIME
from megatron_unickpt.testing.jobs import Job
from megatron_unickpt.testing.layouts import Layout
from megatron_unickpt.testing.truth import consolidated
from tests.jobs.megatron.compared import differences
from tests.jobs.megatron.scenarios import scenario
from tests.support.logs import logged
from unickpt.base.options.job import MemoryOptions
from unickpt.checkpoint.save import shutdown


def memory(folder: Path, host: int, to_disk_every: int) -> MemoryOptions:
    place = folder / f"host{host}"
    place.mkdir(parents=True, exist_ok=True)
    return MemoryOptions(to_disk_every, folder=str(place))


def forget(folder: Path) -> None:
    """Wait for copies, and forget the memory tier, as a new process does. The end of this one writes nothing from it."""
    shutdown.finish_all(ending=False)
    RUNTIME.saved_to_disk(str(folder / "c"), 0.0)
    RUNTIME._memory = None
    dist.barrier()


def save(folder: Path, job: Job, step: int, options: MemoryOptions) -> None:
    name = folder / "c" / f"iter_{step:07d}"
    megatron_unickpt.save(name, job.chunks, job.optimizer, iteration=step, extra={"at": step}, memory=options)


def on_disk(folder: Path) -> list[str]:
    dist.barrier()
    return sorted(path.parent.name for path in (folder / "c").glob("*/manifest.json"))


@scenario(2)
def a_host_is_lost_and_the_others_resume_under_another_parallel_shape(folder: Path) -> None:
    """Four saves, every third one to disk. The newest is in memory, and equal bit for bit under each shape."""
    rank = dist.get_rank()
    job = Job(Layout(tp=2), seed=1)
    for step in range(1, 5):
        job.train(1)
        save(folder, job, step, memory(folder, rank, 3))
    truth = consolidated(job, folder / "truth")
    forget(folder)
    assert on_disk(folder) == ["iter_0000003"]
    if rank == 1:
        shutil.rmtree(folder / "host1")
    dist.barrier()
    for layout in (Layout(pp=2), Layout(dp=2, optimizer="plain")):
        other = Job(layout, seed=5)
        options = memory(folder, 2 * rank, 3)
        found = megatron_unickpt.resume_or_start(folder / "c", other.chunks, other.optimizer, memory=options)
        assert found == {"iteration": 4, "extra": {"at": 4}}
        states = consolidated(other, folder / "found")
        if truth is not None and states is not None:
            assert differences(truth, states) == []
        forget(folder)
    shutil.rmtree(folder / f"host{2 * rank}")
    last = Job(Layout(tp=2), seed=7)
    found = megatron_unickpt.resume_or_start(folder / "c", last.chunks, last.optimizer, memory=memory(folder, 3 + rank, 3))
    assert found["iteration"] == 3, "all hosts are lost"
    forget(folder)


@scenario(2)
def a_state_that_one_rank_cannot_describe_for_memory_is_saved_on_disk(folder: Path) -> None:
    """One rank has no room. All ranks save to disk in the same call."""
    rank = dist.get_rank()
    options = memory(folder, rank, 100)
    small = MemoryOptions(100, folder=options.folder, gigabytes=1e-6) if rank else options
    job = Job(Layout(tp=2), seed=1)
    job.train(1)
    save(folder, job, 1, small)
    assert on_disk(folder) == ["iter_0000001"]
    assert api.resume_or_start(folder / "nothing", job.chunks, memory=options) == {"iteration": 0, "extra": {}}
    forget(folder)


@scenario(2)
def a_save_that_is_left_out_because_copies_are_on_their_way_leaves_training_alone(folder: Path) -> None:
    job = Job(Layout(tp=2), seed=1)
    options = replace(memory(folder, dist.get_rank(), 1000), on_busy="skip")
    with logged() as lines:
        for step in range(1, 9):
            save(folder, job, step, options)
    left_out = [line for line in lines if "is left out: the copies of the checkpoint in memory before it" in line]
    assert len(left_out) == (dist.get_rank() == 0)
    job.train(1)
    forget(folder)
