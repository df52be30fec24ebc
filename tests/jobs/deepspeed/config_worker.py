"""Under torchrun on two ranks: a few steps and a checkpoint with every ready JSON; on one, each of these into every JSON.

config_worker DIR          DIR/<name>/global_step3, DIR/<name>.truth, DIR/results.json: pair -> what differs
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist

from tests.jobs.deepspeed.truth import consolidated, differences
from tests.support import deepspeed_imports  # noqa: F401
from tests.support.repository import REPO
from tests.support.turns import in_turn
from unickpt.testing.launch import leave

NAMES = ("zero1_bf16", "zero2", "zero2_cpu", "zero3", "zero3_offload")
STATES = ("exp_avg", "exp_avg_sq")


def build(name: str, seed: int) -> Any:
    """Build an engine from the unchanged JSON."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 3))
    path = REPO / "configs" / "deepspeed" / f"{name}.json"
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=str(path))
    return engine


def save_all(folder: Path) -> None:
    for name in NAMES:
        engine = build(name, seed=1)
        for _ in range(3 * engine.gradient_accumulation_steps()):
            engine.backward(engine(torch.ones(1, 6, dtype=torch.bfloat16)).float().pow(2).sum())
            engine.step()
        assert engine.save_checkpoint(str(folder / name)) is True
        truth = consolidated(engine, STATES)
        if dist.get_rank() == 0:
            torch.save(truth, folder / f"{name}.truth")
        engine.destroy()
    dist.barrier()


def load_all(folder: Path) -> None:
    results: dict[str, list[str]] = {}
    for name in NAMES:
        for source in NAMES:
            engine = build(name, seed=2)
            engine.load_checkpoint(str(folder / source))
            truth = torch.load(folder / f"{source}.truth", weights_only=False)
            # FusedAdam and DeepSpeedCPUAdam keep different switches in their groups
            results[f"{source} to {name}"] = differences(truth, consolidated(engine, STATES), ignore=("groups",))
            engine.destroy()
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    in_turn((world, partial(work, Path(sys.argv[1]))) for world, work in ((2, save_all), (1, load_all)))
    leave()
