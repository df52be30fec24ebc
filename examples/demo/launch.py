"""Starts ``train.py`` in a new process group, and collects its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TIME_LIMIT_S = 900.0
POLL_S = 0.1
LOG_TAIL_LINES = 40


@dataclass(frozen=True)
class Layout:
    """A ZeRO stage and a number of ranks."""

    stage: int
    ranks: int

    def __str__(self) -> str:
        return f"ZeRO-{self.stage} x{self.ranks}"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Parse a layout such as ``2x4``, stage 2 on 4 ranks. Raises ValueError."""
        stage, ranks = text.split("x")
        return cls(int(stage), int(ranks))


@dataclass(frozen=True)
class Job:
    """One process group.

    Attributes:
        name: name of its folder under ``out``.
        seed: seed of the initial model, before a load.
        until: global step at which it stops.
    """

    name: str
    layout: Layout
    seed: int
    until: int
    resume_from: Path | None = None
    save_to: Path | None = None


@dataclass(frozen=True)
class Outcome:
    """Results of a job.

    Attributes:
        losses: global step -> mean loss of the global batch.
        before_load, after_load, at_end: digests by state (``states.py``). The first two are empty if it did not load.
        seconds: duration of the job.
    """

    losses: dict[int, float]
    before_load: dict[str, str]
    after_load: dict[str, str]
    at_end: dict[str, str]
    seconds: float


class JobFailedError(Exception):
    """A process group failed or exceeded its time limit. The message ends with the last lines of its log."""


def run_job(job: Job, out: Path, on_step: Callable[[int], None]) -> Outcome:
    """Run a job to its end.

    Args:
        job: what to run.
        out: folder of all jobs. ``out/<job.name>`` gets the config, the log and the results.
        on_step: called from time to time with the number of steps that the job has done.

    Raises:
        JobFailedError: it failed.
    """
    folder = out / job.name
    folder.mkdir(parents=True)
    config = base_config()
    config["zero_optimization"]["stage"] = job.layout.stage
    (folder / "ds_config.json").write_text(json.dumps(config, indent=2))
    losses = folder / "losses.jsonl"
    begin = time.monotonic()
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(_command(job, folder), env=_environment(), stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait(process, lambda: on_step(_lines(losses)))
        finally:
            _stop(process)
    if process.returncode != 0:
        tail = (folder / "log.txt").read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        head = f"{job.name} failed with exit code {process.returncode}; {folder / 'log.txt'} ends with:"
        raise JobFailedError("\n".join([head, *tail]))
    on_step(_lines(losses))
    return _outcome(folder, time.monotonic() - begin)


def base_config() -> dict[str, Any]:
    """Return the DeepSpeed JSON of all jobs. That of one job differs only in the ZeRO stage."""
    config: dict[str, Any] = json.loads((HERE / "ds_config.json").read_text())
    return config


def _command(job: Job, folder: Path) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.layout.ranks}"]
    command += [str(HERE / "train.py"), f"--config={folder / 'ds_config.json'}", f"--out={folder}"]
    command += [f"--seed={job.seed}", f"--until={job.until}"]
    command += [f"--resume-from={job.resume_from}"] if job.resume_from else []
    command += [f"--save-to={job.save_to}"] if job.save_to else []
    return command


def _environment() -> dict[str, str]:
    """Return the environment: CPU, and one thread per rank, so that sums do not depend on the number of cores."""
    return {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def _wait(process: subprocess.Popen[bytes], on_poll: Callable[[], None]) -> None:
    """Wait until the process has ended or the time limit has passed."""
    deadline = time.monotonic() + TIME_LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        on_poll()
        time.sleep(POLL_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End torchrun if it still runs. After SIGTERM it ends its workers."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _outcome(folder: Path, seconds: float) -> Outcome:
    seen = json.loads((folder / "seen.json").read_text())
    records = [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]
    return Outcome(
        losses={record["step"]: record["loss"] for record in records},
        before_load=seen.get("before_load", {}),
        after_load=seen.get("after_load", {}),
        at_end=seen["at_end"],
        seconds=seconds,
    )
