"""Jobs one after the other on the ranks of one torchrun: each has what torchrun would give it, and none fails unseen.

test_turns DIR      under torchrun on two ranks: three jobs, of which the last fails on its second rank
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.turns import in_turn
from unickpt.testing.launch import torchrun


def write_turn(folder: Path, number: int, fails: bool = False) -> None:
    dist.init_process_group("gloo")
    ranks: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, dist.get_rank())
    dist.barrier()
    (folder / f"{number}-{dist.get_rank()}").write_text(f"{ranks} {sorted(path.name for path in folder.iterdir())}")
    if fails and dist.get_rank() == 1:
        raise RuntimeError("on purpose")


def test_jobs_come_in_turn_and_a_failure_is_the_end(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)RuntimeError: on purpose.*a job of 2 ranks ended with 1"):
        torchrun(2, "tests.unit.test_turns", str(tmp_path))
    first = ["0-0", "0-1"]
    assert (tmp_path / "1-0").read_text() == f"[0] {first}"
    assert (tmp_path / "2-0").read_text().startswith("[0, 1] ")
    assert not list(tmp_path.glob("3-*"))


if __name__ == "__main__":
    where = Path(sys.argv[1])
    first, second = (2, partial(write_turn, where, 0)), (1, partial(write_turn, where, 1))
    in_turn([first, second, (2, partial(write_turn, where, 2, fails=True)), (1, partial(write_turn, where, 3))])
