"""Trainer in a job that torchrun starts again on other numbers of ranks: the same samples, learning rates and steps.

No argument changes between the starts. ``UNICKPT_ROUND`` is what ``torchrun --rdzv-backend unickpt`` sets. With
``UNICKPT_FULL_MATRIX=1`` torchrun itself starts the job, and a host is killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from subprocess import CompletedProcess

import psutil
import pytest

from tests.jobs.hf.jobs import ENVIRONMENT, assert_log_continues, log_of, losses, run, shipped
from tests.support.extent import in_full
from tests.support.repository import REPO
from unickpt.testing.launch import end, environment, free_port

pytestmark = [pytest.mark.hf, pytest.mark.timeout(600)]

STEPS, TOTAL = 10, 12  # two epochs of five steps
ROUNDS = ((4, 3), (2, 6), (3, 0))  # ranks, and the step after which they stop


def arguments(folder: Path, *, accumulation: int = 3, per_device: int = 1) -> tuple[str, ...]:
    """Return the arguments of the script: always the same, for four ranks that accumulate three times."""
    return (
        "--use_cpu", "--num_train_epochs", "2", "--save_steps", "3", "--logging_steps", "1", "--learning_rate", "5e-3",
        "--warmup_steps", "2", "--report_to", "none", "--disable_tqdm", "True", "--samples", str(folder / "samples"),
        "--per_device_train_batch_size", str(per_device), "--gradient_accumulation_steps", str(accumulation),
    )  # fmt: skip


def start(folder: Path, world: int, *more: str, check: bool = True, **changed: int) -> CompletedProcess[str]:
    """Start the job on this number of ranks."""
    given = (*arguments(folder, **changed), *more)
    return run("train_samples", world, folder, shipped("hf_zero2_auto"), *given, record=False, check=check)


def samples(folder: Path) -> dict[int, Counter[int]]:
    """Return the samples of each step. A step that was done again after a restart counts in the last round that did it."""
    found: dict[int, tuple[str, Counter[int]]] = {}
    for path in sorted((folder / "samples").iterdir()):
        round_ = path.name.partition("-")[0]
        for line in path.read_text().splitlines():
            step, sample = map(int, line.split())
            if found.get(step, ("", None))[0] != round_:
                found[step] = round_, Counter()
            found[step][1][sample] += 1
    return {step: counter for step, (_, counter) in found.items()}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank, which accumulates twelve times."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    start(folder, 1, accumulation=TOTAL)
    return folder


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Four ranks, then two, then three. Returns the folder and what each round has logged."""
    folder, logs = tmp_path_factory.mktemp("restarted"), []
    with pytest.MonkeyPatch.context() as patch:
        for number, (world, stop_at) in enumerate(ROUNDS, 1):
            patch.setenv("UNICKPT_ROUND", f"1.{number}")
            logs.append(start(folder, world, "--stop_at", str(stop_at)).stdout)
    return folder, logs


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of two ranks, without interruption: the same gradients in another order."""
    folder = tmp_path_factory.mktemp("elsewhere")
    start(folder, 2, accumulation=6)
    return losses(log_of(folder / f"checkpoint-{STEPS}"))


def test_every_step_has_the_samples_of_an_uninterrupted_run(uninterrupted: Path, restarted: tuple[Path, list[str]]) -> None:
    expected = samples(uninterrupted)
    assert [step.total() for step in expected.values()] == STEPS * [TOTAL]
    assert set(sum(expected.values(), Counter()).values()) == {2}, "two epochs have every sample twice"
    assert samples(restarted[0]) == expected


def test_learning_rates_steps_and_losses_are_those_of_an_uninterrupted_run(
    uninterrupted: Path, restarted: tuple[Path, list[str]], elsewhere: dict[int, float]
) -> None:
    expected, found = log_of(uninterrupted / f"checkpoint-{STEPS}"), log_of(restarted[0] / f"checkpoint-{STEPS}")
    assert losses(found, "learning_rate") == losses(expected, "learning_rate")
    assert losses(found, "epoch") == pytest.approx(losses(expected, "epoch"))
    assert_log_continues(losses(found), losses(expected), elsewhere)


def test_every_restart_logs_what_changed(restarted: tuple[Path, list[str]]) -> None:
    folder, logs = restarted
    assert "resumed at" not in logs[0]
    for log, step, change in (
        (logs[1], 3, "world 4 -> 2, global batch 12, micro batch 1, accumulation 3 -> 6"),
        (logs[2], 6, "world 2 -> 3, global batch 12, micro batch 1, accumulation 6 -> 4"),
    ):
        assert f"no checkpoint is named: resuming from {folder / f'checkpoint-{step}'}, the newest one" in log
        assert log.count(f"resumed at step {step} after {step * TOTAL} samples: {change}") == 1
        assert "the global batch changes" not in log


def test_a_batch_that_cannot_be_kept_is_an_error(restarted: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNICKPT_ROUND", "1.4")
    process = start(restarted[0], 1, per_device=5, check=False)
    assert process.returncode != 0
    assert "cannot be kept on 1 data-parallel ranks with micro batches of 5: 12 is no multiple of 5." in process.stdout


@in_full
def test_a_job_whose_host_dies_has_the_samples_of_an_uninterrupted_run(
    uninterrupted: Path, elsewhere: dict[int, float], tmp_path: Path
) -> None:
    """Unmodified torchrun, two hosts with two ranks each. One host is killed in the middle of an epoch."""
    config, port, hosts = tmp_path / "deepspeed.json", free_port(), {}
    config.write_text(json.dumps(shipped("hf_zero2_auto")))
    for name in ("a", "b"):
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "5",
            "--rdzv-backend", "unickpt", "--rdzv-id", "job", "--rdzv-endpoint", f"localhost:{port}",
            "--rdzv-conf", f"host={name},join_seconds=20", "-m", "tests.jobs.hf.ordinary", "train_samples",
            "--deepspeed", str(config), "--output_dir", str(tmp_path), *arguments(tmp_path), "--step_seconds", "2",
        ]  # fmt: skip
        with (tmp_path / f"{name}.log").open("w") as file:
            hosts[name] = subprocess.Popen(
                command, cwd=REPO, env=environment(REPO, **ENVIRONMENT), stdout=file, stderr=subprocess.STDOUT, text=True,
                start_new_session=True,
            )  # fmt: skip
    try:
        deadline = time.monotonic() + 240
        while not (tmp_path / "checkpoint-3" / "trainer_state.json").exists():
            assert time.monotonic() < deadline, (tmp_path / "a.log").read_text()[-4000:]
            time.sleep(0.2)
        time.sleep(2)
        for process in [*psutil.Process(hosts["b"].pid).children(recursive=True), psutil.Process(hosts["b"].pid)]:
            process.kill()
        assert hosts["a"].wait(240) == 0, (tmp_path / "a.log").read_text()[-4000:]
    finally:
        for process in hosts.values():
            end(process)
    assert samples(tmp_path) == samples(uninterrupted)
    found, expected = (losses(log_of(folder / f"checkpoint-{STEPS}")) for folder in (tmp_path, uninterrupted))
    assert_log_continues(found, expected, elsewhere)
    assert "resumed at step 3 after 36 samples: world 4 -> 2, global batch 12" in (tmp_path / "a.log").read_text()
