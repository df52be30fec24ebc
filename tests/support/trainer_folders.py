"""Output folders of a Trainer run."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.support.saves import saved


def made(folder: Path, *steps: int) -> Path:
    """Create an output directory with a complete checkpoint for each step."""
    for step in steps:
        place = folder / f"checkpoint-{step}"
        saved(place, f"global_step{step}")
        (place / "latest").write_text(f"global_step{step}")
        torch.save({"cpu": torch.get_rng_state()}, place / "rng_state_0.pth")
        (place / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return folder
