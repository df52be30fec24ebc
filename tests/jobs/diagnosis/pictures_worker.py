"""Under torchrun with 4 ranks: a DeepSpeed pipeline of two stages with all kinds of records that reports show.

pictures_worker RINGS STEPS HANG

In every step rank 1 waits for its data, and rank 3 computes longer; now and then garbage is collected. After STEPS steps the
job ends, or rank 3 sleeps for ever where HANG is 1.
"""

from __future__ import annotations

import gc
import sys
import time
import warnings
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from tests.support import deepspeed_imports  # noqa: F401
from unickpt.diagnosis import session
from unickpt.testing.launch import leave

WIDTH, BATCH, MICRO_BATCHES = 192, 64, 4
SLOW_S, DATA_S = 0.004, 0.006  # of a forward pass of rank 3, and of a batch of rank 1


class Samples(torch.utils.data.Dataset[Any]):
    """Zeros. The first one of a batch is delayed on rank 1."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __len__(self) -> int:
        return BATCH * MICRO_BATCHES * 10_000

    def __getitem__(self, at: int) -> Any:
        if self._rank == 1 and at % BATCH == 0:
            time.sleep(DATA_S)
        return torch.zeros(WIDTH), torch.zeros(WIDTH)


class Layer(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 3:
            time.sleep(SLOW_S)
        return super().forward(x).relu()


def main() -> None:
    warnings.filterwarnings("ignore")
    rings, steps, hang = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1"
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(1)
    gc.disable()
    layers = [Layer(WIDTH, WIDTH) for _ in range(6)]
    module = deepspeed.pipe.PipelineModule(layers, num_stages=2, loss_fn=lambda out, target: (out - target).square().mean())
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "unickpt": {"timing": {"enabled": True, "folder": rings}},
    }
    engine, *_ = deepspeed.initialize(model=module, config=config)
    data = iter(torch.utils.data.DataLoader(Samples(dist.get_rank()), batch_size=BATCH))
    gc.freeze()
    kept = [[at] for at in range(200_000)]  # so that garbage collection takes a short time
    for step in range(steps):
        engine.train_batch(data)
        if step % 5 == dist.get_rank():
            gc.collect()
    del kept
    if hang and dist.get_rank() == 3:
        time.sleep(3600)
    if hang:
        engine.train_batch(data)
    dist.barrier()
    session.stop()
    leave()


if __name__ == "__main__":
    main()
