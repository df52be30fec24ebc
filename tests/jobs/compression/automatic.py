"""Run a job that chooses its own compression, and return what each rank saw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.repository import REPO

LIMIT_S = 300.0


def run(folder: Path, task: dict[str, Any], commands: list[list[str]], environment: dict[str, str]) -> list[dict[str, Any]]:
    """Run the job and return what each rank saw. ``commands``: what comes before the command of each rank."""
    given = folder / "task.json"
    given.write_text(json.dumps({**task, "folder": str(folder)}))
    started = []
    for rank, before in enumerate(commands):
        env = {
            **os.environ, **environment, "RANK": str(rank), "WORLD_SIZE": str(len(commands)), "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
        }  # fmt: skip
        command = [*before, sys.executable, "-m", "tests.jobs.compression.automatic_job", str(given)]
        started.append(subprocess.Popen(command, cwd=REPO, env=env))
    try:
        codes = [process.wait(LIMIT_S) for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(codes), codes
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(len(commands))]
