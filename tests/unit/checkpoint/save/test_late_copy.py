"""Copies behind training: what is committed is the state at the call, and a step waits for the copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import late_copies


@pytest.mark.parametrize("seed", range(3))
def test_no_committed_checkpoint_differs_from_the_state_at_the_call(tmp_path: Path, seed: int) -> None:
    found = late_copies.run(tmp_path, 60, seed)
    assert found.wrong == []
    assert found.committed > 20
    assert found.refused
