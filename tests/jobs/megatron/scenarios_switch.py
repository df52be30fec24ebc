"""Saves and loads of libraries, with Megatron's strategies and forms, under the switch ``UNICKPT`` of the environment."""

from __future__ import annotations

import pickle
import shutil
import unittest
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from megatron_unickpt import hooks as megatron_hooks
from megatron_unickpt.edge import RUNTIME
from megatron_unickpt.testing.jobs import Job
from megatron_unickpt.testing.layouts import Layout
from megatron_unickpt.testing.truth import consolidated, optimizers_take_metadata, own_forms
from tests.jobs.megatron.compared import differences
from tests.jobs.megatron.scenarios import scenario
from tests.jobs.megatron.scenarios_own_loops import (
    BUCKETS, GATHERED, Form, assert_equal, described, live, loaded, of_all, warned,
)  # fmt: skip
from tests.jobs.megatron.sharded_state import halves, made, strategy
from tests.support.switch import switched
from unickpt.base import hooks
from unickpt.checkpoint.load.checkpoint import Checkpoint


def _megatrons_strategy() -> Any:
    """Return a strategy as libraries make it: by the name of the class, in Megatron's fully parallel wrapper."""
    return FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1))


def _needs_saves_of_megatron() -> None:
    """Skip a scenario in which Megatron itself saves its buckets, if that fails with this torch also without unickpt."""
    if own_forms()[0] != "dp_reshardable":
        raise unittest.SkipTest("Megatron-core 0.14 does not save its buckets with this version of torch")


def _saved_by_library(job: Job, where: Path, form: Form, **more: Any) -> str:
    directory = made(where)
    content = {} if form is None else {"content_metadata": dict(form)}
    dist_checkpointing.save({**described(job, form), **more}, directory, _megatrons_strategy(), **content)
    return directory


@scenario(2)
def with_the_switch_every_form_of_a_library_is_saved_by_unickpt(folder: Path) -> None:
    """A library names Megatron's strategy and a form of the optimizer, and at the load another form under another layout."""
    if not optimizers_take_metadata():
        return
    job = Job(Layout(tp=2))
    job.train(2)
    expected = consolidated(job, folder / "expected")
    with switched():
        # before another job: up to 0.15 Megatron describes a model by the process groups of the last one
        saved = [
            _saved_by_library(job, folder / f"global_step_{at + 7}" / "actor", form)
            for at, form in enumerate((BUCKETS, GATHERED, None))
        ]
        for at, where in enumerate(saved):
            checkpoint = Checkpoint.open(where)
            assert (checkpoint.manifest.step, checkpoint.manifest.optimizer is not None) == (at + 7, True)
            assert (Path(where) / ".metadata").read_bytes().startswith(b"# A checkpoint of unickpt")
            for asked in (GATHERED, None):
                again = loaded(Layout(pp=2), where, asked, is_loading=asked is not None)
                with switched("off"):
                    found = consolidated(again, folder / "found")
                if expected is not None and found is not None:
                    assert not differences(expected, found), differences(expected, found)[:5]
    again = loaded(Layout(pp=2), saved[-1], GATHERED)  # a checkpoint is recognised without the switch
    found = consolidated(again, folder / "found")
    assert expected is None or found is None or not differences(expected, found)


@scenario(2)
def with_the_switch_a_librarys_own_checkpoint_loads_as_before(folder: Path) -> None:
    _needs_saves_of_megatron()
    job = Job(Layout(tp=2))
    job.train(2)
    expected = live(job)
    native = [_saved_by_library(job, folder / f"native {at}", form) for at, form in enumerate((BUCKETS, GATHERED))]
    assert not any(_is_ours(where) for where in native)
    with switched():
        for where, form in zip(native, (BUCKETS, GATHERED), strict=True):
            assert_equal(expected, live(loaded(Layout(tp=2), where, form)))
        with switched("load"):
            assert not _is_ours(_saved_by_library(job, folder / "load", BUCKETS))


@scenario(2)
def with_the_switch_an_optimizer_is_described_after_megatrons_load_of_the_weights(folder: Path) -> None:
    """As verl does it with checkpoints of before the switch. Megatron's load has reshaped the data in the description."""
    _needs_saves_of_megatron()
    job = Job(Layout(tp=2))
    job.train(2)
    expected = live(job)
    for name, part in described(job, BUCKETS).items():
        dist_checkpointing.save({name: part}, made(folder / name), _megatrons_strategy(), content_metadata=dict(BUCKETS))
    assert not _is_ours(str(folder / "optimizer"))
    with switched():
        again = Job(Layout(tp=2), seed=7)
        weights = {"model": again.modules[0].sharded_state_dict(metadata=dict(BUCKETS))}
        again.modules[0].load_state_dict(dist_checkpointing.load(dict(weights), str(folder / "model"))["model"])
        optimizer = again.optimizer.sharded_state_dict(weights, is_loading=True, metadata=dict(BUCKETS))
        found = dist_checkpointing.load({"optimizer": optimizer}, str(folder / "optimizer"))
        again.optimizer.load_state_dict(found["optimizer"])
        assert_equal(expected, live(again))


def _is_ours(where: str) -> bool:
    return (Path(where) / "manifest.json").is_file()


@scenario(2)
def without_the_switch_a_librarys_checkpoint_has_the_bytes_of_megatrons(folder: Path) -> None:
    _needs_saves_of_megatron()
    job = Job(Layout(dp=2))
    job.train(1)
    torch.use_deterministic_algorithms(True)  # fills memory that Megatron stores and never sets: the padding of buckets
    for form in (BUCKETS, GATHERED):
        with switched("off"):
            hooked = _bytes_of(_saved_by_library(job, folder / "ck", form))
        hooks.uninstall(megatron_hooks.DECLARED)
        try:
            own = dist_checkpointing.serialization.save  # the package still has the hooked one
            own(described(job, form), made(folder / "ck"), _megatrons_strategy(), content_metadata=dict(form or {}))
            stock = _bytes_of(str(folder / "ck"))
        finally:
            for install in (
                megatron_hooks.install_core,
                megatron_hooks.install_async,
                megatron_hooks.install_optimizer,
                megatron_hooks.install_distributed_optimizer,
                megatron_hooks.install_layer_wise_optimizer,
            ):
                install()
        assert hooked.keys() == stock.keys()
        assert [name for name, content in hooked.items() if content != stock[name]] == []
    torch.use_deterministic_algorithms(False)


def _bytes_of(directory: str) -> dict[str, Any]:
    """Return what the files of a checkpoint of Megatron have in them, and remove them."""
    found: dict[str, Any] = {}
    if dist.get_rank() == 0:
        found = {file.name: file.read_bytes() for file in Path(directory).iterdir()}
        metadata = pickle.loads(found.pop(".metadata"))
        found["metadata"] = repr(metadata.state_dict_metadata)
        found["places"] = sorted(map(repr, metadata.storage_data.items()))  # in the order in which processes ended
        shutil.rmtree(directory)
    everywhere = [found]
    dist.broadcast_object_list(everywhere)
    return everywhere[0]


@scenario(2)
def with_the_switch_a_state_that_cannot_be_described_is_saved_by_megatron(folder: Path) -> None:
    _needs_saves_of_megatron()
    job = Job(Layout(tp=2))
    job.train(2)
    expected = live(job)
    quantised = halves("quantised", torch.zeros(4, dtype=torch.complex128))  # a dtype that the format lacks
    with switched(), warned() as told:
        where = _saved_by_library(job, folder / "ck", BUCKETS, quantised=quantised)
        assert not _is_ours(where)
        if dist.get_rank() == 0:
            assert any("saves this checkpoint in Megatron's own format instead" in text for text in told), told
        assert_equal(expected, live(loaded(Layout(tp=2), where, BUCKETS)))


@scenario(2)
def values_of_the_common_state_in_which_ranks_differ_are_each_ranks_own(folder: Path) -> None:
    """As a library has it that puts the generators of every rank there."""
    rank = dist.get_rank()
    Job(Layout(dp=2))
    torch.manual_seed(10 + rank)
    knot = SimpleNamespace(rank=rank)
    knot.itself = knot
    common = {"rng": {"cpu": torch.get_rng_state()}, "port": 4000 + rank, "same": [1, 2], "knot": knot}
    dist_checkpointing.save(
        dict(common),
        made(folder / "ck"),
        strategy(),
        validate_access_integrity=False,
        preprocess_common_before_consistancy_check=lambda state: state["optimizer"]["param_groups"],  # as Megatron has it
    )
    found = dist_checkpointing.load_common_state_dict(str(folder / "ck"))
    assert (found["port"], found["same"], found["knot"].rank) == (4000 + rank, [1, 2], rank)
    assert torch.equal(found["rng"]["cpu"], common["rng"]["cpu"])
    Job(Layout(tp=2))
    found = dist_checkpointing.load({}, str(folder / "ck"))
    entries = {entry.name: entry for entry in RUNTIME.last_report.entries}
    assert (found["port"], entries["common.port"].outcome, entries["common.rng"].outcome) == (4000, "set", "re-seeded")
    drawn = of_all(torch.rand(2, generator=torch.Generator().set_state(found["rng"]["cpu"])).tolist())
    assert drawn[0] == drawn[1]  # tensor parallel ranks, outside of their regions


@scenario(2)
def with_the_switch_a_folder_of_its_own_for_each_rank_is_saved_by_megatron(folder: Path) -> None:
    """As SkyRL has it on a cloud path: a temporary folder of each process, whose files it gathers by itself."""
    _needs_saves_of_megatron()
    rank = dist.get_rank()
    job = Job(Layout(tp=2))
    job.train(1)
    expected = live(job)
    own = folder / f"of rank {rank}"
    own.mkdir()
    with switched(), warned() as told:
        dist_checkpointing.save(described(job, BUCKETS), str(own), _megatrons_strategy())
    assert list(own.glob(f"__{rank}_*.distcp"))
    assert not _is_ours(str(own))
    if rank == 0:
        assert any("on this rank and" in text and "in Megatron's own format instead" in text for text in told), told
    dist.barrier()
    for file in own.iterdir():
        shutil.copy(file, folder)
    dist.barrier()
    assert_equal(expected, live(loaded(Layout(tp=2), str(folder), BUCKETS)))


@scenario(2)
def with_the_switch_asynchronous_saves_that_nobody_polls_are_finalized_at_the_next_one(folder: Path) -> None:
    """As verl's, which writes its tracker file in a finalize function. A checkpoint is committed without any call."""
    queue, done = AsyncCallsQueue(), list[str]()
    with switched():
        for step in ("1", "2", "3"):
            for part in ("model", "optimizer"):  # the second one does not wait for the first one
                state = {part: halves(part, torch.ones(4, 2))}
                directory = made(folder / step / part)
                request = dist_checkpointing.save(state, directory, _megatrons_strategy(), async_sharded_save=True)
                request.add_finalize_fn(partial(done.append, f"{step}/{part}"))
                queue.schedule_async_request(request)
            for call in queue.async_calls:
                call.async_request.finalize_fns.pending.wait()
            assert _is_ours(str(folder / step / "optimizer"))
            dist.barrier()
    assert done[:4] == ["1/model", "1/optimizer", "2/model", "2/optimizer"]
    assert "3/optimizer" not in done
    queue.maybe_finalize_async_calls(blocking=True)
    assert len(done) == 6
    with switched():  # somebody polls
        for _ in range(2):
            request = dist_checkpointing.save(state, made(folder / "4"), _megatrons_strategy(), async_sharded_save=True)
            queue.schedule_async_request(request)
            request.finalize_fns.pending.wait()
            dist.barrier()
    assert queue.get_num_unfinalized_calls() == 2
    queue.maybe_finalize_async_calls(blocking=True)
