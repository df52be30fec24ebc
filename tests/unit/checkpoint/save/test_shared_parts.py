"""What several ranks bring to one checkpoint besides tensors: named objects, parts of the optimizer; and taking tensors out."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.saving import save
from unickpt.base.errors import CoverageError
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import OptimizerRecord, ParameterGroup, Writer
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.verify import verify_checkpoint
from unickpt.checkpoint.save.shards import Contribution, shards_of_flat_range
from unickpt.transform.edit.remove_tensors import remove_tensors

WORLD = 3
WRITER = Writer("test", "1", "0", torch.__version__, "none", {"world_size": WORLD})


def record(lr: float, *names: str, step: float = 1.0) -> OptimizerRecord:
    return OptimizerRecord("Adam", (ParameterGroup({"lr": lr}, names),), (ParameterGroup({"step": step}, names),))


def contribution(rank: int) -> Contribution:
    """Rank r holds stage r: a master, and a weight derived from it."""
    master = TensorInfo(f"stage{rank}", "master", "F32", (4,), "parameter")
    weight = TensorInfo(f"stage{rank}", "weight", "BF16", (4,), "parameter", "master")
    return Contribution(
        shards_of_flat_range(master, 0, 4, torch.full((4,), float(rank))), 5, WRITER, tensors=[master, weight],
        shared_objects={f"rng/shard_{rank}": {"of": rank, "words": torch.arange(rank + 1)}, f"plain/{rank}": rank},
        optimizer=record(0.1, "stage0", "both") if rank == 0 else None,
        optimizer_part=record(0.1 if rank == 1 else 0.2, f"stage{rank}", "both"),
        aliases={f"tied{rank}": "stage0"},
        excluded=("frozen", f"frozen{rank}"),
    )  # fmt: skip


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    store, out = dist.HashStore(), [None] * WORLD

    def run(rank: int) -> None:
        exchange = MessageExchange(store, rank=rank, world=WORLD, prefix="t", timeout_s=30)
        made: Any = save(lambda _: contribution(rank), save_dir=str(tmp_path), tag="ck", save_latest=False, exchange=exchange)
        out[rank] = made.committed

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert out == [True] * WORLD
    return tmp_path / "ck"


def test_objects_of_all_ranks_are_found_by_name(saved: Path) -> None:
    checkpoint = Checkpoint.open(saved)
    assert checkpoint.shared_names() == ["plain/0", "plain/1", "plain/2", "rng/shard_0", "rng/shard_1", "rng/shard_2"]
    found = checkpoint.shared_object("rng/shard_2").value
    assert found["of"] == 2
    assert torch.equal(found["words"], torch.arange(3))
    assert checkpoint.shared_object("plain/1").value == 1
    with pytest.raises(KeyError):
        checkpoint.shared_object("rng/shard_3")


def test_the_optimizer_record_merges_those_of_all_ranks(saved: Path) -> None:
    found = Checkpoint.open(saved).manifest.optimizer
    assert found is not None
    groups = {g.hyperparameters["lr"]: g.parameters for g in found.groups}
    assert groups == {0.1: ("stage0", "both", "stage1"), 0.2: ("stage2",)}
    assert [s.parameters for s in found.scalars] == [("stage0", "both", "stage1", "stage2")]


def test_names_of_tied_and_excluded_parameters_are_those_of_all_ranks(saved: Path) -> None:
    manifest = Checkpoint.open(saved).manifest
    assert manifest.aliases == {"tied0": "stage0", "tied1": "stage0", "tied2": "stage0"}
    assert manifest.excluded == ("frozen", "frozen0", "frozen1", "frozen2")


def test_tensors_are_removed_atomically_and_the_rest_stays(saved: Path) -> None:
    assert remove_tensors(saved, lambda name, _: name == "stage1") == ["stage1 (master)", "stage1 (weight)"]
    checkpoint = Checkpoint.open(saved)
    assert checkpoint.info("stage1", "master") is None
    assert torch.equal(checkpoint.read_tensor("stage2", "weight"), torch.full((4,), 2.0, dtype=torch.bfloat16))
    assert checkpoint.shared_object("rng/shard_1").value["of"] == 1
    assert not verify_checkpoint(saved).problems
    assert remove_tensors(saved, lambda name, _: name == "stage1") == []


def test_the_source_of_a_derived_tensor_stays(saved: Path) -> None:
    before = (saved / "manifest.json").read_bytes()
    with pytest.raises(CoverageError, match="derived from its master"):
        remove_tensors(saved, lambda _, state: state == "master")
    assert (saved / "manifest.json").read_bytes() == before
