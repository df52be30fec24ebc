"""What Megatron's users rely on, one function each. Run by ``scenario_worker`` under torchrun."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import logging
import os
import shutil
import unittest
import unittest.mock
from pathlib import Path
from typing import Any

from tests.megatron.jobs import Job  # before anything of megatron

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException, check_is_distributed_checkpoint
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

import megatron_unickpt
from megatron_unickpt import job, loading, saving
from megatron_unickpt.optimizer import METADATA

from tests.megatron.layouts import Layout
from tests.megatron.scenario_worker import REGISTRY, scenario
from tests.megatron.truth import consolidated, differences, optimizers_take_metadata
from unickpt.errors import ConfigError
from unickpt.loading import Checkpoint
from unickpt.saves import SaveOptions

__all__ = ["REGISTRY"]


def strategy() -> Any:
    return get_default_save_sharded_strategy("unickpt")


def made(folder: Path) -> str:
    """A directory, as Megatron wants it before it saves."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    dist.barrier()
    return str(folder)


def halves(key: str, tensor: torch.Tensor, **options: Any) -> ShardedTensor:
    """This rank's part of the rows of a global tensor; ``tensor`` is all of it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    part = tensor.chunk(world)[rank].clone()
    return ShardedTensor.from_rank_offsets(key, part, (0, rank, world), **options)


def shards_begin_anywhere() -> bool:
    """Whether this Megatron has uneven shards; before 0.15 a shard begins at a multiple of its own size."""
    try:
        ShardedTensor("x", torch.zeros(2), torch.float32, (2,), (3,), (1,), None)
    except CheckpointingException:
        return False
    return True


# ---------------------------------------------------------------- dist_checkpointing on our directories


@scenario(1, 2)
def every_function_of_dist_checkpointing_works_on_a_directory(folder: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(24.0).view(8, 3)
    where = made(folder / "ck")
    state = {
        "a": halves("a", whole), "b": {"bias": halves("b.bias", whole[:, 0])}, "iteration": 7,
        "note": ("tuple", 2.5), "mine": LocalNonpersistentObject({"rank": rank}),
        "object": ShardedObject("object", {"from": rank, "tensor": torch.full((2,), rank)}, (world,), (rank,)),
    }  # fmt: skip
    described = "content_metadata" in inspect.signature(dist_checkpointing.save).parameters  # since 0.13
    content = {"content_metadata": {"flavour": "vanilla"}} if described else {}
    dist_checkpointing.save(state, where, strategy(), **content)
    assert check_is_distributed_checkpoint(where)
    common = dist_checkpointing.load_common_state_dict(where)
    assert (common["iteration"], common["note"]) == (7, ("tuple", 2.5))
    if described:
        assert dist_checkpointing.load_content_metadata(where)["flavour"] == "vanilla"
    tensors = dist_checkpointing.load_tensors_metadata(where)
    assert {k: tuple(t.global_shape) for k, t in tensors.items()} == {"a": (8, 3), "b.bias": (8,)}
    known = dist_checkpointing.serialization.load_sharded_metadata(where)
    assert {item.key for item in known.values()} == {"a", "b.bias", "object"}
    plain = dist_checkpointing.load_plain_tensors(where)
    assert torch.equal(plain["a"], whole)
    assert torch.equal(plain["b.bias"], whole[:, 0])
    wanted = {
        "a": halves("a", torch.zeros(8, 3)), "b": {"bias": halves("b.bias", torch.zeros(8))},
        "mine": LocalNonpersistentObject("local"), "object": ShardedObject("object", None, (world,), (rank,)),
    }  # fmt: skip
    loaded = dist_checkpointing.load(wanted, where)
    assert torch.equal(loaded["a"], whole.chunk(world)[rank])
    assert (loaded["mine"], loaded["iteration"]) == ("local", 7)
    assert loaded["object"]["from"] == rank
    assert torch.equal(loaded["object"]["tensor"], torch.full((2,), rank))
    dist.barrier()
    if rank == 0:
        dist_checkpointing.remove_sharded_tensors(where, "b.")
    dist.barrier()
    assert set(dist_checkpointing.load_tensors_metadata(where)) == {"a"}
    assert torch.equal(dist_checkpointing.load_plain_tensors(where)["a"], whole)
    assert isinstance(get_default_load_sharded_strategy(where), megatron_unickpt.UnickptLoadStrategy)


@scenario(2)
def a_url_is_a_directory_for_the_library_and_what_the_scripts_cannot_use_is_refused(folder: Path) -> None:
    """With a server, which ``tests/test_object_store.py`` has."""
    if "UNICKPT_TEST_URL" not in os.environ:
        return
    os.chdir(folder)
    url, rank = f"{os.environ['UNICKPT_TEST_URL']}/megatron", dist.get_rank()
    source = Job(Layout(tp=2, dp=1), seed=1)
    source.train(2)
    truth = consolidated(source, folder / "truth")
    megatron_unickpt.save(f"{url}/library", source.chunks, source.optimizer, iteration=2, extra={"seen": 5})
    job.saver(SaveOptions(upload_to=url))
    megatron_unickpt.save(folder / "iter_0000002", source.chunks, source.optimizer, iteration=2, extra={"seen": 5})
    job.saver().finish()
    dist.barrier()
    for where in (f"{url}/library", f"{url}/iter_0000002"):
        assert job.recognises(where)
        assert dist_checkpointing.load_common_state_dict(where) is not None
        target = Job(Layout(tp=1, dp=2), seed=2)
        assert megatron_unickpt.load(where, target.chunks, target.optimizer)["extra"] == {"seen": 5}
        found = consolidated(target, folder / "seen")
        assert rank or not differences(truth, found)
    assert [p.name for p in folder.iterdir() if p.name.startswith("s3")] == []
    if rank == 0:
        from megatron_unickpt import training

        place = argparse.Namespace(save="s3://bucket/run", load=None, unickpt_upload_to="")
        with pytest.raises(ConfigError, match="--save s3://bucket/run: Megatron's scripts need a directory"):
            training._check_places(place)
        with pytest.raises(ConfigError, match=r"--unickpt-upload-to: gs://bucket/run: needs a package.*gcsfs"):
            training._check_places(argparse.Namespace(save="out", load="out", unickpt_upload_to="gs://bucket/run"))


@scenario(2)
def a_rank_whose_common_state_differs_says_so(folder: Path) -> None:
    rank = dist.get_rank()
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    megatrons = logging.getLogger("megatron.core.dist_checkpointing.validation")
    megatrons.addHandler(handler)
    try:
        state = {"a": halves("a", torch.arange(8.0)), "rank": rank, "iteration": 3}
        dist_checkpointing.save(state, made(folder / "differs"), strategy())
        said = [False, False]
        dist.all_gather_object(said, any("('rank',)" in line for line in heard))
        assert said in ([False, True], [True, False])  # the rank itself; before 0.14 rank 0
        heard.clear()
        same = {"preprocess_common_before_consistancy_check": lambda common: {"iteration": common["iteration"]}}
        dist_checkpointing.save(state, made(folder / "allowed"), strategy(), **same)
        assert not heard
        assert dist_checkpointing.load_common_state_dict(str(folder / "allowed"))["rank"] == 0
    finally:
        megatrons.removeHandler(handler)


@scenario(2)
def every_strictness_means_what_it_means_in_megatron(folder: Path) -> None:
    whole = torch.rand(4, 2)
    dist.broadcast(whole, 0)
    ours, theirs = made(folder / "ours"), made(folder / "theirs")
    for where, how in ((ours, strategy()), (theirs, None)):
        dist_checkpointing.save({"a": halves("a", whole), "b": halves("b", whole)}, where, how)
    for mode in dist_checkpointing.validation.StrictHandling:
        found = []
        for where in (ours, theirs):
            wanted = {"a": halves("a", torch.zeros(4, 2)), "c": halves("c", torch.zeros(4, 2))}
            try:
                result = dist_checkpointing.load(wanted, where, strict=mode)
            except BaseException:  # torch_dist's errors are torch's, which are no Exception
                result = "raised"
            state, *keys = result if isinstance(result, tuple) else (result,)
            if isinstance(state, dict):
                assert torch.equal(state["a"], whole.chunk(2)[dist.get_rank()]), mode
                found.append((sorted(k for k in state if k in "abc"), [sorted(k) for k in keys]))
            else:
                found.append(state)
        assert found[0] == found[1], (mode, found)


@scenario(2)
def prepended_axes_replicas_uneven_shards_and_padding(folder: Path) -> None:
    rank = dist.get_rank()
    where = made(folder / "ck")
    layers = torch.rand(4, 2, 3)
    dist.broadcast(layers, 0)
    mine = {
        str(at): ShardedTensor.from_rank_offsets("layers", layers[at].clone(), (0, at, 4), prepend_axis_num=1)
        for at in (2 * rank, 2 * rank + 1)
    }
    uneven = torch.arange(5.0)
    if shards_begin_anywhere():
        part = uneven[:2] if rank == 0 else uneven[2:]
        mine["uneven"] = ShardedTensor("uneven", part.clone(), part.dtype, part.shape, (5,), (0 if rank == 0 else 2,), None)
    else:
        mine["uneven"] = ShardedTensor.from_rank_offsets("uneven", uneven.clone(), replica_id=rank)
    mine["same"] = ShardedTensor.from_rank_offsets("same", torch.full((3,), 5.0), replica_id=rank)
    mine["padded"] = ShardedTensor.from_rank_offsets(
        "padded", torch.full((4, 2), 1.0 + rank), (0, rank, 2), allow_shape_mismatch=True
    )
    dist_checkpointing.save(mine, where, strategy())
    checkpoint = Checkpoint.open(where)
    assert checkpoint.info("layers", "weight").shape == (4, 2, 3)
    assert len(checkpoint.index.rows_of(checkpoint.ids[("same", "weight")])) == 1
    wanted = {
        "layers": ShardedTensor.from_rank_offsets("layers", torch.zeros(4, 2, 3)),
        "uneven": ShardedTensor.from_rank_offsets("uneven", torch.zeros(5)),
        "same": ShardedTensor.from_rank_offsets("same", torch.zeros(3)),
        "padded": ShardedTensor.from_rank_offsets("padded", torch.full((10, 2), -1.0), allow_shape_mismatch=True),
    }
    loaded = dist_checkpointing.load(wanted, where, validate_access_integrity=False)
    assert torch.equal(loaded["layers"], layers)
    assert torch.equal(loaded["uneven"], uneven)
    assert torch.equal(loaded["same"], torch.full((3,), 5.0))
    assert loaded["padded"][:, 0].tolist() == [1.0] * 4 + [2.0] * 4 + [0.0] * 2


@scenario(2)
def factories_are_built_for_saving_and_merged_after_loading(folder: Path) -> None:
    rank = dist.get_rank()
    where = made(folder / "ck")

    def build(key: str, tensor: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
        gate, up = tensor.chunk(2)
        return {
            "gate": ShardedTensor.from_rank_offsets(f"{key}.gate", gate, (0, rank, 2), replica_id=replica_id),
            "up": ShardedTensor.from_rank_offsets(f"{key}.up", up, (0, rank, 2), replica_id=replica_id),
        }

    def merge(parts: Any) -> torch.Tensor:
        return torch.cat([parts["gate"], parts["up"]])

    data = torch.arange(8.0).view(4, 2) + 100 * rank
    dist_checkpointing.save({"fused": ShardedTensorFactory("fused", data, build, merge)}, where, strategy())
    plain = dist_checkpointing.load_plain_tensors(where)
    assert plain["fused.gate"].shape == (4, 2)
    empty = ShardedTensorFactory("fused", torch.zeros(4, 2), build, merge)
    loaded = dist_checkpointing.load({"fused": empty}, where)
    assert torch.equal(loaded["fused"], data)


@scenario(2)
def fully_parallel_wrappers_and_strategy_names_are_accepted(folder: Path) -> None:
    whole = torch.rand(6, 2)
    dist.broadcast(whole, 0)
    group = dist.group.WORLD
    for at, how in enumerate((("unickpt", 1), FullyParallelSaveStrategyWrapper(strategy(), group, True), strategy())):
        where = made(folder / str(at))
        dist_checkpointing.save({"a": halves("a", whole)}, where, how)
        reader = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(where), group)
        loaded = dist_checkpointing.load({"a": halves("a", torch.zeros(6, 2))}, where, reader)
        assert torch.equal(loaded["a"], whole.chunk(2)[dist.get_rank()])
        assert not list(Path(where).glob("*.pt")), "something was pickled"


@scenario(2)
def asynchronous_saves_go_through_megatrons_queue_and_fork_nothing(folder: Path) -> None:
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
    live.data.fill_(-1)  # training goes on at once
    assert queue.get_num_unfinalized_calls() == 1
    assert len(multiprocessing.active_children()) == before
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert finalized == [0]
    loaded = dist_checkpointing.load({"a": halves("a", torch.zeros(600, 50))}, where)
    assert torch.equal(loaded["a"], whole.chunk(2)[dist.get_rank()])


@scenario(2)
def two_asynchronous_saves_at_a_time_and_a_load_beside_them(folder: Path) -> None:
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
def a_key_that_one_rank_alone_lacks_ends_the_load_on_all_of_them(folder: Path) -> None:
    where = made(folder / "ck")
    dist_checkpointing.save({"a": halves("a", torch.ones(4, 2))}, where, strategy())
    wanted: dict[str, Any] = {"a": halves("a", torch.zeros(4, 2))}
    if dist.get_rank() == 1:
        wanted["b"] = ShardedTensor.from_rank_offsets("b", torch.zeros(2))
    with pytest.raises(CheckpointingException):
        dist_checkpointing.load(wanted, where, strict="raise_unexpected")


@scenario(2)
def an_asynchronous_save_that_fails_is_a_warning_and_nothing_is_finalized(folder: Path) -> None:
    where, finalized = made(folder / "ck"), []
    if dist.get_rank() == 1:
        blocked = folder / "ck" / "data"
        blocked.write_text("a file where a folder has to be")
    dist.barrier()
    request = dist_checkpointing.save({"a": halves("a", torch.ones(4, 2))}, where, strategy(), async_sharded_save=True)
    request.add_finalize_fn(lambda: finalized.append(1))
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    assert finalized == []
    assert not check_is_distributed_checkpoint(where)
    assert not job.recognises(where)


@scenario(2)
def two_saves_in_a_row_and_one_over_another(folder: Path) -> None:
    for round_ in range(3):
        for at in range(2):
            place = folder / f"ck{at}"
            place.mkdir(exist_ok=True)
            whole = torch.full((4, 2), 10.0 * round_ + at)
            dist_checkpointing.save({"a": halves("a", whole)}, str(place), strategy())
            loaded = dist_checkpointing.load({"a": halves("a", torch.zeros(4, 2))}, str(place))
            assert torch.equal(loaded["a"], whole.chunk(2)[dist.get_rank()])


# ---------------------------------------------------------------- jobs


@scenario(2)
def the_same_shape_resumes_to_the_bit(folder: Path) -> None:
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
        size = saving.last_save.size_bytes
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
def weights_alone_and_an_optimizer_that_never_stepped(folder: Path) -> None:
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
def generators_and_trackers_continue_under_the_same_positions(folder: Path) -> None:
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
    megatron_unickpt.load(folder / "ck", other.chunks, other.optimizer)
    entry = next(e for e in loading.last_report.entries if e.name == "rng")
    assert entry.outcome == "left out"


@scenario(2)
def padded_vocabularies_of_different_sizes(folder: Path) -> None:
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
def rows_of_tokens_are_never_dropped_and_padding_is_free(folder: Path) -> None:
    source = Job(Layout(tp=2), vocabulary=104)
    source.train(1)
    megatron_unickpt.save(folder / "unknown", source.chunks, source.optimizer)
    megatron_unickpt.save(folder / "known", source.chunks, source.optimizer, vocabulary=96)
    stored = dist_checkpointing.load_plain_tensors(str(folder / "known"))
    name = "embedding.word_embeddings.weight"
    for where, rows, told in (("unknown", 96, "does not tell how many"), ("known", 80, "96 of them entries of its tokenizer")):
        smaller = Job(Layout(dp=2), vocabulary=rows, seed=4)
        before = {key: value.clone() for key, value in smaller.modules[0].state_dict().items() if torch.is_tensor(value)}
        with pytest.raises(CheckpointingException, match=f"104 rows in the checkpoint.* {rows} in this job") as caught:
            megatron_unickpt.load(folder / where, smaller.chunks, smaller.optimizer)
        assert told in str(caught.value)
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
    """And for the rest, everything is restored. A frozen parameter has a weight, and neither group nor moments."""

    def frozen(name: str) -> bool:
        return "linear_fc2" in name

    for kind in ("dist", "plain"):
        source = Job(Layout(tp=2, optimizer=kind), frozen=frozen)
        source.train(2)
        megatron_unickpt.save(folder / kind, source.chunks, source.optimizer)
        for target in (Layout(tp=2, optimizer=kind), Layout(dp=2, optimizer="dist" if kind == "plain" else "plain")):
            trainable = Job(target, seed=7)
            megatron_unickpt.load(folder / kind, trainable.chunks, trainable.optimizer)
            said = [entry for entry in loading.last_report.entries if entry.reason.startswith("it was not trained")]
            assert {entry.state for entry in said} == {"exp_avg", "exp_avg_sq"}
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


@scenario(2)
def another_number_of_layers_is_refused_by_names_and_shapes(folder: Path) -> None:
    """Objects that are kept by position, as ``_extra_state`` is, do not fit either, which says nothing."""
    source = Job(Layout(tp=2))
    megatron_unickpt.save(folder / "ck", source.chunks, source.optimizer)
    with unittest.mock.patch("tests.megatron.jobs.LAYERS", 2):
        other = Job(Layout(tp=2))
    described: dict[str, Any] = {"model": other.modules[0].sharded_state_dict()}
    described["extra"] = ShardedObject("decoder.layers._extra_state", None, (2,), (0,), replica_id=dist.get_rank())
    with pytest.raises(CheckpointingException) as caught:
        dist_checkpointing.load(described, str(folder / "ck"))
    assert "of another shape" in str(caught.value)
    assert "_extra_state" not in str(caught.value)


def _handed_over(folder: Path, source: Layout, target: Layout, **options: Any) -> None:
    """Every state of one job in another, by Megatron's own sharded state dicts; and both go on alike."""
    job = Job(source, **options)
    job.train(2)
    expected = consolidated(job, folder / "expected")
    megatron_unickpt.save(folder / "ck", job.chunks, job.optimizer, iteration=2)
    loss = job.train(1)[0]
    job = Job(target, seed=5, **options)
    megatron_unickpt.load(folder / "ck", job.chunks, job.optimizer)
    job.step = 2
    found = consolidated(job, folder / "found")
    if expected is not None and found is not None:
        assert not differences(expected, found), differences(expected, found)[:5]
    assert abs(loss - job.train(1)[0]) < 2e-3


@scenario(2)
def layers_that_predict_several_tokens(folder: Path) -> None:
    _handed_over(folder, Layout(tp=2), Layout(dp=2, optimizer="plain"), predictions=1)


@scenario(2)
def whole_parameters_dealt_out_to_ranks_and_flat_ranges(folder: Path) -> None:
    """The layer-wise optimizer, and back. Both have bf16 weights and fp32 masters."""
    if importlib.util.find_spec("megatron.core.optimizer.layer_wise_optimizer") is None:
        raise unittest.SkipTest("there is none before 0.15")
    _handed_over(folder / "1", Layout(dp=2, optimizer="layers"), Layout(tp=2))
    _handed_over(folder / "2", Layout(dp=2), Layout(dp=2, optimizer="layers"))
    experts = Layout(dp=2, ep=2, moe=True, optimizer="layers")
    _handed_over(folder / "3", experts, Layout(pp=2, moe=True, optimizer="plain"))


# ---------------------------------------------------------------- what goes wrong


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
def a_missing_file_a_torn_file_and_a_missing_manifest(folder: Path) -> None:
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
    with pytest.raises(CheckpointingException, match=r"no manifest\.json, so there is no checkpoint here"):
        dist_checkpointing.load({"a": halves("a", torch.zeros(4, 2))}, str(where))


@scenario(2)
def what_does_not_fit_is_listed_whole(folder: Path) -> None:
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
        with pytest.raises(job.SaveFailedError, match="a"):
            dist_checkpointing.save(state, where, strategy())
        assert not job.recognises(where)


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
def the_log_says_what_became_of_everything(folder: Path) -> None:
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
        text = "\n".join(lines)
        assert "TP2 PP1 DP1 on 2 ranks" in text.replace(" ETP2", "")
        assert "into TP1 PP1 DP2 on 2 ranks" in text
        assert "unaccounted: 0" in text
        json.dumps(loading.last_report.to_json())


@scenario(2)
def optimizers_that_are_not_asked_describe_themselves_as_ever(folder: Path) -> None:
    """Without our mark in the metadata, Megatron's own sharding types pass through, and can be stored by us, too."""
    if not optimizers_take_metadata():
        raise unittest.SkipTest("there is no such metadata before 0.13")
    job = Job(Layout(dp=2))
    job.train(1)
    newer = hasattr(DistributedOptimizer, "sharded_param_state_dp_reshardable")  # 0.15
    kind = "dp_reshardable" if newer else "fully_sharded_bucket_space"
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
