"""Training loops of their own: model, optimizer and generators through ``dist_checkpointing``, in any form of the optimizer."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject

import megatron_unickpt
from megatron_unickpt.framework import optimizer_internals
from megatron_unickpt.edge import RUNTIME
from megatron_unickpt.held_state.optimizer import METADATA, MegatronsForm
from megatron_unickpt.testing.jobs import Job
from megatron_unickpt.testing.layouts import Layout
from megatron_unickpt.testing.truth import consolidated, optimizers_take_metadata, own_forms
from tests.jobs.megatron.compared import differences
from tests.jobs.megatron.scenarios import scenario
from tests.jobs.megatron.sharded_state import made, strategy
from tests.support.extent import some
from unickpt.checkpoint.load.checkpoint import Checkpoint

Form = Mapping[str, Any] | None  # metadata of ``sharded_state_dict``; None: the loop passes none
BUCKETS, GATHERED = ({"distrib_optim_sharding_type": name} for name in own_forms())
FORMS: tuple[Form, ...] = (METADATA, BUCKETS, GATHERED, None)


def described(job: Job, form: Form, *, is_loading: bool = False, copied: bool = False) -> dict[str, Any]:
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
    dist_checkpointing.save(described(job, form, copied=copied), directory, strategy(), **content)
    return directory


def loaded(layout: Layout, where: str, form: Form, *, is_loading: bool = True, copied: bool = False) -> Job:
    job = Job(layout, seed=7)
    found = dist_checkpointing.load(described(job, form, is_loading=is_loading, copied=copied), where)
    for at, module in enumerate(job.modules):
        module.load_state_dict(found["model" if len(job.modules) == 1 else f"model{at}"])
    job.optimizer.load_state_dict(found["optimizer"])
    return job


def live(job: Job) -> list[tuple[Any, ...]]:
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


def assert_equal(expected: Any, found: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(expected, found)
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(found)
        for a, b in zip(expected, found, strict=True):
            assert_equal(a, b)
    elif isinstance(expected, dict):
        assert expected.keys() == found.keys()
        assert_equal(list(expected.values()), list(found.values()))
    else:
        assert expected == found


@contextmanager
def warned() -> Iterator[list[str]]:
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
    layouts = (Layout(dp=2, ep=2, moe=True), Layout(tp=2), Layout(dp=2), Layout(tp=2, optimizer="plain"))
    for at, layout in enumerate(some(layouts, 2)):
        job = Job(layout)
        job.train(2)
        with torch.no_grad():  # the master keeps its value, which a load must not derive from the weight
            next(job.modules[0].parameters()).mul_(2)
        where = [_saved(job, folder / f"{at}-{number}", form) for number, form in enumerate(FORMS)]
        expected, groups = live(job), job.hyperparameters()
        losses = job.train(2)
        for number, directory in enumerate(where):
            asked = FORMS[(number + at) % len(FORMS)]  # every pair in one of the layouts
            forgets = (
                asked in (METADATA, BUCKETS) and layout.distributed
            )  # Megatron itself refuses a new optimizer in the others
            again = loaded(layout, directory, asked, is_loading=not forgets)
            assert_equal(expected, live(again))
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
        found = consolidated(loaded(layout, where, form), folder / "found")
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
    expected, groups = live(job), job.hyperparameters()
    buckets = _saved(job, folder / "buckets", BUCKETS, copied=True)
    gathered = _saved(job, folder / "gathered", GATHERED, copied=True)
    assert Checkpoint.open(buckets).manifest.optimizer is None
    losses = job.train(2)
    cases = ((buckets, BUCKETS), (gathered, METADATA), (gathered, GATHERED), (gathered, BUCKETS))
    for where, form in some(cases, 2):
        again = loaded(Layout(tp=2), where, form)
        assert_equal(expected, live(again))
        assert again.hyperparameters() == groups
        again.step = 2
        assert again.train(2) == losses, form
    told = rf"{own_forms()[0]}.*layout that saved it \(TP2 .*METADATA: then it loads under every layout"
    for layout, form in ((Layout(tp=2), METADATA), (Layout(pp=2), METADATA), (Layout(pp=2), BUCKETS)):
        with pytest.raises(CheckpointingException, match=told):
            loaded(layout, buckets, form)
    library = Job(Layout(tp=2), seed=7)
    before = live(library)
    with pytest.raises(CheckpointingException, match=told):
        megatron_unickpt.load(buckets, library.chunks, library.optimizer)
    assert_equal([each[2] for each in before], [each[2] for each in live(library)])
    by_parameter = _saved(job, folder / "by parameter", METADATA)
    with pytest.raises(
        CheckpointingException, match=r"asked for as memory buckets.*stored by parameter\. Pass metadata=megatron"
    ):
        loaded(Layout(tp=2), by_parameter, BUCKETS, copied=True)


@scenario(2)
def whether_an_optimizer_had_stepped_is_in_the_checkpoint(folder: Path) -> None:
    job = Job(Layout(dp=2))
    for steps in (0, 1):
        job.train(steps)
        record = Checkpoint.open(_saved(job, folder / f"{steps}", METADATA)).manifest.optimizer
        assert record is not None
        assert record.stepped is bool(steps)
    again = loaded(Layout(tp=2), str(folder / "0"), METADATA)
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


def of_all(value: Any) -> list[Any]:
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
    inside, outside = (of_all(_drawn(spread, tracker)) for tracker in ("model-parallel-rng", ""))
    assert inside[0] != inside[1]
    assert outside[0] == outside[1]
    again = _load_generators(two, str(folder / one.name))[0]
    assert _drawn(again, "model-parallel-rng") == _drawn(spread, "model-parallel-rng")
    new = _generators().data[0]
    assert all(_drawn(state, "model-parallel-rng") != _drawn(new, "model-parallel-rng") for state in (spread, same))
    joined = of_all(_drawn(_load_generators(one, str(folder / two.name))[0], "model-parallel-rng"))
    assert joined[0] == joined[1]  # as in Megatron: data parallel ranks share the seed
    staged = of_all(_drawn(_load_generators(Layout(pp=2), str(folder / two.name))[0], ""))
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
    inside = of_all(_drawn(found[3], "model-parallel-rng"))
    assert inside[0] != inside[1]


@scenario(2)
def a_copy_of_an_optimizers_state_dict_is_a_plain_dict(_: Path) -> None:
    job = Job(Layout(tp=2))
    job.train(1)
    state = described(job, GATHERED)["optimizer"]
    assert isinstance(state, MegatronsForm)
    for other in (copy.copy(state), pickle.loads(pickle.dumps(MegatronsForm({"a": 1}, job.optimizer, {})))):
        assert type(other) is dict
