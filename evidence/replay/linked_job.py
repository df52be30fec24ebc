"""A rank of a DeepSpeed job whose links or data change in its second half: ``linked_job TASK.json``, with the variables of ``env://``.

The task has ``kind`` (``zero1``, ``pipeline`` or ``data``), ``rings``, ``steps``, ``layers`` (seconds that each layer sleeps
forward, twice as long backward), ``width``, ``rows`` of a microbatch, and for a pipeline ``stages`` and ``microbatches``.
``at_half`` maps ranks to commands that they run before the first step of the second half. ``places`` maps ranks to factors of
their sleep. ``wait_s`` is the time that the data of rank 1 take in the second half, for ``data``.

The layers of a pipeline multiply by a vector: they send large messages, and compute little.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.jobs.replay.timed_job import WARM_UP, SleepingLayers


class Scaled(torch.nn.Module):
    """Multiplies each column."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class SlowData(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Rows that take ``wait_s`` seconds."""

    def __init__(self, width: int) -> None:
        self.width, self.wait_s = width, 0.0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            time.sleep(self.wait_s)
            yield torch.ones(self.width)


def pipeline(task: dict[str, Any], layers: list[torch.nn.Module], config: dict[str, Any]) -> Callable[[], Any]:
    import deepspeed

    config["gradient_accumulation_steps"] = task["microbatches"]
    module = deepspeed.pipe.PipelineModule(
        layers,
        num_stages=task["stages"],
        loss_fn=lambda out, target: (out - target).square().mean(),
        partition_method="uniform",
    )
    engine, *_ = deepspeed.initialize(model=module, config=config)
    batch = torch.ones(task["rows"], task["width"])
    data = iter([(batch, torch.zeros_like(batch))] * 100_000)
    return lambda: engine.train_batch(data)


def plain(task: dict[str, Any], layers: list[torch.nn.Module], config: dict[str, Any], data: SlowData) -> Callable[[], Any]:
    import deepspeed

    model = torch.nn.Sequential(*layers)
    config["zero_optimization"] = {"stage": 1}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    batches = iter(torch.utils.data.DataLoader(data, batch_size=task["rows"]))

    def step() -> None:
        engine.backward(engine(next(batches)).mean())
        engine.step()

    return step


def main() -> None:
    warnings.filterwarnings("ignore")
    task = json.loads(Path(sys.argv[1]).read_text())
    import deepspeed
    import torch.distributed as dist

    from unickpt.diagnosis import session
    from unickpt.testing.launch import leave

    deepspeed.init_distributed("gloo", verbose=False)
    rank = str(dist.get_rank())
    torch.manual_seed(1)
    made = Scaled if task["kind"] == "pipeline" else lambda width: torch.nn.Linear(width, width)
    layers: list[torch.nn.Module] = [made(task["width"]) for _ in task["layers"]]
    sleeping = SleepingLayers(layers, task["layers"])
    sleeping.factor = task.get("places", {}).get(rank, 1.0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": task["rows"],
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "unickpt": {"timing": {"enabled": True, "watch": False, "folder": task["rings"]}},
    }
    data = SlowData(task["width"])
    step = pipeline(task, layers, config) if task["kind"] == "pipeline" else plain(task, layers, config, data)
    gc.collect()
    gc.freeze()
    for at in range(WARM_UP + task["steps"]):
        if at == WARM_UP + task["steps"] // 2:
            for command in task.get("at_half", {}).get(rank, ()):
                subprocess.run(command, check=True)
            data.wait_s = task.get("wait_s", 0.0) if rank == "1" else 0.0
        step()
    dist.barrier()
    session.stop()
    leave()


if __name__ == "__main__":
    main()
