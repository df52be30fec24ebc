"""Saves that fail on one rank, and the state on disk when a save returns."""

from __future__ import annotations

import gc
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist

from ds_unickpt import edge
from tests.jobs.deepspeed.jobs import build, train
from tests.jobs.deepspeed.logs import Log
from tests.jobs.deepspeed.model import Model
from tests.jobs.deepspeed.resumes import here
from tests.jobs.deepspeed.scenario_worker import scenario
from tests.jobs.deepspeed.truth import consolidated, differences
from unickpt.base.errors import MismatchError, UnickptError
from unickpt.checkpoint.coordination.owners import Owners
from unickpt.checkpoint.fence import FENCE_FILE
from unickpt.checkpoint.save import shutdown


class Flavoured(Model):
    """A user's module with an attribute that only the capture of a save reads."""

    broken = False

    @property
    def config(self) -> Any:
        if self.broken:
            raise KeyError("flavour")
        return None


@scenario(2)
def an_exception_on_one_rank_during_capture_makes_deepspeed_save(folder: Path) -> None:
    for behind in (False, True):
        place = folder / str(behind)
        torch.manual_seed(1)
        model = Flavoured()
        engine = build(here(1), seed=1, model=model, unickpt={"enabled": True, "async_save": behind})
        train(engine, 1)
        model.broken = dist.get_rank() == 1
        for _ in range(2):
            with Log() as log:
                assert engine.save_checkpoint(str(place), client_state={"at": engine.global_steps}) is True
            dist.barrier()
            tag = place / f"global_step{engine.global_steps}"
            assert (tag / "mp_rank_00_model_states.pt").is_file()
            assert not (tag / "manifest.json").exists()
            if dist.get_rank() == 0:
                logged = [line for line in log.lines if "KeyError: 'flavour'" in line]
                assert len(logged) == 1, log.lines
                assert "rank 1" in logged[0]
                assert "scenarios_failed_saves.py" in logged[0]
            other = build(here(1), seed=2)
            assert other.load_checkpoint(str(place))[1]["at"] == engine.global_steps
            assert train(engine, 1) == train(other, 1)
            expected, found = (consolidated(one, ("exp_avg", "exp_avg_sq")) for one in (engine, other))
            assert differences(expected, found, ignore=("groups",)) == []
        model.broken = False
        assert engine.save_checkpoint(str(place)) is True
        other.load_checkpoint(str(place))
        assert (place / f"global_step{other.global_steps}" / "manifest.json").is_file()


@scenario(2)
def nothing_is_saved_if_ranks_disagree_about_the_place(folder: Path) -> None:
    """DeepSpeed's own save would scatter the files of the ranks, and return True."""
    rank = dist.get_rank()
    engine = build(here(1), seed=1, checkpoint={"tag_validation": "Ignore"})
    train(engine, 1)
    assert engine.save_checkpoint(str(folder / "good")) is True
    for behind in (True, False):
        engine.checkpoint_engine.saver.options = replace(engine.checkpoint_engine.saver.options, asynchronous=behind)
        for way in ("tag", "folder"):
            place, tag = (folder, f"of-rank{rank}") if way == "tag" else (folder / f"of-rank{rank}", "all")
            _assert_not_saved(engine, folder, place, tag)
    engine.checkpoint_engine.unsupported = "a layout of this test"  # DeepSpeed saves the job by itself
    _assert_not_saved(engine, folder, folder / f"of-rank{rank}", "all")
    engine.checkpoint_engine.unsupported = ""
    link = folder / f"link-of-rank{rank}"
    link.symlink_to(folder, target_is_directory=True)
    assert engine.save_checkpoint(str(link), tag="together") is True, "it is one folder"
    dist.barrier()
    assert (folder / "together" / "manifest.json").is_file()
    strict = build(here(1), seed=1, checkpoint={"tag_validation": "Fail"})
    train(strict, 1)
    with pytest.raises(AssertionError, match="is not consistent across all ranks"):
        strict.save_checkpoint(str(folder), tag=f"strict-of-rank{rank}")
    other = build(here(1), seed=2)
    assert Path(other.load_checkpoint(str(folder / "good"))[0]).is_file()


@scenario(2)
def no_tag_leaves_the_save_directory(folder: Path) -> None:
    engine, inside = build(here(1), seed=1), folder / "inside"
    train(engine, 1)
    assert engine.save_checkpoint(str(folder), tag="elsewhere") is True
    assert engine.save_checkpoint(str(inside), tag="part/./good") is True
    assert (inside / "latest").read_text() == "part/good"
    unsupported = engine.checkpoint_engine.unsupported
    for tag in ("../outside", str(folder / "outside"), "..", "a/../../outside", ""):
        for engine.checkpoint_engine.unsupported in (unsupported, "a layout of this test"):  # DeepSpeed would save by itself
            with Log() as log:
                assert engine.save_checkpoint(str(inside), tag=tag) is False
            told = [line for line in log.lines if f"the tag {tag!r} leads out of {inside}" in line]
            assert len(told) == (dist.get_rank() == 0), log.lines
    engine.checkpoint_engine.unsupported = unsupported
    one = "../outside" if dist.get_rank() else "inside"
    assert engine.save_checkpoint(str(inside), tag=one) is False
    dist.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["elsewhere", "inside", "latest", FENCE_FILE]
    assert sorted(path.name for path in inside.iterdir()) == ["latest", "part", FENCE_FILE]
    for tag in ("../elsewhere", str(folder / "elsewhere")):
        with pytest.raises(MismatchError, match="leads out of"):
            engine.load_checkpoint(str(inside), tag=tag)
        dist.barrier()
        if dist.get_rank() == 0:
            (inside / "latest").write_text(tag)
        dist.barrier()
        with pytest.raises(UnickptError, match="not a plain path"):
            engine.load_checkpoint(str(inside))
        dist.barrier()
    assert engine.load_checkpoint(str(inside), tag="part/good/")[0] == f"{inside}/part/good/manifest.json"


@scenario(2)
def a_save_within_an_accumulation_window_says_how_many_micro_batches_are_lost(folder: Path) -> None:
    engine = build(here(1), seed=1, gradient_accumulation_steps=3)
    for micro_batches in (1, 2, 3):
        train(engine, 1)
        with Log() as log:
            assert engine.save_checkpoint(str(folder), tag=f"after{micro_batches}") is True
        told = [line for line in log.lines if "accumulation window" in line]
        assert len(told) == (dist.get_rank() == 0 and micro_batches < 3), log.lines
        assert all(f"{micro_batches} of 3 micro batches" in line for line in told), told


@scenario(2)
def a_loop_that_says_where_a_step_ends_is_told_of_an_open_window(folder: Path) -> None:
    """Accelerate does so before each backward pass."""
    engine = build(here(1), seed=1, gradient_accumulation_steps=2)
    for at, ends_step in enumerate((False, True)):
        engine.set_gradient_accumulation_boundary(is_boundary=ends_step)
        train(engine, 1)
        with Log() as log:
            assert engine.save_checkpoint(str(folder), tag=f"after{at}") is True
        told = [line for line in log.lines if "accumulation window" in line]
        assert len(told) == (dist.get_rank() == 0 and not ends_step), log.lines


def _model(seed: int, place: Path | None = None, **more: Any) -> Any:
    """Return an engine, trained for two steps unless it is to load from a place. All have names and shapes in common."""
    engine = build(here(1), seed=seed, unickpt={"enabled": True, **more})
    if place is None:
        train(engine, 2)
    return engine


@scenario(2)
def the_checkpoint_of_another_engine_is_not_replaced(folder: Path) -> None:
    """An actor and a critic with the same names and shapes, and the same folder and default tag."""
    for behind in (False, True):
        place = folder / str(behind)
        actor, critic = _model(1, async_save=behind), _model(2, async_save=behind)
        assert actor.save_checkpoint(str(place), client_state={"who": "actor"}) is True
        truth = consolidated(actor, ("exp_avg", "exp_avg_sq"))
        with Log() as log:
            assert critic.save_checkpoint(str(place), client_state={"who": "critic"}) is False
        shutdown.finish_all(ending=False)
        dist.barrier()
        if dist.get_rank() == 0 and not behind:
            (told,) = [line for line in log.lines if "another model" in line]
            numbers = list(map(int, re.findall(r"an engine of Model, number (\d+) of the \d+ of its process", told)))
            assert numbers == [numbers[0], numbers[0] + 1], told
            assert "a tag of its own" in told
        assert critic.save_checkpoint(str(place), tag="critic") is True, "another tag"
        assert actor.save_checkpoint(str(place), client_state={"who": "actor"}) is True, "the same engine again"
        shutdown.finish_all(ending=False)
        assert actor.load_checkpoint(str(place), tag="global_step2")[1]["who"] == "actor"
        assert actor.save_checkpoint(str(place), client_state={"who": "actor"}) is True, "the same engine after a rollback"
        shutdown.finish_all(ending=False)
        fresh = build(here(2), seed=3)
        assert fresh.load_checkpoint(str(place), tag="global_step2")[1]["who"] == "actor"
        assert differences(truth, consolidated(fresh, ("exp_avg", "exp_avg_sq")), ignore=("groups",)) == []
        assert fresh.save_checkpoint(str(place), tag="global_step2") is True, "an engine that continues the checkpoint"
        if not behind:
            later = _model(4)
            assert later.save_checkpoint(str(place), tag="critic") is True, "made after the last use of the others"
            assert critic.save_checkpoint(str(place), tag="critic") is False, "the later one is in use"
            del later
        del actor, critic, fresh
        gc.collect()


@scenario(2)
def engines_of_one_job_resume_their_own_checkpoints_only(folder: Path) -> None:
    """Each registry of engines stands for a process: the owners of its checkpoints are unknown to the others."""
    first, named, owners = folder / "first", folder / "named", edge.RUNTIME.owners

    def process() -> None:
        gc.collect()
        edge.RUNTIME.owners = Owners()

    process()
    pair = [_model(seed) for seed in (1, 2)]
    assert pair[0].save_checkpoint(str(first)) is True
    pair = [_model(seed, name=name) for seed, name in ((1, "actor"), (2, "critic"))]
    assert [engine.save_checkpoint(str(named)) for engine in pair] == [True, False]
    for order in ((0, 1), (1, 0)):
        process()
        pair = [_model(seed, first) for seed in (3, 4)]
        for at in order:
            if at == 0:
                assert pair[0].load_checkpoint(str(first))[0] is not None
            else:
                with pytest.raises(MismatchError, match=r"the state of another model: saved by .* number 1 of the 2"):
                    pair[1].load_checkpoint(str(first))
        assert pair[1].load_checkpoint(str(first), load_module_only=True)[0] is not None
    process()
    alone = _model(5)
    assert alone.save_checkpoint(str(first)) is True, "a new process saves the tag again"
    process()
    other = _model(6)
    other.checkpoint_engine.owner.since -= 60
    assert other.save_checkpoint(str(first)) is False, "another process that runs at the same time"
    process()
    wider = build(here(1), seed=1, model=torch.nn.Linear(3, 3))
    assert wider.save_checkpoint(str(first), tag="global_step2") is False, "another model"
    process()
    pair = [_model(seed, first) for seed in (3, 4)]
    assert pair[1].load_checkpoint(str(first))[0] is not None, "the job had one engine"
    with Log() as log:
        assert pair[0].load_checkpoint(str(first))[0] is not None, "two models may start from one checkpoint"
    told = [line for line in log.lines if "has loaded it before" in line]
    assert len(told) == (dist.get_rank() == 0), log.lines
    process()
    pair = [_model(seed, named, name=name) for seed, name in ((1, "actor"), (2, "critic"))]
    with pytest.raises(MismatchError, match="named 'actor'"):
        pair[1].load_checkpoint(str(named))
    assert pair[0].load_checkpoint(str(named))[0] is not None
    edge.RUNTIME.owners = owners


def _assert_not_saved(engine: Any, folder: Path, place: Path, tag: str) -> None:
    """Assert that a save with other arguments on rank 1 returns False on every rank, leaves no files, and names both places."""
    dist.barrier()
    before = sorted(folder.rglob("*"))
    dist.barrier()
    begin = time.monotonic()
    with Log() as log:
        assert engine.save_checkpoint(str(place), tag=tag) is False
    assert time.monotonic() - begin < 60
    dist.barrier()
    assert sorted(folder.rglob("*")) == before
    told = [line for line in log.lines if "on this rank and" in line]
    assert len(told) == (dist.get_rank() == 0), log.lines
    assert all("of-rank0" in line and "of-rank1" in line and "broadcast" in line for line in told), told
    dist.barrier()


@scenario(2)
def by_default_the_checkpoint_is_complete_when_save_checkpoint_returns(folder: Path) -> None:
    for stage in (0, 2):
        engine = build(here(stage), seed=1, unickpt={"enabled": True})
        train(engine, 1)
        assert engine.save_checkpoint(str(folder / str(stage))) is True
        copy = folder / f"copy{stage}-{dist.get_rank()}"  # without waiting for other ranks
        shutil.copytree(folder / str(stage), copy)
        assert (copy / "global_step1" / "README-unickpt.txt").is_file()
        truth = consolidated(engine, ("exp_avg", "exp_avg_sq"))
        dist.barrier()
        target = build(here(3), seed=2)
        target.load_checkpoint(str(folder / f"copy{stage}-1"))
        assert differences(truth, consolidated(target, ("exp_avg", "exp_avg_sq"))) == []
