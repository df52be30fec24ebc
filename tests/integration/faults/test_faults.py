"""A handful of every fault that ``python -m evidence.faults`` counts: no wrong resume, no training that dies, nothing lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.faults.tally import together
from tests.support.repository import REPO
from unickpt.testing.launch import environment

RUN = [sys.executable, "-m", "tests.jobs.faults.run"]
COUNTS = {
    "kill": 2, "kill-calls": 8, "errors": 20, "gone": 5, "short-writes": 4, "full": 2, "stall": 5, "sigterm": 3, "two-jobs": 1,
    "memory": 2, "memory-stages": 1, "memory-flight": 1, "memory-keepers": 1, "memory-names": 1, "memory-full": 1, "bits": 12,
    "truncation": 12, "zeros": 6,
}  # fmt: skip


# Ranks that outlive others wait for their time limits, so these run side by side. A process more costs more than the others.
TOGETHER = (
    ("memory-flight", "memory-keepers"), ("memory-full", "memory", "memory-stages", "memory-names"),
    tuple(name for name in COUNTS if not name.startswith("memory")),
)  # fmt: skip


@pytest.fixture(scope="module")
def tallies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What the script counted, by its commands."""
    folder, found = tmp_path_factory.mktemp("faults"), dict[str, list[dict[str, Any]]]()
    memory = {"TMPDIR": "/dev/shm"} if os.access("/dev/shm", os.W_OK) else {}  # what is tested is not the disk's fsync
    counts = [f"--count={name}={count}" for name, count in COUNTS.items()]
    commands = {folder / str(at): [*RUN, *names, *counts, "--seed=7"] for at, names in enumerate(TOGETHER)}
    for out, (_, said) in ended({out: [*command, f"--json={out}"] for out, command in commands.items()}, **memory).items():
        assert out.exists(), said[-4000:]
        found |= json.loads(out.read_text())
    return found


def ended(commands: dict[Path, list[str]], **env: str) -> dict[Path, tuple[int, str]]:
    """Run commands side by side. Return the status of each, and its errors."""
    jobs = {
        out: subprocess.Popen(
            command, cwd=REPO, env=environment(**env), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for out, command in commands.items()
    }
    said = {out: job.communicate(timeout=600)[1] for out, job in jobs.items()}
    return {out: (job.returncode, said[out]) for out, job in jobs.items()}


@pytest.mark.parametrize("name", COUNTS)
def test_a_fault(tallies: dict[str, list[dict[str, Any]]], name: str) -> None:
    for tally in tallies[name]:
        assert tally["wrong"] == []
        assert tally["deaths"] == []
        assert tally["lost"] == []
        assert tally["count"] or "not done" in tally["notes"][0]


def test_a_launcher_that_is_killed_alone_leaves_one_copy(tmp_path: Path) -> None:
    """Both at once: most of the time is spent in imports."""
    names = ("kill-agent", "kill-launcher")
    commands = {tmp_path / name: [*RUN, name, "--count=1", "--seed=7", f"--json={tmp_path / name}"] for name in names}
    for out, (status, said) in ended(commands).items():
        assert (status, said) == (0, ""), said
        (tally,) = json.loads(out.read_text())[out.name]
        assert tally["count"] == 1


def test_counts_of_several_runs_are_added() -> None:
    notes = ["stage: committed, no copy yet 4, half 3", "other", "stage: half 1, committed, no copy yet 2", "a: b"]
    assert together(notes) == ["stage: committed, no copy yet 6, half 4", "other", "a: b"]
