"""Runs of the training scripts, and assertions about two runs.

This module imports nothing of Hugging Face. Tests can be collected without it, and deselected by their marker.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support.forked_jobs import fork_ranks
from tests.support.repository import REPO
from tests.support.rounding import assert_continues, in_steps
from unickpt.testing.launch import torchrun

CONFIGS = REPO / "configs" / "deepspeed"
GLOBAL_BATCH = 12  # divides over 1, 2 and 3 processes; every layout then sees the same samples at each step
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class ResumedRun:
    """A run without interruption, and one that resumed from its checkpoint under another layout.

    Attributes:
        uninterrupted, resumed: output folders of the runs.
        step: step of the checkpoint.
        elsewhere: output folder of an uninterrupted run under another layout. Another number of processes adds the same
            gradients in another order, and the losses of both runs show what that does.
    """

    uninterrupted: Path
    resumed: Path
    step: int
    elsewhere: Path


def shipped(name: str, *, enabled: bool | None = True, optimizer: bool = True, **zero: Any) -> dict[str, Any]:
    """Return a JSON of ``configs/deepspeed`` with the changes that a CPU run needs.

    Args:
        name: file name without the suffix.
        enabled: value of ``unickpt.enabled``; None removes the key.
        optimizer: keep the JSON's optimizer and scheduler, with torch's AdamW, which needs no compiler. False: Trainer creates
            its own.
        zero: keys of ``zero_optimization`` to change.
    """
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    # Trainer on CPU starts torch.distributed before DeepSpeed, whose zero.Init then counts one process.
    del config["train_batch_size"]
    config["unickpt"]["enabled"] = enabled
    if enabled is None:
        del config["unickpt"]
    if optimizer:
        config["optimizer"]["params"]["torch_adam"] = True
    else:
        del config["optimizer"], config["scheduler"]
    config["zero_optimization"] |= zero
    return config


def run(
    script: str,
    world: int,
    folder: Path,
    config: dict[str, Any],
    *arguments: str,
    record: bool = True,
    check: bool = True,
    launcher: bool = False,
) -> CompletedProcess[str]:
    """Run a script on ``world`` processes.

    Checkpoints go to ``folder``, and the output of ``recorder`` to ``folder/record``. With ``check=False`` the run may fail.
    With ``launcher`` torchrun starts the processes; without it they share their imports, which takes less time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "deepspeed.json"
    path.write_text(json.dumps(config))
    return (torchrun if launcher else fork_ranks)(
        world,
        "tests.jobs.hf.ordinary",
        script,
        *("--deepspeed", str(path), "--output_dir", str(folder)),
        *(("--record", str(folder / "record")) if record else ()),
        *("--per_device_train_batch_size", str(GLOBAL_BATCH // world)),
        *arguments,
        timeout_s=240,
        env=ENVIRONMENT,
        check=check,
    )


def recorded(folder: Path, event: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return state and facts that a run in ``folder`` recorded at an event (``recorder.record``)."""
    path = folder / "record" / event
    return load_file(f"{path}.safetensors"), json.loads(Path(f"{path}.json").read_text())


def losses(log: list[dict[str, Any]], what: str = "loss") -> dict[int, float]:
    """Return the training loss by step, averaged over the processes, from Trainer's log; or another logged value."""
    return {entry["step"]: entry[what] for entry in log if "loss" in entry}


def log_of(checkpoint: Path) -> list[dict[str, Any]]:
    """Return Trainer's own log in a checkpoint."""
    log: list[dict[str, Any]] = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return log


def losses_of(folder: Path) -> dict[int, float]:
    """Return the training loss by step of a run in ``folder``, as its recorder has it."""
    _, end = recorded(folder, "end")
    return losses(end["log"])


def assert_log_continues(found: dict[int, float], expected: dict[int, float], elsewhere: dict[int, float]) -> None:
    """Assert that losses differ by no more than rounding explains, which ``elsewhere`` shows beside ``expected``."""
    assert found.keys() == expected.keys() == elsewhere.keys()
    assert_continues(*(in_steps(each, sorted(expected)) for each in (found, expected, elsewhere)))


def assert_same_state(found: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    """Assert that all tensors are equal bit for bit."""
    assert found.keys() == saved.keys()
    unequal = [name for name, tensor in saved.items() if not torch.equal(found[name], tensor)]
    assert not unequal, f"{len(unequal)} of {len(saved)} tensors differ: {unequal[:5]}"
