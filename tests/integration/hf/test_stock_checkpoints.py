"""Checkpoints that DeepSpeed saved without the key, on another number of processes: the refusal, the command in it, the resume.

``UNICKPT_FULL_MATRIX=1`` runs ZeRO 1 to 3 from four processes on two and three. CI has the same with ZeRO-2 from two on one, in
``test_trainer.py``.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.hf.jobs import assert_same_state, recorded, run, shipped
from tests.support.extent import in_full
from unickpt.cli.main import main

pytestmark = [pytest.mark.hf, pytest.mark.timeout(900)]

SAVED = 3
COMMON = (
    "--use_cpu", "--max_steps", "4", "--save_steps", str(SAVED), "--logging_steps", "1", "--learning_rate", "5e-3",
    "--warmup_steps", "2", "--report_to", "none", "--disable_tqdm", "True",
)  # fmt: skip
COMMAND = re.compile(r"^ {4}(unickpt convert .*)$", re.MULTILINE)


def config(stage: int, *, enabled: bool) -> dict[str, Any]:
    name = "hf_zero3_auto" if stage == 3 else "hf_zero2_auto"
    return shipped(name, enabled=True if enabled else None, stage=stage)


@in_full
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_trainer_resumes_from_what_the_refusal_names(stage: int, tmp_path: Path) -> None:
    saved, before = run_stock(stage, tmp_path / "stock")
    checkpoint = tmp_path / "stock" / f"checkpoint-{SAVED}"
    resume = ("--resume", str(checkpoint))
    for world, enabled in ((2, False), (3, True)):
        folder = tmp_path / f"refused{world}"
        process = run(
            "train_trainer", world, folder, config(stage, enabled=enabled), *COMMON, *resume, record=False, check=False
        )
        assert process.returncode != 0
        commands = set(COMMAND.findall(process.stdout))
        assert len(commands) == 1
    words = shlex.split(commands.pop())
    assert main(words[1:]) == 0
    new = Path(words[-1])
    theirs = {path.name for path in checkpoint.iterdir()} - {"zero_to_fp32.py", "zero_to_torch.py"}
    assert {path.name for path in new.iterdir()} == theirs
    for world in (2, 3):
        folder = tmp_path / f"resumed{world}"
        run("train_trainer", world, folder, config(stage, enabled=True), *COMMON, "--resume", str(new))
        found, after = recorded(folder, "begin")
        assert_same_state(found, saved)
        assert (after["step"], after["lr"]) == (before["step"], before["lr"])


def run_stock(stage: int, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run a job without the key on four processes. Return its state at the save."""
    run("train_trainer", 4, folder, config(stage, enabled=False), *COMMON)
    return recorded(folder, f"save-{SAVED}")
