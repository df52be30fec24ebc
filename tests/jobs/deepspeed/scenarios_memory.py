"""Checkpoints in the memory of hosts. A host is a folder in memory with a keeper of its own; the ranks are on two of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist

from tests.jobs.deepspeed.jobs import build, scramble, train
from tests.jobs.deepspeed.logs import Log
from tests.jobs.deepspeed.resumes import ADAM, here
from tests.jobs.deepspeed.scenario_worker import scenario
from tests.jobs.deepspeed.truth import consolidated, differences


def memory(root: Path, host: int, **options: Any) -> dict[str, Any]:
    """Return the ``unickpt`` key of a rank on one of the hosts."""
    folder = root / f"host{host}"
    folder.mkdir(parents=True, exist_ok=True)
    return {"enabled": True, "memory": {"to_disk_every": 100, "folder": str(folder), **options}}


def in_memory(engine: Any, folder: Path) -> None:
    """Save into memory, and wait for the copies on the other host."""
    assert engine.save_checkpoint(str(folder), client_state={"at": engine.global_steps}) is True
    for save in next(iter(engine.checkpoint_engine.memory._folders.values())).saver.pending:
        assert save.wait(60)
        assert save.committed, save.cause()


@scenario(2, 4)
def a_host_is_lost_and_the_others_resume_with_another_layout(folder: Path) -> None:
    """Two ranks on hosts 0 and 1 save. Host 1 is lost. Four ranks on hosts 0 and 2 resume, with other stages and seeds."""
    before = folder.parent / "a_host_is_lost_and_the_others_resume_with_another_layout-w2"
    rank, stages = dist.get_rank(), ((1, 3), (3, 1), (2, 0))
    if dist.get_world_size() == 2:
        for stage, _ in stages:
            place = before / f"stage{stage}"
            engine = build(here(stage, "bf16"), seed=1, unickpt=memory(place, rank))
            train(engine, 2)
            in_memory(engine, place / "checkpoints")
            train(engine, 2)
            in_memory(engine, place / "checkpoints")
            torch.save(consolidated(engine, ADAM), place / f"truth{rank}.pt")
            engine.checkpoint_engine.memory.saved_to_disk(str(place / "checkpoints"), 0.0)  # the process does not end in order
        return
    for stage, other in stages:
        place = before / f"stage{stage}"
        if rank == 0:
            shutil.rmtree(place / "host1")
            assert not list((place / "checkpoints").glob("global_step*"))
        dist.barrier()
        engine = build(here(other, "bf16"), seed=2, unickpt=memory(place, 0 if rank < 2 else 2))
        scramble(engine)
        with Log() as log:
            path, client_state = engine.load_checkpoint(str(place / "checkpoints"))
        assert (path, client_state["at"]) == (str(place / "checkpoints" / "global_step4" / "manifest.json"), 4)
        truth = torch.load(place / "truth0.pt")
        assert differences(truth, consolidated(engine, ADAM)) == [], (stage, other)
        said = [line for line in log.lines if "was loaded from the memory of the hosts" in line]
        assert len(said) == (rank == 0), log.lines
        train(engine, 1)
        in_memory(engine, place / "checkpoints")


@scenario(2)
def every_third_save_is_on_disk_and_the_newest_is_loaded(folder: Path) -> None:
    options = memory(folder, dist.get_rank(), to_disk_every=3)
    engine = build(here(1), seed=1, unickpt=options)
    truth = {}
    for step in range(1, 6):
        train(engine, 1)
        assert engine.save_checkpoint(str(folder / "c")) is True
        truth[step] = consolidated(engine, ADAM)
    for save in next(iter(engine.checkpoint_engine.memory._folders.values())).saver.pending:
        assert save.wait(60)
    assert sorted(path.name for path in (folder / "c").glob("global_step*")) == ["global_step3"]
    assert (folder / "c" / "latest").read_text() == "global_step3"
    dist.barrier()
    again = build(here(2), seed=2, unickpt=options)
    again.load_checkpoint(str(folder / "c"))
    assert again.global_steps == 5
    assert differences(truth[5], consolidated(again, ADAM)) == []
    dist.barrier()
    shutil.rmtree(folder / f"host{dist.get_rank()}")
    dist.barrier()
    (folder / f"host{dist.get_rank()}").mkdir()
    disk = build(here(0), seed=3, unickpt=options)
    disk.load_checkpoint(str(folder / "c"))
    assert disk.global_steps == 3
    assert differences(truth[3], consolidated(disk, ADAM)) == []


@scenario(2)
def an_older_checkpoint_that_the_user_names_ends_the_newer_ones_in_memory(folder: Path) -> None:
    options = memory(folder, dist.get_rank(), to_disk_every=2)
    engine = build(here(1), seed=1, unickpt=options)
    for _ in range(3):  # step 2 is on disk, steps 1 and 3 are in memory
        train(engine, 1)
        engine.save_checkpoint(str(folder / "c"))
    for save in next(iter(engine.checkpoint_engine.memory._folders.values())).saver.pending:
        assert save.wait(60)
    back = build(here(1), seed=2, unickpt=options)
    back.load_checkpoint(str(folder / "c"), tag="global_step2")
    assert back.global_steps == 2
    dist.barrier()
    again = build(here(1), seed=3, unickpt=options)
    again.load_checkpoint(str(folder / "c"))
    assert again.global_steps == 2, "the course of training that was given up"


@scenario(2)
def a_state_that_does_not_fit_into_memory_goes_to_disk(folder: Path) -> None:
    engine = build(here(1), seed=1, unickpt=memory(folder, dist.get_rank(), gigabytes=1e-6))
    train(engine, 1)
    with Log() as log:
        assert engine.save_checkpoint(str(folder / "c")) is True
    assert (folder / "c" / "global_step1" / "manifest.json").is_file()
    said = [line for line in log.lines if "is not saved in memory" in line and "memory.gigabytes" in line]
    assert len(said) == (dist.get_rank() == 0), log.lines
