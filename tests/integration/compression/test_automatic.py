"""A DeepSpeed job that chooses its own compression: all ranks alike, from the checkpoint after a restart, and all or none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.forked_jobs import fork_ranks

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("fails", [False, True], ids=["whole", "one-rank-without-store"])
def test_the_ranks_choose_alike_and_resume_with_the_choice(fails: bool, tmp_path: Path) -> None:
    task = tmp_path / "task.json"
    task.write_text(json.dumps({"width": 64, "fails": fails, "folder": str(tmp_path)}))
    fork_ranks(2, "tests.jobs.compression.automatic_job", str(task), timeout_s=300)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0]["scheme"] == ranks[1]["scheme"] == ranks[0]["resumed_scheme"] == ranks[1]["resumed_scheme"]
    assert all(each["equal"] and each["resumed"] for each in ranks)
    assert ranks[0]["choice"] == ranks[1]["choice"]
    assert ranks[0]["choice"] == "None" if fails else ranks[0]["choice"].startswith("compression: ")
