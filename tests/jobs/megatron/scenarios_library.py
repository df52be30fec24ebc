"""``dist_checkpointing`` with unickpt directories: its functions, state dicts and strategies."""

from __future__ import annotations

import argparse
import inspect
import logging
import os
import unittest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException, check_is_distributed_checkpoint
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

import megatron_unickpt
from megatron_unickpt.framework import marks
from megatron_unickpt.edge import RUNTIME
from megatron_unickpt.framework.errors import MegatronSaveError
from megatron_unickpt.testing.jobs import Job
from megatron_unickpt.testing.layouts import Layout
from megatron_unickpt.testing.truth import consolidated
from tests.jobs.megatron.compared import differences
from tests.jobs.megatron.scenarios import scenario
from tests.jobs.megatron.sharded_state import halves, made, shards_begin_anywhere, strategy
from unickpt.base.errors import ConfigError
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.save.requests import SaveOptions


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
def the_library_accepts_urls_and_the_scripts_refuse_them(folder: Path) -> None:
    """Runs only in ``tests/integration/storage/test_object_store_frameworks.py``, which starts a server."""
    if "UNICKPT_TEST_URL" not in os.environ:
        return
    os.chdir(folder)
    url, rank = f"{os.environ['UNICKPT_TEST_URL']}/megatron", dist.get_rank()
    source = Job(Layout(tp=2, dp=1), seed=1)
    source.train(2)
    truth = consolidated(source, folder / "truth")
    megatron_unickpt.save(f"{url}/library", source.chunks, source.optimizer, iteration=2, extra={"seen": 5})
    RUNTIME.saver(SaveOptions(upload_to=url))
    megatron_unickpt.save(folder / "iter_0000002", source.chunks, source.optimizer, iteration=2, extra={"seen": 5})
    RUNTIME.saver().finish()
    dist.barrier()
    for where in (f"{url}/library", f"{url}/iter_0000002"):
        assert marks.recognises(where)
        assert dist_checkpointing.load_common_state_dict(where) is not None
        target = Job(Layout(tp=1, dp=2), seed=2)
        assert megatron_unickpt.load(where, target.chunks, target.optimizer)["extra"] == {"seen": 5}
        found = consolidated(target, folder / "seen")
        assert rank or not differences(truth, found)
    assert [p.name for p in folder.iterdir() if p.name.startswith("s3")] == []
    if rank == 0:
        from megatron_unickpt.pretraining import arguments

        place = argparse.Namespace(save="s3://bucket/run", load=None, unickpt_upload_to="")
        with pytest.raises(ConfigError, match="--save s3://bucket/run: Megatron's scripts need a local directory"):
            arguments._check_places(place)
        with pytest.raises(ConfigError, match=r"--unickpt-upload-to: gs://bucket/run: needs a package.*gcsfs"):
            arguments._check_places(argparse.Namespace(save="out", load="out", unickpt_upload_to="gs://bucket/run"))


@scenario(2)
def a_rank_with_another_common_state_logs_a_warning(folder: Path) -> None:
    rank = dist.get_rank()
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    megatrons = logging.getLogger("megatron.core.dist_checkpointing.validation")
    megatrons.addHandler(handler)
    try:
        state = {"a": halves("a", torch.arange(8.0)), "rank": rank, "iteration": 3}
        dist_checkpointing.save(state, made(folder / "differs"), strategy())
        warned = [False, False]
        dist.all_gather_object(warned, any("('rank',)" in line for line in logged))
        assert warned in ([False, True], [True, False])  # the rank itself; rank 0 before 0.14
        logged.clear()
        same = {"preprocess_common_before_consistancy_check": lambda common: {"iteration": common["iteration"]}}
        dist_checkpointing.save(state, made(folder / "allowed"), strategy(), **same)
        assert not logged
        assert dist_checkpointing.load_common_state_dict(str(folder / "allowed"))["rank"] == 0
    finally:
        megatrons.removeHandler(handler)


@scenario(2)
def strict_handling_has_the_same_results_as_in_megatron(folder: Path) -> None:
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
            except BaseException:  # torch_dist raises torch's errors, which do not derive from Exception
                result = "raised"
            state, *keys = result if isinstance(result, tuple) else (result,)
            if isinstance(state, dict):
                assert torch.equal(state["a"], whole.chunk(2)[dist.get_rank()]), mode
                found.append((sorted(k for k in state if k in "abc"), [sorted(k) for k in keys]))
            else:
                found.append(state)
        assert found[0] == found[1], (mode, found)


@scenario(2)
def prepended_axes_replicas_uneven_shards_and_padding_are_restored(folder: Path) -> None:
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
def repeated_saves_replace_the_checkpoint_in_a_directory(folder: Path) -> None:
    for round_ in range(3):
        for at in range(2):
            place = folder / f"ck{at}"
            place.mkdir(exist_ok=True)
            whole = torch.full((4, 2), 10.0 * round_ + at)
            dist_checkpointing.save({"a": halves("a", whole)}, str(place), strategy())
            loaded = dist_checkpointing.load({"a": halves("a", torch.zeros(4, 2))}, str(place))
            assert torch.equal(loaded["a"], whole.chunk(2)[dist.get_rank()])


@scenario(2)
def objects_of_other_positions_follow_one_rule_per_kind(folder: Path) -> None:
    """Declared free and equal everywhere: it serves any. An extra state: the job keeps its own. Anything else is refused."""
    rank, where = dist.get_rank(), made(folder / "ck")

    def state(positions: int, at: int, own: bool = False) -> dict[str, Any]:
        def held(key: str, value: Any, kind: Any = ShardedObject) -> ShardedObject:
            return kind(key, "own" if own else value, (positions,), (at,))

        free = megatron_unickpt.PositionFree
        return {"equal": held("equal", {"kind": "all"}, free), "extra": held("layer._extra_state", f"of {rank}")}

    dist_checkpointing.save({"a": halves("a", torch.ones(4, 2)), **state(2, rank)}, where, strategy())
    loaded = dist_checkpointing.load({"a": halves("a", torch.zeros(4, 2)), **state(4, 2 + rank, own=True)}, where)
    assert (loaded["equal"], loaded["extra"]) == ({"kind": "all"}, "own")
    told = [entry for entry in RUNTIME.last_report.entries if entry.name.startswith("layer._extra_state")]
    assert [entry.outcome for entry in told] == ["re-seeded"]
    for key, told in (("missing", "it has none of that name"), ("equal", "objects are kept per position.*PositionFree")):
        other = {"a": halves("a", torch.zeros(4, 2)), "extra": ShardedObject(key, None, (1,), (0,), replica_id=rank)}
        with pytest.raises(CheckpointingException, match=told):
            dist_checkpointing.load(other, where)


@scenario(2)
def a_group_of_ranks_saves_and_loads_alone(folder: Path) -> None:
    """Rank 0 holds the whole model. Rank 1 has no part in it, and no message is sent to it."""
    job = Job(Layout(dp=2, optimizer="plain"), seed=1)
    job.train(1)
    groups = [dist.new_group([0]), dist.new_group([1])]
    if dist.get_rank() == 0:
        megatron_unickpt.save(folder / "ck", job.chunks, job.optimizer, iteration=1, group=groups[0])
    else:
        with pytest.raises(ConfigError, match="not a member"):
            megatron_unickpt.save(folder / "ck", job.chunks, job.optimizer, group=groups[0])
    truth = consolidated(job, folder / "truth")
    other = Job(Layout(dp=2, optimizer="plain"), seed=7)
    groups = [dist.new_group([0]), dist.new_group([1])]
    assert megatron_unickpt.load(folder / "ck", other.chunks, other.optimizer, group=groups[dist.get_rank()])["iteration"] == 1
    found = consolidated(other, folder / "found")
    assert dist.get_rank() or not differences(truth, found)


@scenario(2)
def a_rank_that_does_not_call_is_named_after_the_time_limit(folder: Path) -> None:
    """Without an effect on later saves of all ranks."""
    job = Job(Layout(dp=2), seed=1)
    job.train(1)
    both = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        for call in (megatron_unickpt.save, megatron_unickpt.load):
            with pytest.raises(Exception, match=r"no message from rank 1"):
                call(folder / "ck", job.chunks, job.optimizer, group=both, timeout_s=0.5)
        with pytest.raises(ConfigError, match="positive"):
            megatron_unickpt.save(folder / "ck", job.chunks, timeout_s=0.0)
        assert RUNTIME.exchange().timeout_s == 1800.0
    dist.barrier()
    megatron_unickpt.save(folder / "ck", job.chunks, job.optimizer, timeout_s=60)


@scenario(1, 2)
def values_that_cannot_be_pickled_end_no_save(folder: Path) -> None:
    """Megatron compares the common state of the ranks: rank 0 sends a pickle of it, for which the others wait."""
    job = Job(Layout(dp=dist.get_world_size()))
    extra = {"note": [1, {"f": lambda: 1}], "arguments": argparse.Namespace(rule=lambda: 1, width=3)}
    for asynchronous in (False, True):
        where = folder / f"{asynchronous}"
        pending = megatron_unickpt.save(where, job.chunks, job.optimizer, iteration=1, extra=extra, asynchronous=asynchronous)
        if pending is not None:
            pending.conclude()
        assert megatron_unickpt.load(where, job.chunks, job.optimizer)["extra"]["arguments"].width == 3


@scenario(1)
def another_bit_generator_of_numpy_is_reported(folder: Path) -> None:
    job = Job(Layout())
    iteration: Any = np.int64(3)
    before = np.random.mtrand.get_bit_generator()
    use = np.random.mtrand.set_bit_generator
    try:
        use(np.random.PCG64(3))
        megatron_unickpt.save(folder / "ck", job.chunks, job.optimizer, iteration=iteration)
        drawn = np.random.rand(3).tolist()
        megatron_unickpt.load(folder / "ck", job.chunks, job.optimizer)
        assert np.random.rand(3).tolist() == drawn
        report = RUNTIME.last_report
        assert report is not None
        assert all(entry.name != "rng" for entry in report.entries)
    finally:
        use(before)
    assert Checkpoint.open(folder / "ck").manifest.step == 3
    with unittest.TestCase().assertLogs("unickpt", "WARNING") as logs:
        megatron_unickpt.load(folder / "ck", job.chunks, job.optimizer)
    assert any("no NumPy PCG64 generator. Its own keeps its state" in line for line in logs.output)
    report = RUNTIME.last_report
    assert report is not None
    told = [(entry.outcome, entry.reason) for entry in report.entries if entry.name == "rng"]
    assert told == [("left out", "this process has no NumPy PCG64 generator")]


@scenario(1)
def an_iteration_that_no_load_accepts_is_refused_by_the_save(folder: Path) -> None:
    job = Job(Layout())
    for iteration in (2**62, 2**80):
        with pytest.raises(MegatronSaveError, match=rf"step {iteration}: expected an integer from 0 to 2\*\*62 - 1"):
            megatron_unickpt.save(folder / "refused", job.chunks, job.optimizer, iteration=iteration)
        assert not (folder / "refused").exists()
    megatron_unickpt.save(folder / "last", job.chunks, job.optimizer, iteration=2**62 - 1)
    assert megatron_unickpt.load(folder / "last", job.chunks, job.optimizer)["iteration"] == 2**62 - 1
