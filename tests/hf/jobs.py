"""Runs of the training scripts, and what two runs have to have in common.

Imports nothing of Hugging Face: without it the tests can still be collected, and left out by their marker.
"""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import torch
from safetensors.torch import load_file

from tests.launch import REPO, torchrun

CONFIGS = REPO / "configs" / "deepspeed"
GLOBAL_BATCH = 12  # divides over 1, 2 and 3 processes; every layout then sees the same samples at each step
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
}


def shipped(name: str, *, enabled: bool | None = True, optimizer: bool = True, **zero: Any) -> dict[str, Any]:
    """A JSON of ``configs/deepspeed``, changed as little as a CPU run demands.

    Args:
        name: the file, without its ending.
        enabled: value of ``unickpt.enabled``; None takes the whole key out.
        optimizer: keep the JSON's optimizer and scheduler (with torch's AdamW, which needs no
            compiler); otherwise Trainer makes its own.
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
) -> CompletedProcess[str]:
    """One run of a script on ``world`` processes, with ``folder`` for all it writes.

    Checkpoints go to ``folder``, what ``recorder`` notes to ``folder/record``. Without ``check`` it may fail.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "deepspeed.json"
    path.write_text(json.dumps(config))
    return torchrun(
        world,
        "tests.hf.ordinary",
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
    """State and facts that a run in ``folder`` wrote down at an event (``recorder.record``)."""
    path = folder / "record" / event
    return load_file(f"{path}.safetensors"), json.loads(Path(f"{path}.json").read_text())


def losses(log: list[dict[str, Any]], what: str = "loss") -> dict[int, float]:
    """Step -> training loss, averaged over the processes, of a Trainer's log; or what else is logged with it."""
    return {entry["step"]: entry[what] for entry in log if "loss" in entry}


def log_of(checkpoint: Path) -> list[dict[str, Any]]:
    """What Trainer itself kept of the log in a checkpoint."""
    log: list[dict[str, Any]] = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return log


def assert_same_state(found: dict[str, torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
    """Every tensor of both, bit for bit."""
    assert found.keys() == saved.keys()
    unequal = [name for name, tensor in saved.items() if not torch.equal(found[name], tensor)]
    assert not unequal, f"{len(unequal)} of {len(saved)} tensors differ: {unequal[:5]}"
