"""Saves and loads in the records of a timed job: seconds and bytes by rank and phase, the slowest rank named."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.forked_jobs import fork_ranks
from unickpt.cli.main import main
from unickpt.diagnosis.recording.ring_folder import read_folder
from unickpt.diagnosis.reports.checkpoint_io import checkpoint_io
from unickpt.diagnosis.reports.job_records import gather_records


def test_the_rank_that_writes_slowly_is_named(tmp_path: Path) -> None:
    """Two ranks: a save at step 2, a load, and a save at step 4 behind training. Rank 1 may write 0.2 MB/s."""
    rings, folder = tmp_path / "rings", tmp_path / "checkpoints"
    env = {"GLOO_SOCKET_IFNAME": "lo"}
    fork_ranks(2, "tests.jobs.diagnosis.checkpoint_io_worker", str(rings), str(folder), env=env, framework="deepspeed")
    found = checkpoint_io(gather_records([read_folder(rings)]))
    assert (found.ranks.tolist(), found.steps.tolist()) == ([0, 1], [2, 4])
    files = [
        [(folder / f"global_step{step}/data/rank{rank:05d}.safetensors").stat().st_size for step in (2, 4)] for rank in (0, 1)
    ]
    assert np.array_equal(found.sizes["save_write"], files)
    written = next(each for each in found.summaries if each.phase == "save_write")
    assert (written.slowest, written.background, written.ranks) == (1, True, 2)
    assert written.slowest_ns > 0.5 * files[1][0] / 0.2e6 * 1e9 > 2 * written.median_ns - written.slowest_ns
    waits = found.times["save_commit"]
    assert (waits[0] > waits[1]).all(), "rank 0 waits for rank 1"
    assert set(found.times) == {"save_stage", "save_write", "save_commit", "load_read", "load_gather", "load_set"}
    assert np.isnan(found.times["load_read"][:, 1]).all(), "the checkpoint of step 2 was loaded, and no other one"
    assert main(["report", str(rings), "-o", str(tmp_path / "report.html")]) == 0
    assert '"phase":"save_write","ranks":2,' in (tmp_path / "report.html").read_text()
