"""The example of a job that goes on with another number of ranks."""

from __future__ import annotations

import re
from pathlib import Path

import unickpt
from tests.support.forked_jobs import fork_ranks
from tests.support.repository import REPO

BATCH = 12  # of the first start: 2 samples, accumulated 3 times, on 2 ranks


def test_the_example_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    seen: dict[int, list[int]] = {}
    for ranks, steps in ((2, 3), (3, 8)):
        output = fork_ranks(ranks, "examples.deepspeed_resume", str(tmp_path), str(steps), framework="deepspeed").stdout
        for step, samples in re.findall(r"step (\d+) samples \[([\d, ]+)\]", output):
            seen.setdefault(int(step), []).extend(map(int, samples.split(", ")))
    order = unickpt.GlobalOrderSampler(64, rank=0, ranks=1, per_device=1)
    stream = [*order.order(0).tolist(), *order.order(1).tolist()]
    assert {step: sorted(samples) for step, samples in seen.items()} == {
        step: sorted(stream[step * BATCH : (step + 1) * BATCH]) for step in range(8)
    }


def test_the_guide_shows_the_example() -> None:
    assert '--8<-- "examples/deepspeed_resume.py"' in (REPO / "docs/guides/deepspeed.md").read_text()
