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
    goal = "every bit; the losses of the run without interruption"
    with rows.row(ROWS[0], goal) as row, tempfile.TemporaryDirectory() as folder:
        _resumed(place, Path(folder), row, end)


def _resumed(place: Place, folder: Path, row: Row, end: float) -> None:
    two, three = folder / "two", folder / "three"
    _train(place, two, 2, end)
    _train(place, three, 3, end, "--resume_from_checkpoint", str(two / f"checkpoint-{SAVED}"))
    saved, found = (
        torch.load(path, weights_only=True) for path in (two / "states" / f"save-{SAVED}", three / "states" / "begin")
    )
    wrong = [name for name, tensor in saved.items() if name not in found or not torch.equal(found[name], tensor)]
    row.values["tensors"] = len(saved)
    row.require(not wrong, f"{len(wrong)} of {len(saved)} tensors differ, such as {wrong[:3]}")
    kept, resumed = _losses(two), _losses(three)
    far = max(abs(kept[step] - resumed[step]) for step in range(SAVED + 1, STEPS + 1))
    row.values["largest difference of losses"] = far
    row.require(far < 1e-4, "the losses differ")


def _losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step from Trainer's own log."""
    log = json.loads((folder / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in log if "loss" in entry}


def _train(place: Place, folder: Path, stage: int, end: float, *arguments: str) -> None:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": "auto", "weight_decay": "auto"}},
        "unickpt": {"enabled": True},
    }
    folder.mkdir()
    (folder / "deepspeed.json").write_text(json.dumps(config))
    where = ("--use_cpu",) if place.dry else ()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m",
        "benchmarks.gpu_checks.trainer_script", str(folder / "states"), "--deepspeed", str(folder / "deepspeed.json"),
        "--output_dir", str(folder), *_ARGUMENTS, *where, *arguments,
    ]  # fmt: skip
    more = {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"} | ({"DS_ACCELERATOR": "cpu"} if place.dry else {})
    done = subprocess.run(
        command, env=os.environ | more, capture_output=True, text=True, timeout=max(end - time.monotonic(), 1.0)
    )
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
        raise RuntimeError(f"exit status {done.returncode}; the script's own error is above")
