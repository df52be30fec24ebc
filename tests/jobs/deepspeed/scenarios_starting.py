"""``ds_unickpt.resume_or_start``: the newest complete checkpoint, or the beginning, and an error where neither is right."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

import ds_unickpt
import unickpt
from tests.jobs.deepspeed.damaged_checkpoints import data
from tests.jobs.deepspeed.jobs import BATCH, build, train
from tests.jobs.deepspeed.logs import Log
from tests.jobs.deepspeed.resumes import ADAM, here
from tests.jobs.deepspeed.scenario_worker import scenario
from tests.jobs.deepspeed.truth import consolidated, differences
from unickpt.base.errors import CorruptCheckpointError, MismatchError


def saved(folder: Path, *steps: int) -> dict[str, torch.Tensor]:
    """Save checkpoints of these steps, and return the state of the last one."""
    engine = build(here(2), seed=1)
    for step in steps:
        train(engine, step - engine.global_steps)
        engine.save_checkpoint(str(folder), client_state={"at": step})
    truth: dict[str, torch.Tensor] = consolidated(engine, ADAM)
    dist.barrier()
    return truth


def on_first_rank(work: Callable[[], object]) -> None:
    """Call a function on rank 0, after all ranks have come here. The others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        work()
    dist.barrier()


@scenario(2)
def a_folder_without_a_complete_checkpoint_is_a_start(folder: Path) -> None:
    saved(folder / "torn", 1)

    def tear() -> None:
        (folder / "torn" / "latest").unlink()
        (folder / "torn" / "global_step1" / "manifest.json").unlink()
        (folder / "empty").mkdir()

    on_first_rank(tear)
    engine = build(here(2), seed=2)
    for name in ("missing", "empty", "torn"):
        with Log() as log:
            start = ds_unickpt.resume_or_start(engine, str(folder / name))
        assert start == ds_unickpt.StartingPoint(None, 0, 0, {})
        assert not start.resumed
        logged = [line for line in log.lines if "training starts from the beginning" in line]
        assert len(logged) == (dist.get_rank() == 0), log.lines


@scenario(1, 2)
def a_job_resumes_at_any_world_size_and_logs_what_changed(folder: Path) -> None:
    """The world of one rank saves. The world of two ranks resumes from its folder, with another ZeRO stage and seed."""
    before = folder.parent / "a_job_resumes_at_any_world_size_and_logs_what_changed-w1"
    if dist.get_world_size() == 1:
        torch.save(saved(before, 1, 3), before / "truth.pt")
        return
    truth = torch.load(before / "truth.pt")
    engine = build(here(3), seed=2)
    with Log() as log:
        start = ds_unickpt.resume_or_start(engine, str(before))
    assert (start.step, start.samples, start.client_state["at"]) == (3, 3 * BATCH, 3)
    assert start.resumed
    assert start.path == str(before / "global_step3" / "manifest.json")
    assert differences(truth, consolidated(engine, ADAM)) == []
    logged = [line for line in log.lines if "resumed at" in line]
    expected = "unickpt: resumed at step 3 after 36 samples: world 1 -> 2, global batch 12, micro batch 12 -> 6, accumulation 1"
    assert logged == ([expected] if dist.get_rank() == 0 else [])


@scenario(1, 2)
def a_job_without_the_key_and_the_switch_loads_as_with_them_and_saves_by_deepspeed(folder: Path) -> None:
    before = folder.parent / "a_job_without_the_key_and_the_switch_loads_as_with_them_and_saves_by_deepspeed-w1"
    if dist.get_world_size() == 1:
        torch.save(saved(before, 1, 3), before / "truth.pt")
        return
    truth = torch.load(before / "truth.pt")
    for section in (None, {"verify": "sampled"}):
        engine = build(here(3), seed=2, unickpt=section)
        for _ in range(2):
            with Log() as log:
                path, state = engine.load_checkpoint(str(before))
            assert (path, state["at"]) == (str(before / "global_step3" / "manifest.json"), 3)
            said = [line for line in log.lines if "is a unickpt checkpoint, so unickpt loads it" in line]
            assert len(said) == (dist.get_rank() == 0), log.lines
            assert differences(truth, consolidated(engine, ADAM)) == []
            train(engine, 1)
    engine.save_checkpoint(str(folder))
    dist.barrier()
    again = build(here(3), seed=3, unickpt=None)
    with Log() as log:
        assert again.load_checkpoint(str(folder))[0].endswith("model_states.pt")
    assert not log.lines
    assert differences(consolidated(engine, ADAM), consolidated(again, ADAM)) == []


@scenario(2)
def without_a_latest_file_the_newest_complete_checkpoint_is_loaded(folder: Path) -> None:
    """As after a kill between the commit and the file ``latest`` of a job that has just begun."""
    saved(folder, 1, 2, 3)

    def damage() -> None:
        (folder / "latest").unlink()
        data(folder / "global_step3").write_bytes(b"")

    on_first_rank(damage)
    engine = build(here(0), seed=2)
    assert engine.load_checkpoint(str(folder)) == (None, None), "DeepSpeed's own rule"
    start = ds_unickpt.resume_or_start(engine, str(folder))
    assert (start.step, start.client_state["at"]) == (2, 2)


@scenario(2)
def a_folder_whose_checkpoints_are_all_damaged_is_an_error(folder: Path) -> None:
    saved(folder, 1, 2)

    def damage() -> None:
        data(folder / "global_step2").write_bytes(b"")
        (folder / "global_step1" / "manifest.json").write_text("{")
        shutil.copytree(folder, folder / "nameless")
        (folder / "nameless" / "latest").unlink()

    on_first_rank(damage)
    engine = build(here(1), seed=2)
    before = [p.detach().clone() for p in engine.module.parameters()]
    for place in (folder, folder / "nameless"):
        with pytest.raises(
            CorruptCheckpointError, match=r"no complete checkpoint is left.*global_step1 has a damaged manifest"
        ):
            ds_unickpt.resume_or_start(engine, str(place))
    assert all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True)), "something was loaded"


@scenario(2)
def a_checkpoint_of_deepspeed_that_latest_does_not_name_is_an_error(folder: Path) -> None:
    for enabled in (True, False):
        place = folder / str(enabled)
        native = build(here(1), seed=1, unickpt={"enabled": False})
        train(native, 1)
        native.save_checkpoint(str(place))
        dist.barrier()  # DeepSpeed writes the file ``latest`` after its own last barrier
        engine = build(here(1), seed=2, unickpt={"enabled": enabled})
        assert ds_unickpt.resume_or_start(engine, str(place)).step == 1
        on_first_rank((place / "latest").unlink)
        with pytest.raises(CorruptCheckpointError, match=r"DeepSpeed wrote .*global_step1, and no 'latest' file names it"):
            ds_unickpt.resume_or_start(engine, str(place))


class Buffered:
    """A loader that holds samples between steps."""

    def __init__(self, *samples: int) -> None:
        self.samples = list(samples)

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = state["samples"]

    def reshard(self, states: Sequence[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
        return [{"samples": samples} for samples in unickpt.deal_samples([state["samples"] for state in states], ranks)]


class Short(Buffered):
    def reshard(self, states: Sequence[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
        return super().reshard(states, ranks - 1)


@scenario(2, 4)
def samples_that_loaders_hold_are_divided_among_the_ranks(folder: Path) -> None:
    before, rank = folder.parent / "samples_that_loaders_hold_are_divided_among_the_ranks-w2", dist.get_rank()
    if dist.get_world_size() == 2:
        engine = build(here(2), seed=1)
        train(engine, 1)
        loader = Buffered(*range(rank, 10, 2))
        engine.save_checkpoint(str(before), client_state={"data_loader": loader.state_dict()})
        same = Buffered()
        ds_unickpt.resume_or_start(engine, str(before), loader=same)
        assert same.samples == loader.samples, "each rank has its own"
        engine.save_checkpoint(str(folder / "none"))
        with pytest.raises(MismatchError, match="has no state of a data loader"):
            ds_unickpt.resume_or_start(engine, str(folder / "none"), loader=same)
        engine.save_checkpoint(str(folder / "first"), client_state={"data_loader": loader.state_dict()} if rank == 0 else {})
        first = Buffered() if rank == 0 else None
        ds_unickpt.resume_or_start(engine, str(folder / "first"), loader=first)
        assert first is None or first.samples == loader.samples
        return
    engine, loader = build(here(2), seed=2), Buffered()
    with pytest.raises(MismatchError, match="of 2 ranks, only 0 saved the state of a data loader"):
        ds_unickpt.resume_or_start(engine, str(before / "first"), loader=loader)
    ds_unickpt.resume_or_start(engine, str(before), loader=loader)
    assert loader.samples == list(range(rank, 10, 4))
    with pytest.raises(MismatchError, match=r"Short.reshard returned 3 states for 4 ranks"):
        ds_unickpt.resume_or_start(engine, str(before), loader=Short())
