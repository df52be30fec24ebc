"""Scenarios of ``torch.distributed.checkpoint``: which saves torch makes itself under the switch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.storage import StorageReader
from torch.testing._internal.distributed.checkpoint_utils import Rot13Example

import torch_unickpt
import unickpt
from tests.jobs.torch.registry import logged, scenario
from tests.support.switch import switched


class Odd:
    """A value that can only be pickled."""

    def __init__(self, number: int) -> None:
        self.number = number


class Finishing(DefaultSavePlanner):
    """Plans through DCP's messages."""

    def finish_plan(self, new_plan: Any) -> Any:
        return super().finish_plan(new_plan)


class Pickling(DefaultSavePlanner):
    """Makes pickles of values by itself."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return super().transform_object(write_item, object)


def _ours(place: Path) -> bool:
    dist.barrier()
    return (place / "manifest.json").exists()


@scenario(2)
def sharded_tensors_are_saved_and_loaded_in_other_shards(folder: Path) -> None:
    """As sharded state dicts of FSDP1 have them."""

    def sharded(axis: int) -> Any:
        spec = ChunkShardingSpec(dim=axis, placements=["rank:0/cpu", "rank:1/cpu"])  # type: ignore[arg-type]
        found = sharded_tensor.zeros(spec, 5, 4)
        for shard in found.local_shards():
            rows, columns = shard.metadata.shard_sizes
            first, left = shard.metadata.shard_offsets
            shard.tensor.copy_((torch.arange(20.0).view(5, 4) + 1)[first : first + rows, left : left + columns])
        return found

    with switched():
        dcp.save({"model": {"w": sharded(0)}}, checkpoint_id=folder / "step-1")
    assert _ours(folder / "step-1")
    expected, found = sharded(1).local_shards()[0].tensor, sharded(1)
    found.local_shards()[0].tensor.zero_()
    whole = torch.zeros(5, 4)
    dcp.load({"model": {"w": found}}, checkpoint_id=folder / "step-1")
    dcp.load({"model": {"w": whole}}, checkpoint_id=folder / "step-1")
    assert torch.equal(found.local_shards()[0].tensor, expected)
    assert torch.equal(whole, torch.arange(20.0).view(5, 4) + 1)


@scenario(2)
def what_a_caller_asks_of_the_files_of_torch_is_done(folder: Path) -> None:
    with switched():
        for write in (dcp.save, dcp.async_save):
            place = folder / f"extended-{write.__name__}"
            done = write(
                {"a": torch.ones(3)}, storage_writer=FileSystemWriter(place, _extensions=[Rot13Example()]), checkpoint_id=place
            )
            if write is dcp.async_save:
                done.result()
            assert not _ours(place), "an extension may encrypt"
        place = folder / "once"
        for value in (1.0, 2.0):
            writer = FileSystemWriter(place, overwrite=False)
            if value == 1.0:
                dcp.save({"a": torch.full((3,), value)}, storage_writer=writer)
                assert _ours(place)
                continue
            with pytest.raises(CheckpointException, match="already exists"):
                dcp.save({"a": torch.full((3,), value)}, storage_writer=writer)
    state = {"a": torch.zeros(3)}
    dcp.load(state, checkpoint_id=place)
    assert state["a"].tolist() == [1, 1, 1]


@scenario(2)
def tensors_without_elements_are_loaded_without_a_warning(folder: Path) -> None:
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])  # type: ignore[arg-type]

    def made() -> dict[str, Any]:
        return {"w": torch.ones(2), "none": torch.empty(0, 3), "sharded": sharded_tensor.zeros(spec, 4, 0)}

    with switched():
        dcp.save({"model": made()}, checkpoint_id=folder / "step-1")
    with logged() as lines:
        dcp.load({"model": made()}, checkpoint_id=folder / "step-1")
    assert [line for line in lines if "no rank requested" in line] == []


def handing(reader: Any) -> StorageReader:
    """Return a reader of a program's own class, which hands its calls to a reader of torch."""

    def call(name: str) -> Any:
        return lambda _, *args, **kwargs: getattr(reader, name)(*args, **kwargs)

    own: StorageReader = type("Handing", (StorageReader,), {name: call(name) for name in StorageReader.__abstractmethods__})()
    return own


class Derived(FileSystemReader):
    """Is a reader of torch."""


@scenario(2)
def readers_of_their_own_class_that_use_those_of_torch_find_a_checkpoint(folder: Path) -> None:
    place = folder / "step-1"
    with switched():
        dcp.save({"model": {"w": torch.arange(6.0)}, "epoch": 3}, checkpoint_id=place)
    readers = [handing(FileSystemReader(place)), handing(HuggingFaceStorageReader(str(place))), Derived(place)]
    for reader in readers:
        state = {"model": {"w": torch.zeros(6)}, "epoch": 0}
        dcp.load(state, storage_reader=reader)
        assert torch.equal(state["model"]["w"], torch.arange(6.0)), reader
        assert state["epoch"] == 3


@scenario(2)
def tensors_and_values_of_every_rank_keep_their_path(folder: Path) -> None:
    rank = dist.get_rank()
    deep = [torch.full((2,), float(rank)), {"a.b": torch.ones(1), "n": rank}]
    own = {f"of {rank}": {"deep": deep}, "model": {"w": torch.ones(2)}}
    for value in ("1", "off"):
        with switched(value):
            dcp.save(own, checkpoint_id=folder / value)
    dist.barrier()
    ours, stock = (_load_state_dict_from_keys(checkpoint_id=folder / value) for value in ("1", "off"))
    assert repr(dict(sorted(ours.items()))) == repr(dict(sorted(stock.items())))


@scenario(2)
def values_that_need_pickle_are_saved_by_torch(folder: Path) -> None:
    own = {f"dp_rank_{dist.get_rank()}": Odd(dist.get_rank()) if dist.get_rank() else 5}
    for at, planner in enumerate((None, Finishing())):
        place = folder / f"step-{at}"
        with switched(), logged() as lines:
            dcp.save({"a": torch.ones(3), **own}, checkpoint_id=place, planner=planner)
        assert not _ours(place)
        assert dist.get_rank() or any("dp_rank_1: " in line and "Odd" in line for line in lines)
        state: dict[str, Any] = {"a": torch.zeros(3), "dp_rank_1": None}
        dcp.load(state, checkpoint_id=place)
        assert (state["dp_rank_1"].number, state["a"].tolist()) == (1, [1, 1, 1])
    with switched():
        dcp.save({"a": torch.ones(3), "epoch": 3}, checkpoint_id=folder / "pickled", planner=Pickling())
    assert not _ours(folder / "pickled"), "a load without a reader of its own would refuse it"
    with switched():
        dcp.async_save({"a": torch.ones(3), **own}, checkpoint_id=folder / "later").result()
    assert not _ours(folder / "later")


@scenario(2)
def values_that_need_pickle_are_refused_by_an_explicit_writer_unless_it_is_allowed(folder: Path) -> None:
    place, state = folder / "step-1", {"a": torch.ones(3), "odd": Odd(3)}
    with pytest.raises(unickpt.SaveFailedError, match=r"odd: .*Odd"):
        dcp.save(state, storage_writer=torch_unickpt.UnickptWriter(place))
    dcp.save(state, storage_writer=torch_unickpt.UnickptWriter(place, allow_pickle=True))
    found: dict[str, Any] = {"a": torch.zeros(3), "odd": None}
    with pytest.raises(CheckpointException, match=r"odd.*allow_pickle"):
        dcp.load(found, checkpoint_id=place)
    dcp.load(found, storage_reader=torch_unickpt.UnickptReader(place, allow_pickle=True))
    assert (found["odd"].number, found["a"].tolist()) == (3, [1, 1, 1])
