"""The DeepSpeed job of the benchmarks: square layers, Adam, one sample per rank and step."""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.measure import small_buckets

WIDTH = 1024  # of every layer


@dataclass(frozen=True)
class EngineJob:
    """One rank of the job. ``start`` begins it.

    Attributes:
        rank, world: of this rank.
        layers: number of layers, with ``WIDTH`` times ``WIDTH`` weights each.
    """

    rank: int
    world: int
    layers: int

    @staticmethod
    def start(millions: int) -> EngineJob:
        """Join the process group; the model will have ``millions`` million weights."""
        from deepspeed import comm as dist
        from deepspeed import init_distributed

        warnings.filterwarnings("ignore")
        logging.getLogger("unickpt").setLevel(logging.WARNING)
        init_distributed("gloo", verbose=False)
        return EngineJob(dist.get_rank(), dist.get_world_size(), max(1, millions * 1_000_000 // WIDTH**2))

    def engine(self, stage: int, **unickpt: Any) -> Any:
        """Return an engine that has made one step. ``unickpt``: keys of its options."""
        import deepspeed
        import torch

        torch.manual_seed(1)
        config = {
            "train_batch_size": self.world,
            "optimizer": {"type": "Adam", "params": {"torch_adam": True, "lr": 1e-6}},
            "zero_optimization": small_buckets(stage),
            "unickpt": {"enabled": True, "async_save": True, **unickpt},
        }
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(self.layers)))
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self.step(engine)
        return engine

    def other(self, stage: int) -> Any:
        """Return an engine of another layout than that of ``stage``."""
        return self.engine(3 if stage < 3 else 1)

    def share_bytes(self, engine: Any) -> int:
        """Return the size of the masters and moments of this rank."""
        return int(sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()) * 12 // self.world)

    @staticmethod
    def step(engine: Any) -> None:
        """Make one training step."""
        import torch

        engine.backward(engine(torch.rand(1, WIDTH)).mean())
        engine.step()

    def steps(self, engine: Any, until: Callable[[], bool], at_least: int = 4) -> float:
        """Return the median seconds of a training step on this rank, until ``until()`` is true on all ranks."""
        import torch
        from deepspeed import comm as dist

        found = []
        flag = torch.zeros(1)
        while True:
            begin = time.perf_counter()
            self.step(engine)
            found.append(time.perf_counter() - begin)
            flag.fill_(float(until() and len(found) >= at_least))
            dist.all_reduce(flag, op=dist.ReduceOp.MIN)
            if flag.item():
                return statistics.median(found)
