"""A rank of a DeepSpeed job that chooses its compression: ``automatic_job TASK.json``, with the variables of ``env://``.

It trains, saves, goes on, and then resumes from the checkpoint with another engine. Rank 0 writes what was seen.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import torch

from ds_unickpt.compressing import automatic
from unickpt.testing.launch import leave

BEFORE, AFTER, AGAIN = (10, automatic.WARM_UP), 10, 4  # steps that are timed before and after the choice, steps after a save


def build(task: dict[str, Any], folder: str) -> Any:
    torch.manual_seed(1)
    width = task["width"]
    layers = (torch.nn.Linear(width // 4, width), torch.nn.Tanh(), torch.nn.Linear(width, width), torch.nn.Tanh())
    model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 8))
    timing = {"enabled": True, "watch": False, "folder": f"{task['folder']}/{folder}"}
    config = {
        "train_batch_size": 16, "zero_optimization": {"stage": 2}, "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True, "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "unickpt": {"enabled": True, "async_save": False, "compression": "auto", "timing": timing},
    }  # fmt: skip
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine: Any, width: int, steps: int) -> list[tuple[float, float]]:
    """Return the loss and the seconds of each step."""
    found = []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(int(engine.global_steps) * 10 + engine.global_rank)
        begin = time.perf_counter()
        loss = engine(torch.randn(8, width // 4, generator=generator)).square().mean()
        engine.backward(loss)
        engine.step()
        found.append((float(loss), time.perf_counter() - begin))
    return found


def scheme(engine: Any) -> str:
    compressed = engine.checkpoint_engine.compressed
    return "none" if compressed is None else str(compressed.exchange.settings.scheme)


def _failing(automatic_choice: Any) -> None:
    """Let the store of this rank fail after the other ranks have their answer."""
    whole = automatic_choice._agreed

    def agreed(engine: Any) -> Any:
        whole(engine)
        raise ConnectionError("the store does not answer")

    automatic_choice._agreed = agreed


def main() -> None:
    warnings.filterwarnings("ignore")
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    engine = build(task, "rings")
    rank, width = engine.global_rank, task["width"]
    if task.get("fails") and rank == 1:
        _failing(engine.checkpoint_engine.choosing)
    steps = train(engine, width, automatic.WARM_UP + AFTER)
    seconds = [s for _, s in steps]
    choice = engine.checkpoint_engine.choosing.choice
    engine.save_checkpoint(f"{task['folder']}/checkpoint")
    later = [loss for loss, _ in train(engine, width, AGAIN)]
    resumed = build(task, "rings-resumed")
    train(resumed, width, 1)
    resumed.load_checkpoint(f"{task['folder']}/checkpoint")
    again = [loss for loss, _ in train(resumed, width, AGAIN)]
    found = {
        "choice": str(choice), "scheme": scheme(engine), "resumed": resumed.checkpoint_engine.choosing.choice == choice,
        "resumed_scheme": scheme(resumed), "equal": later == again,
        "before_s": statistics.median(seconds[slice(*BEFORE)]), "after_s": statistics.median(seconds[automatic.WARM_UP :]),
    }  # fmt: skip
    Path(f"{task['folder']}/rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    leave()


if __name__ == "__main__":
    main()
