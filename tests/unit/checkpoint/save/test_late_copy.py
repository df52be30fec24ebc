"""Copies behind training: what is committed is the state at the call, and a step waits for the copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import late_copies
from unickpt.checkpoint.save.staging_pool import StagingPool


@pytest.mark.parametrize("seed", range(3))
def test_no_committed_checkpoint_differs_from_the_state_at_the_call(tmp_path: Path, seed: int) -> None:
    found = late_copies.run(tmp_path, 60, seed)
    assert found.wrong == []
    assert found.committed > 20
    assert found.reused > 20
    assert found.refused


def test_a_state_that_grows_by_some_bytes_uses_the_same_buffer() -> None:
    """A counter with one digit more makes the objects of a save longer."""
    pool = StagingPool()
    first = pool.acquire(10_000)
    pool.release(first)
    assert pool.acquire(10_050) is first
