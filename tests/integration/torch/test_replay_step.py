"""``unickpt replay-step``: jobs that compute a step again, with and without a fault, and leave their folder as it is."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.extent import some
from tests.support.forked_jobs import fork_ranks
from unickpt.base.step_replay import VARIABLE
from unickpt.cli.main import main

WORKER = "tests.jobs.replay_step.worker"
FRAMEWORKS = ("torch", "deepspeed", "megatron")
FORKED = (sys.executable, "-m", "tests.support.forked_ranks", "2", WORKER)


def original(folder: Path, framework: str) -> dict[str, str]:
    """Train, and return the digest of each file of the checkpoints."""
    fork_ranks(2, WORKER, framework, str(folder), framework=framework)
    return digests(folder)


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def repeated(out: Path, folder: Path, framework: str, fault: str, *options: str, step: int = 4) -> tuple[int, list[str]]:
    """Start the ranks as a user does who starts them without ``replay-step``. Returns the exit code, and what the jobs say."""
    assert main(["replay-step", str(folder), "--step", str(step), "--out", str(out), *options]) == 0
    logs = []
    for each in sorted(out.iterdir()):
        done = fork_ranks(2, WORKER, framework, str(folder), fault, env={VARIABLE: str(each)}, framework=framework)
        logs.append(done.stdout + (done.stderr or ""))
    return main(["replay-step", "--compare", str(out)]), logs


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_step_is_repeated_and_a_flipped_bit_of_one_rank_is_named(
    framework: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    before = original(folder, framework)
    capsys.readouterr()
    if framework in some(FRAMEWORKS, 1):
        code, logs = repeated(tmp_path / "equal", folder, framework, "none", "--until", "6", step=2)
        said = capsys.readouterr().out
        assert code == 0, said
        assert re.search(
            r"EQUAL: steps 3 to 6, computed 2 times from the checkpoint of step 2 on 2 ranks: all \d+ values", said
        )
        assert "They are those of the checkpoint of step 6, too." in said
        assert all("has come to its end" not in log for log in logs)  # they end before the script does, and before it saves
    code, logs = repeated(tmp_path / "flip", folder, framework, "flip", "--until", "5", step=2)
    said = capsys.readouterr().out
    assert code == 1, said
    assert all("s4 is not saved: this job repeats a step" in log for log in logs)
    assert "SDC_COMPUTE step 3, micro-batch 0: rank 1 (on " in said
    name = "decoder.layers.0.mlp.linear_fc2.weight" if framework == "megatron" else "second.weight"
    assert f"the gradient of {name} differs between the runs" in said
    assert digests(folder) == before


def test_noise_without_a_seed_is_not_repeatable_and_other_data_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    before = original(folder, "torch")
    capsys.readouterr()
    code, _ = repeated(tmp_path / "noise", folder, "torch", "noise", "--until", "6")
    said = capsys.readouterr().out
    assert code == 1, said
    assert "NONDETERMINISTIC step 5, micro-batch 0: all ranks: the output of second differs between the runs" in said
    assert "no run ends with the values of the checkpoint of step 6" in said
    assert repeated(tmp_path / "data", folder, "torch", "data")[0] == 1
    assert "INPUT step 5, micro-batch 0: all ranks: the input of the model differs between the runs" in capsys.readouterr().out
    assert digests(folder) == before


def test_the_command_starts_the_job_and_a_fault_of_the_original_run_is_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The original run had other data in step 6."""
    folder = tmp_path / "out"
    fork_ranks(2, WORKER, "torch", str(folder), "once", framework="torch")
    before = digests(folder)
    capsys.readouterr()
    job = [*FORKED, "torch", str(folder)]
    code = main(["replay-step", str(folder), "--step", "4", "--until", "6", "--json", "--", *job])
    said = json.loads(capsys.readouterr().out)
    assert (code, said["meaning"], said["equal"]) == (1, "ORIGINAL", False)
    assert {each["rank"] for each in said["against"]["ranks"]} == {0, 1}
    assert digests(folder) == before
