"""Residuals of compressed gradients in an edited checkpoint: those that a load on this number of ranks makes, or none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.handmade import WRITER
from unickpt.base.errors import FormatError, MismatchError
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.save.commit import commit
from unickpt.checkpoint.save.data_file import write_rank
from unickpt.checkpoint.save.shards import Contribution, prepare, shards_of_flat_range
from unickpt.checkpoint.storage.posix import PosixStorage
from unickpt.cli.main import main
from unickpt.training.compression.carried import COMMON, STORED, Common, Residuals, resized, slice_of
from unickpt.transform.edit.residuals import ResizeResiduals
from unickpt.transform.edit.select import NoOptimizer
from unickpt.transform.edit.table import table_of

SIZES = {"layer.weight": 35, "layer.bias": 5, "one": 1}
WORLD = 3


def residuals(rank: int, world: int = WORLD) -> Residuals:
    generator = torch.Generator().manual_seed(rank)
    found = Residuals(rank, world)
    for name, size in SIZES.items():
        lo, hi = slice_of(size, rank, world)
        found.sent[name] = torch.randn(size, generator=generator)
        found.returned[name] = torch.randn(hi - lo, generator=generator)
    return found


def saved(folder: Path, *, without: int | None = None) -> Checkpoint:
    """Save a parameter and the residuals of three ranks, or of all but one."""
    info = TensorInfo("layer.weight", "weight", "F32", (5, 7), "parameter")
    storage, records = PosixStorage(folder), []
    first = None
    for rank in range(WORLD):
        shared = {} if rank == without else {f"{STORED}{rank}": residuals(rank).to_object()}
        if rank == 0:
            shared[f"{STORED}{COMMON}"] = Common({"one": 3}, {}).to_object()
        shards = shards_of_flat_range(info, 0, 35, torch.arange(35.0)) if rank == 0 else []
        part = prepare(Contribution(shards=shards, tensors=[info], step=3, writer=WRITER, shared_objects=shared), rank)
        names = (f"data/rank{rank:05d}.safetensors", f"rows/rank{rank:05d}.safetensors")
        records.append(write_rank(storage, *names, part, rank))
        first = part if rank == 0 else first
    assert first is not None
    commit(storage, records, first, generation=0)
    return Checkpoint.open(folder)


def equal(one: Residuals, other: Residuals) -> bool:
    return (one.rank, one.world) == (other.rank, other.world) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in ((one.sent, other.sent), (one.returned, other.returned))
    )


@pytest.mark.parametrize("world", [1, 2, 5])
def test_residuals_for_other_ranks_are_those_of_a_load(world: int, tmp_path: Path) -> None:
    saved(tmp_path / "one")
    assert main(["edit", str(tmp_path / "one"), str(tmp_path / "two"), "--residuals", str(world)]) == 0
    made = Checkpoint.open(tmp_path / "two")
    for rank in range(world):
        expected = resized(map(residuals, range(WORLD)), rank, world)
        assert equal(Residuals.from_object(made.shared_object(f"{STORED}{rank}").value), expected)
    assert made.shared_names() == sorted(f"{STORED}{name}" for name in (*range(world), COMMON))
    assert Common.from_object(made.shared_object(f"{STORED}{COMMON}").value).counts == {"one": 3}


def test_the_same_number_of_ranks_keeps_its_own(tmp_path: Path) -> None:
    table = ResizeResiduals(WORLD).apply(table_of(saved(tmp_path)))
    assert table.entries == table_of(Checkpoint.open(tmp_path)).entries or "already" in table.done[0]


@pytest.mark.parametrize("step", [ResizeResiduals(0), NoOptimizer()], ids=["zero", "no-optimizer"])
def test_removed(step: ResizeResiduals | NoOptimizer, tmp_path: Path) -> None:
    table = step.apply(table_of(saved(tmp_path)))
    assert [name for name, _ in table.entries] == ["layer.weight"]
    assert "residuals of compressed gradients" in table.left_out[0]
    with pytest.raises(MismatchError, match="has no residuals"):
        ResizeResiduals(2).apply(table)


@pytest.mark.parametrize("without", [0, 1])
def test_missing_ranks_are_named(without: int, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=f"residuals of rank {without} are missing"):
        ResizeResiduals(2).apply(table_of(saved(tmp_path, without=without)))


def test_empty_tensors_of_objects_return(tmp_path: Path) -> None:
    """A slice of a small parameter may be empty. So may a tensor in the state of a client."""
    made = saved(tmp_path)
    assert equal(Residuals.from_object(made.shared_object(f"{STORED}1").value), residuals(1))
