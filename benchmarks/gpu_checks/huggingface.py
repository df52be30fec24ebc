"""Hugging Face's Trainer, unchanged: it saves, and resumes as another ZeRO stage. One rank, with torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_checks.place import Place
from benchmarks.gpu_checks.rows import Row, Rows

ROWS = ("Trainer, ZeRO-2: saved and resumed as ZeRO-3",)
STEPS, SAVED = 6, 3
_ARGUMENTS = (
    "--max_steps", str(STEPS), "--save_steps", str(SAVED), "--logging_steps", "1", "--per_device_train_batch_size", "4",
    "--learning_rate", "5e-3", "--warmup_steps", "2", "--report_to", "none", "--disable_tqdm", "True",
)  # fmt: skip


def check(place: Place, path: Path, limit_s: float) -> None:
    """Make all checks of this group. Called in the parent of the ranks."""
    end = time.monotonic() + limit_s
    rows = Rows(path, "huggingface", "dry, gloo" if place.dry else "device, nccl")
    with (
        rows.row(ROWS[0], "every bit; the losses of the run without interruption") as row,
        tempfile.TemporaryDirectory() as folder,
    ):
        _resumed(place, Path(folder), row, end)


def _resumed(place: Place, folder: Path, row: Row, end: float) -> None:
    from tests.integration.hf.jobs import log_of, losses, recorded, shipped

    _train(place, folder / "two", shipped("hf_zero2_auto"), end)
    resume = ("--resume", str(folder / "two" / f"checkpoint-{SAVED}"))
    _train(place, folder / "three", shipped("hf_zero3_auto"), end, *resume)
    (saved, _), (found, _) = recorded(folder / "two", f"save-{SAVED}"), recorded(folder / "three", "begin")
    wrong = [name for name, tensor in saved.items() if name not in found or not torch.equal(found[name], tensor)]
    row.values["tensors"] = len(saved)
    row.require(not wrong, f"{len(wrong)} of {len(saved)} tensors differ, such as {wrong[:3]}")
    kept, resumed = (losses(log_of(folder / name / f"checkpoint-{STEPS}")) for name in ("two", "three"))
    far = max(abs(kept[step] - resumed[step]) for step in range(SAVED + 1, STEPS + 1))
    row.values["largest difference of losses"] = far
    row.require(far < 1e-4, "the losses differ")


def _train(place: Place, folder: Path, config: dict[str, Any], end: float, *arguments: str) -> None:
    folder.mkdir()
    (folder / "deepspeed.json").write_text(json.dumps(config))
    where = ("--use_cpu",) if place.dry else ()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m",
        "benchmarks.gpu_checks.trainer_script", "--deepspeed", str(folder / "deepspeed.json"), "--output_dir",
        str(folder), "--record", str(folder / "record"), *_ARGUMENTS, *where, *arguments,
    ]  # fmt: skip
    more = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"} | ({"DS_ACCELERATOR": "cpu"} if place.dry else {})
    done = subprocess.run(
        command, env=os.environ | more, capture_output=True, text=True, timeout=max(end - time.monotonic(), 1.0)
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
