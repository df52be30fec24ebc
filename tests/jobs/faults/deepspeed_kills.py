"""kill -9 of all ranks of a real DeepSpeed job while it trains and saves; the next one has another ZeRO stage."""

from __future__ import annotations

import json
import random
import subprocess
import time
from pathlib import Path

from tests.jobs.faults.state import Resumed
from tests.jobs.faults.tally import Tally
from tests.support.repository import REPO
from unickpt.testing.launch import end, start

WORLD = 2
STAGES = (1, 3, 0, 2)
PATIENCE_S = 600.0  # imports and a first step on a busy machine


def at_random(folder: Path, count: int, seed: int) -> list[Tally]:
    """So many kills; each job resumes from what the one before has left, and compares all of it."""
    tally = Tally(
        "kill -9 of all ranks of a DeepSpeed job",
        f"`torchrun` with {WORLD} ranks, `engine.save_checkpoint` at every step, ZeRO 1, 3, 0, 2 in turn; at each resume "
        "weights, masters, moments, steps and hyperparameters are compared with those recorded at that step",
    )
    chance = random.Random(seed)
    known = begun = None
    for number in range(count + 1):
        last = number == count
        (folder / "word").unlink(missing_ok=True)
        (folder / "begun").unlink(missing_ok=True)
        job = _start(folder, STAGES[number % len(STAGES)], check=last)
        try:
            if not last:
                _until((folder / "begun").exists, job)
                first = int((folder / "begun").read_text())
                since = time.monotonic()
                _until(lambda: int((folder / "begun").read_text() or first) >= first + 2, job)  # noqa: B023
                time.sleep(chance.uniform(0.0, time.monotonic() - since))
            else:
                job.wait(PATIENCE_S)
        finally:
            end(job)
        if number:
            found = json.loads((folder / "word").read_text()) if (folder / "word").exists() else {"step": None, "wrong": []}
            resumed = Resumed(found.get("path"), found["step"], (), tuple(found["wrong"]))
            tally.judge(resumed, at_least=known, newest=begun, where=f"job {number}")
        if not last:
            known = int((folder / "saves" / "latest").read_text().removeprefix("global_step"))
            begun = int((folder / "begun").read_text())
    return [tally]


def _start(folder: Path, stage: int, *, check: bool) -> subprocess.Popen[str]:
    arguments = [str(folder), str(stage), *(["check"] if check else [])]
    with (folder / "log").open("a") as log:
        return start(WORLD, "-m", "tests.jobs.faults.deepspeed_worker", *arguments, output=log, folder=REPO)


def _until(condition, job: subprocess.Popen[str]) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert job.poll() is None, "the job ended by itself: look at its log"
        assert time.monotonic() < deadline, "the job does not come to save"
        time.sleep(0.01)
