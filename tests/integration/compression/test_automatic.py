"""A DeepSpeed job that chooses its own compression: all ranks alike, from the checkpoint after a restart, and all or none."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.jobs.compression.automatic import run

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("fails", [False, True], ids=["whole", "one-rank-without-store"])
def test_the_ranks_choose_alike_and_resume_with_the_choice(fails: bool, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    ranks = run(tmp_path, {"width": 64, "fails": fails}, [[], []], address)
    assert ranks[0]["scheme"] == ranks[1]["scheme"] == ranks[0]["resumed_scheme"] == ranks[1]["resumed_scheme"]
    assert all(each["equal"] and each["resumed"] for each in ranks)
    assert ranks[0]["choice"] == ranks[1]["choice"]
    assert ranks[0]["choice"] == "None" if fails else ranks[0]["choice"].startswith("compression: ")
