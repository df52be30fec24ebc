"""Jobs of 16 and 12 ranks load each other's checkpoints. ``python -m evidence.sixty_four.resumes`` does that with 64 and 48."""

from __future__ import annotations

from pathlib import Path

from tests.jobs import pairs
from tests.jobs.pairs import TORCH
from tests.jobs.torch.layouts import Layout


def test_sixteen_ranks_and_twelve_load_each_others_checkpoints(tmp_path: Path) -> None:
    """Under FSDP2 on 8 x 2 ranks, some of which have no row of a parameter."""
    both, plain = map(Layout.parse, ("fsdp8xtp2-fp32-adamw", "fsdp12-fp32-adamw"))
    loaded = [(both, plain)]
    sizes = {"UNICKPT_TEST_BATCH": "48"}
    pairs.run(TORCH, "--asynchronous", pairs=loaded, folder=tmp_path, ranks=16, env=sizes)
    assert pairs.problems(loaded, tmp_path) == {}
    assert pairs.strayed(loaded, tmp_path, pairs.between_dtypes) == {}
