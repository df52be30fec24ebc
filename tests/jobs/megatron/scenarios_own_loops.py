"""Training loops of their own: model, optimizer and generators through ``dist_checkpointing``, in any form of the optimizer."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

import megatron_unickpt
from megatron_unickpt import hooks as megatron_hooks
from megatron_unickpt.framework import optimizer_internals
from megatron_unickpt.edge import RUNTIME
from megatron_unickpt.held_state.optimizer import METADATA, MegatronsForm
from megatron_unickpt.testing.jobs import Job
from megatron_unickpt.testing.layouts import Layout
from megatron_unickpt.testing.truth import consolidated, optimizers_take_metadata, own_forms
from tests.jobs.megatron.compared import differences
from tests.jobs.megatron.scenarios import scenario
from tests.jobs.megatron.sharded_state import halves, made, strategy
from unickpt.base import hooks
from unickpt.checkpoint.load.checkpoint import Checkpoint

Form = Mapping[str, Any] | None  # metadata of ``sharded_state_dict``; None: the loop passes none
BUCKETS, GATHERED = ({"distrib_optim_sharding_type": name} for name in own_forms())
FORMS: tuple[Form, ...] = (METADATA, BUCKETS, GATHERED, None)


def _described(job: Job, form: Form, *, is_loading: bool = False, copied: bool = False) -> dict[str, Any]:
    """Return the state of a loop of its own. ``copied``: it has copied the optimizer's dict."""
    given = {} if form is None else {"metadata": dict(form)}
    modules = job.modules
    state: dict[str, Any] = {
        "model" if len(modules) == 1 else f"model{at}": module.sharded_state_dict(**given) for at, module in enumerate(modules)
    }
    optimizer = job.optimizer.sharded_state_dict(state, is_loading=is_loading, **given)
    state["optimizer"] = {**optimizer} if copied else optimizer
    return state


def _saved(job: Job, where: Path, form: Form, *, copied: bool = False) -> str:
    directory = made(where)
    content = {} if form is None else {"content_metadata": dict(form)}
    dist_checkpointing.save(_described(job, form, copied=copied), directory, strategy(), **content)
    return directory


def _loaded(layout: Layout, where: str, form: Form, *, is_loading: bool = True, copied: bool = False) -> Job:
    job = Job(layout, seed=7)
    found = dist_checkpointing.load(_described(job, form, is_loading=is_loading, copied=copied), where)
    for at, module in enumerate(job.modules):
        module.load_state_dict(found["model" if len(job.modules) == 1 else f"model{at}"])
    job.optimizer.load_state_dict(found["optimizer"])
    return job


def _live(job: Job) -> list[tuple[Any, ...]]:
    """Return a copy of masters, states and steps that the optimizer holds on this rank."""
    return [
        (
            held.lo,
            held.hi,
            held.main.clone(),
            {key: value.clone() for key, value in held.states.items()},
            copy.deepcopy(held.scalars),
        )
        for leaf in optimizer_internals.leaves(job.optimizer, allocate=False)
        for held in leaf.held
    ]


def _assert_equal(expected: Any, found: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(expected, found)
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(found)
        for a, b in zip(expected, found, strict=True):
            _assert_equal(a, b)
    elif isinstance(expected, dict):
        assert expected.keys() == found.keys()
        _assert_equal(list(expected.values()), list(found.values()))
    else:
        assert expected == found


@contextmanager
def _warnings() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("unickpt").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("unickpt").removeHandler(handler)


@scenario(2)
def every_form_of_an_optimizer_is_saved_by_parameter_and_loads_in_every_form(folder: Path) -> None:
    """Masters, moments, steps, groups and the next losses are those of the job that goes on, bit for bit."""
    if not optimizers_take_metadata():
        return
    for at, layout in enumerate((Layout(tp=2), Layout(dp=2), Layout(dp=2, ep=2, moe=True), Layout(tp=2, optimizer="plain"))):
        job = Job(layout)
        job.train(2)
        with torch.no_grad():  # the master keeps its value, which a load must not derive from the weight
            next(job.modules[0].parameters()).mul_(2)
        where = [_saved(job, folder / f"{at}-{number}", form) for number, form in enumerate(FORMS)]
        expected, groups = _live(job), job.hyperparameters()
        losses = job.train(2)
        for number, directory in enumerate(where):
            asked = FORMS[(number + at) % len(FORMS)]  # every pair in one of the layouts
            forgets = (
                asked in (METADATA, BUCKETS) and layout.distributed
            )  # Megatron itself refuses a new optimizer in the others
            again = _loaded(layout, directory, asked, is_loading=not forgets)
            _assert_equal(expected, _live(again))
            assert again.hyperparameters() == groups
            if number == at:  # with all of them it takes twice as long
                again.step = 2
                assert again.train(2) == losses, (layout.name, FORMS[number], asked)


@scenario(2)
def an_optimizer_saved_in_buckets_loads_under_another_layout(folder: Path) -> None:
    job = Job(Layout(tp=2))
    job.train(2)
    expected = consolidated(job, folder / "expected")
    where = _saved(job, folder / "ck", BUCKETS)
    for layout, form in ((Layout(pp=2), BUCKETS), (Layout(dp=2, optimizer="plain"), GATHERED), (Layout(dp=2), METADATA)):
        found = consolidated(_loaded(layout, where, form), folder / "found")
        if expected is not None and found is not None:
            assert not differences(expected, found), differences(expected, found)[:5]
    library = Job(Layout(pp=2), seed=7)
    megatron_unickpt.load(where, library.chunks, library.optimizer)
    found = consolidated(library, folder / "found")
    assert expected is None or found is None or not differences(expected, found)


@scenario(2)
def an_optimizer_stored_in_a_form_of_megatron_is_restored_whole_or_refused(folder: Path) -> None:
    """Earlier releases stored such forms. So does this one if the loop copies the optimizer's dict."""
    job = Job(Layout(tp=2))
    job.train(2)
    expected, groups = _live(job), job.hyperparameters()
    buckets = _saved(job, folder / "buckets", BUCKETS, copied=True)
    gathered = _saved(job, folder / "gathered", GATHERED, copied=True)
    assert Checkpoint.open(buckets).manifest.optimizer is None
    losses = job.train(2)
    for where, form in ((buckets, BUCKETS), (gathered, GATHERED), (gathered, METADATA), (gathered, BUCKETS)):
        again = _loaded(Layout(tp=2), where, form)
        _assert_equal(expected, _live(again))
        assert again.hyperparameters() == groups
        again.step = 2
        assert again.train(2) == losses, form
    told = rf"{own_forms()[0]}.*layout that saved it \(TP2 .*METADATA: then it loads under every layout"
    for layout, form in ((Layout(tp=2), METADATA), (Layout(pp=2), METADATA), (Layout(pp=2), BUCKETS)):
        with pytest.raises(CheckpointingException, match=told):
            _loaded(layout, buckets, form)
    library = Job(Layout(tp=2), seed=7)
    before = _live(library)
    with pytest.raises(CheckpointingException, match=told):
        megatron_unickpt.load(buckets, library.chunks, library.optimizer)
    _assert_equal([each[2] for each in before], [each[2] for each in _live(library)])
    by_parameter = _saved(job, folder / "by parameter", METADATA)
    with pytest.raises(
        CheckpointingException, match=r"asked for as memory buckets.*stored by parameter\. Pass metadata=megatron"
    ):
        _loaded(Layout(tp=2), by_parameter, BUCKETS, copied=True)


@scenario(2)
def whether_an_optimizer_had_stepped_is_in_the_checkpoint(folder: Path) -> None:
    job = Job(Layout(dp=2))
    for steps in (0, 1):
        job.train(steps)
        record = Checkpoint.open(_saved(job, folder / f"{steps}", METADATA)).manifest.optimizer
        assert record is not None
        assert record.stepped is bool(steps)
    again = _loaded(Layout(tp=2), str(folder / "0"), METADATA)
    entries = [entry for entry in RUNTIME.last_report.entries if entry.state == "exp_avg"]
    assert {entry.reason for entry in entries} == {
        "the optimizer had not stepped when it was saved: zeros, as in a new optimizer"
    }
    again.train(1)


# ---------------------------------------------------------------- generators


def _generators(ranks: int = 1) -> ShardedObject:
    """Return the generators as Megatron's scripts and verl describe them. ``ranks``: those of all data parallel ranks."""
    sizes = parallel_state.get_pipeline_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_world_size()
    place = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    state = {
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }
    data = parallel_state.get_data_parallel_rank()
    return ShardedObject("rng_state", [state] * ranks, sizes, place, replica_id=data)


def _drawn(state: Mapping[str, Any], tracker: str) -> list[float]:
    value = state["rng_tracker_states"][tracker] if tracker else state["torch_rng_state"]
    generator = torch.Generator()
    generator.set_state(value)
    return torch.rand(4, generator=generator).tolist()


def _of_all(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _load_generators(layout: Layout, where: str, ranks: int = 1) -> list[dict[str, Any]]:
    Job(layout, seed=7)
    return list(dist_checkpointing.load({"rng": _generators(ranks)}, where)["rng"])


@scenario(2)
def generators_are_seeded_by_position_under_another_layout(folder: Path) -> None:
    """Ranks of a tensor parallel group have equal ones outside of tensor parallel regions, and different ones inside."""
    one, two = Layout(dp=2), Layout(tp=2)
    for layout in (one, two):
        Job(layout)
        torch.rand(3)
        dist_checkpointing.save({"rng": _generators()}, made(folder / layout.name), strategy())
    same = _load_generators(two, str(folder / two.name))[0]
    assert [entry.outcome for entry in RUNTIME.last_report.entries] == ["restored"]
    spread = _load_generators(two, str(folder / one.name))[0]
    entries = RUNTIME.last_report.entries
    assert [entry.outcome for entry in entries] == ["re-seeded"]
    assert "became 2 ranks" in entries[0].reason or "became" in entries[0].reason
    inside, outside = (_of_all(_drawn(spread, tracker)) for tracker in ("model-parallel-rng", ""))
    assert inside[0] != inside[1]
    assert outside[0] == outside[1]
    again = _load_generators(two, str(folder / one.name))[0]
    assert _drawn(again, "model-parallel-rng") == _drawn(spread, "model-parallel-rng")
    new = _generators().data[0]
    assert all(_drawn(state, "model-parallel-rng") != _drawn(new, "model-parallel-rng") for state in (spread, same))
    joined = _of_all(_drawn(_load_generators(one, str(folder / two.name))[0], "model-parallel-rng"))
    assert joined[0] == joined[1]  # as in Megatron: data parallel ranks share the seed
    staged = _of_all(_drawn(_load_generators(Layout(pp=2), str(folder / two.name))[0], ""))
    assert staged[0] != staged[1]


@scenario(2)
def new_data_parallel_ranks_get_generators_of_their_own(folder: Path) -> None:
    """``--data-parallel-random-init``: one object has those of all data parallel ranks, and a rank takes its own by number."""
    Job(Layout(tp=2))
    dist_checkpointing.save({"rng": _generators(2)}, made(folder / "ck"), strategy())
    before = _load_generators(Layout(tp=2), str(folder / "ck"), 2)
    found = _load_generators(Layout(tp=2), str(folder / "ck"), 4)
    assert len(found) == 4
    assert [_drawn(state, "") for state in found[:2]] == [_drawn(state, "") for state in before]
    assert len({str(_drawn(state, "")) for state in found[1:]}) == 3
    told = [entry.reason for entry in RUNTIME.last_report.entries if entry.outcome == "re-seeded"]
    assert len(told) == 1
    assert told[0].startswith("2 data parallel ranks became 4: ranks 0 to 1 keep their generators, the others are seeded")
    inside = _of_all(_drawn(found[3], "model-parallel-rng"))
    assert inside[0] != inside[1]


@scenario(2)
def a_copy_of_an_optimizers_state_dict_is_a_plain_dict(_: Path) -> None:
    job = Job(Layout(tp=2))
    job.train(1)
    state = _described(job, GATHERED)["optimizer"]
    assert isinstance(state, MegatronsForm)
    for other in (copy.copy(state), pickle.loads(pickle.dumps(MegatronsForm({"a": 1}, job.optimizer, {})))):
        assert type(other) is dict


# ---------------------------------------------------------------- the switch


@contextmanager
def _switched(value: str = "1") -> Iterator[None]:
    before = os.environ.get("UNICKPT", "")
    os.environ["UNICKPT"] = value
    try:
        yield
    finally:
        os.environ["UNICKPT"] = before


def _megatrons_strategy() -> Any:
    """Return a strategy as libraries make it: by the name of the class, in Megatron's fully parallel wrapper."""
    return FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1))


def _saved_by_library(job: Job, where: Path, form: Form, **more: Any) -> str:
    directory = made(where)
    content = {} if form is None else {"content_metadata": dict(form)}
    dist_checkpointing.save({**_described(job, form), **more}, directory, _megatrons_strategy(), **content)
    return directory


@scenario(2)
def with_the_switch_every_form_of_a_library_is_saved_by_unickpt(folder: Path) -> None:
    """A library names Megatron's strategy and a form of the optimizer, and at the load another form under another layout."""
    if not optimizers_take_metadata():
        return
    job = Job(Layout(tp=2))
    job.train(2)
    expected = consolidated(job, folder / "expected")
    with _switched():
        for at, form in enumerate((BUCKETS, GATHERED, None)):
            where = _saved_by_library(job, folder / f"global_step_{at + 7}" / "actor", form)
            checkpoint = Checkpoint.open(where)
            assert (checkpoint.manifest.step, checkpoint.manifest.optimizer is not None) == (at + 7, True)
            assert (Path(where) / ".metadata").read_bytes().startswith(b"# A checkpoint of unickpt")
            for asked in (GATHERED, None):
                again = _loaded(Layout(pp=2), where, asked, is_loading=asked is not None)
                with _switched("off"):
                    found = consolidated(again, folder / "found")
                if expected is not None and found is not None:
                    assert not differences(expected, found), differences(expected, found)[:5]
    again = _loaded(Layout(pp=2), where, GATHERED)  # a checkpoint is recognised without the switch
    found = consolidated(again, folder / "found")
    assert expected is None or found is None or not differences(expected, found)


@scenario(2)
def with_the_switch_a_librarys_own_checkpoint_loads_as_before(folder: Path) -> None:
    job = Job(Layout(tp=2))
    job.train(2)
    expected = _live(job)
    native = [_saved_by_library(job, folder / f"native {at}", form) for at, form in enumerate((BUCKETS, GATHERED))]
    assert all((Path(where) / "common.pt").is_file() for where in native)
    with _switched():
        for where, form in zip(native, (BUCKETS, GATHERED), strict=True):
            _assert_equal(expected, _live(_loaded(Layout(tp=2), where, form)))
        with _switched("load"):
            assert not _is_ours(_saved_by_library(job, folder / "load", BUCKETS))


@scenario(2)
def with_the_switch_an_optimizer_is_described_after_megatrons_load_of_the_weights(folder: Path) -> None:
    """As verl does it with checkpoints of before the switch. Megatron's load has reshaped the data in the description."""
    job = Job(Layout(tp=2))
    job.train(2)
    expected = _live(job)
    for name, part in _described(job, BUCKETS).items():
        dist_checkpointing.save({name: part}, made(folder / name), _megatrons_strategy(), content_metadata=dict(BUCKETS))
    assert (folder / "optimizer" / "common.pt").is_file()
    with _switched():
        again = Job(Layout(tp=2), seed=7)
        weights = {"model": again.modules[0].sharded_state_dict(metadata=dict(BUCKETS))}
        again.modules[0].load_state_dict(dist_checkpointing.load(dict(weights), str(folder / "model"))["model"])
        optimizer = again.optimizer.sharded_state_dict(weights, is_loading=True, metadata=dict(BUCKETS))
        found = dist_checkpointing.load({"optimizer": optimizer}, str(folder / "optimizer"))
        again.optimizer.load_state_dict(found["optimizer"])
        _assert_equal(expected, _live(again))


def _is_ours(where: str) -> bool:
    return (Path(where) / "manifest.json").is_file()


@scenario(2)
def without_the_switch_a_librarys_checkpoint_has_the_bytes_of_megatrons(folder: Path) -> None:
    job = Job(Layout(dp=2))
    job.train(1)
    torch.use_deterministic_algorithms(True)  # fills memory that Megatron stores and never sets: the padding of buckets
    for form in (BUCKETS, GATHERED):
        with _switched("off"):
            hooked = _bytes_of(_saved_by_library(job, folder / "ck", form))
        hooks.uninstall(megatron_hooks.DECLARED)
        try:
            own = dist_checkpointing.serialization.save  # the package still has the hooked one
            own(_described(job, form), made(folder / "ck"), _megatrons_strategy(), content_metadata=dict(form or {}))
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
    job = Job(Layout(tp=2))
    job.train(2)
    expected = _live(job)
    quantised = halves("quantised", torch.zeros(4).to(torch.float8_e8m0fnu))  # a dtype that the format lacks
    with _switched(), _warnings() as told:
        where = _saved_by_library(job, folder / "ck", BUCKETS, quantised=quantised)
        assert not _is_ours(where)
        if dist.get_rank() == 0:
            assert any("saves this checkpoint in Megatron's own format instead" in text for text in told), told
        _assert_equal(expected, _live(_loaded(Layout(tp=2), where, BUCKETS)))


@scenario(2)
def values_of_the_common_state_in_which_ranks_differ_are_each_ranks_own(folder: Path) -> None:
    """As a library has it that puts the generators of every rank there."""
    rank = dist.get_rank()
    Job(Layout(dp=2))
    torch.manual_seed(10 + rank)
    knot = SimpleNamespace(rank=rank)
    knot.itself = knot
    common = {"rng": {"cpu": torch.get_rng_state()}, "port": 4000 + rank, "same": [1, 2], "knot": knot}
    dist_checkpointing.save(dict(common), made(folder / "ck"), strategy(), validate_access_integrity=False)
    found = dist_checkpointing.load_common_state_dict(str(folder / "ck"))
    assert (found["port"], found["same"], found["knot"].rank) == (4000 + rank, [1, 2], rank)
    assert torch.equal(found["rng"]["cpu"], common["rng"]["cpu"])
    Job(Layout(tp=2))
    found = dist_checkpointing.load({}, str(folder / "ck"))
    entries = {entry.name: entry for entry in RUNTIME.last_report.entries}
    assert (found["port"], entries["common.port"].outcome, entries["common.rng"].outcome) == (4000, "set", "re-seeded")
    drawn = _of_all(torch.rand(2, generator=torch.Generator().set_state(found["rng"]["cpu"])).tolist())
    assert drawn[0] == drawn[1]  # tensor parallel ranks, outside of their regions


@scenario(2)
def with_the_switch_a_folder_of_its_own_for_each_rank_is_saved_by_megatron(folder: Path) -> None:
    """As SkyRL has it on a cloud path: a temporary folder of each process, whose files it gathers by itself."""
    rank = dist.get_rank()
    job = Job(Layout(tp=2))
    job.train(1)
    expected = _live(job)
    own = folder / f"of rank {rank}"
    own.mkdir()
    with _switched(), _warnings() as told:
        dist_checkpointing.save(_described(job, BUCKETS), str(own), _megatrons_strategy())
    assert list(own.glob(f"__{rank}_*.distcp"))
    assert not _is_ours(str(own))
    if rank == 0:
        assert any("on this rank and" in text and "in Megatron's own format instead" in text for text in told), told
    dist.barrier()
    for file in own.iterdir():
        shutil.copy(file, folder)
    dist.barrier()
    _assert_equal(expected, _live(_loaded(Layout(tp=2), str(folder), BUCKETS)))


@scenario(2)
def with_the_switch_asynchronous_saves_that_nobody_polls_are_finalized_at_the_next_one(folder: Path) -> None:
    """As verl's, which writes its tracker file in a finalize function. A checkpoint is committed without any call."""
    queue, done = AsyncCallsQueue(), list[str]()
    with _switched():
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
    with _switched():  # somebody polls
        for _ in range(2):
            request = dist_checkpointing.save(state, made(folder / "4"), _megatrons_strategy(), async_sharded_save=True)
            queue.schedule_async_request(request)
            request.finalize_fns.pending.wait()
            dist.barrier()
    assert queue.get_num_unfinalized_calls() == 2
    queue.maybe_finalize_async_calls(blocking=True)
