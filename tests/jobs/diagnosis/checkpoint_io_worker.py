"""Under torchrun: a timed DeepSpeed job that saves under ZeRO 1, loads under ZeRO 0, and saves behind training.

Usage: ``checkpoint_io_worker.py RINGS FOLDER``. Rank 1 writes slowly.
"""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from unickpt.checkpoint.save import shutdown
from unickpt.diagnosis import session
from unickpt.testing.launch import leave


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("unickpt").setLevel(logging.WARNING)
    rings, folder = sys.argv[1:]
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    slow = {"write_megabytes_per_second": 0.2} if dist.get_rank() == 1 else {}
    timing = {"enabled": True, "folder": rings, "watch": False}
    for asynchronous in (False, True):
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
            "zero_optimization": {"stage": 0 if asynchronous else 1},
            "unickpt": {"enabled": True, "async_save": asynchronous, "timing": timing, **slow},
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        if asynchronous:
            engine.load_checkpoint(folder)
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 64)).mean())
            engine.step()
        engine.save_checkpoint(folder)
        shutdown.finish_all()
    dist.barrier()
    session.stop()
    leave()


if __name__ == "__main__":
    main()
