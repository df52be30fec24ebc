"""DTensors and shards with copies: saved by four ranks, loaded by one, two and four."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import unickpt
from tests.jobs.api import sharded
from tests.support.forked_jobs import fork_ranks

JOB = "tests.jobs.api.sharded"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    fork_ranks(4, JOB, "save", str(folder))
    return folder


def test_one_process_loads_what_four_ranks_have_saved(saved: Path) -> None:
    whole = sharded.truth()
    found = {key: torch.zeros_like(value) for key, value in whole.items()}
    unickpt.load_checkpoint(saved, found, strict=True)
    assert all(torch.equal(found[key], value) for key, value in whole.items())


def test_two_ranks_load_into_other_divisions(saved: Path) -> None:
    fork_ranks(2, JOB, "load", str(saved))


def test_copies_are_stored_once_and_in_equal_parts(saved: Path) -> None:
    """Ranks 0 and 2 have 160 bytes of copies, ranks 1 and 3 have 136."""
    index = unickpt.Checkpoint.open(saved / "step1").index
    stored, copies = 0, [0] * 4
    for tensor, file, size in zip(index.tensor.tolist(), index.file.tolist(), index.size_bytes().tolist(), strict=True):
        info = index.tensors[tensor]
        stored += 0 if info.kind == "object" else size
        copies[file] += size if info.name in ("by_hand", "rows") else 0
    assert stored == sum(value.numel() * value.element_size() for value in sharded.truth().values())
    assert copies == [80, 68, 80, 68]


def test_rows_that_fsdp_over_tensor_parallelism_cannot_divide(tmp_path: Path) -> None:
    fork_ranks(6, JOB, "uneven", str(tmp_path))
    whole = dict(sharded.rows_that_do_not_divide().named_parameters())
    found = {key: torch.zeros_like(value) for key, value in whole.items()}
    unickpt.load_checkpoint(tmp_path, found, strict=True)
    assert all(torch.equal(found[key], value) for key, value in whole.items())


def test_what_cannot_be_described_is_refused(tmp_path: Path) -> None:
    fork_ranks(2, JOB, "refuse", str(tmp_path))
    assert unickpt.latest_checkpoint(tmp_path) is None
