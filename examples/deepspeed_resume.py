"""A DeepSpeed job that can be stopped at any time and goes on with any number of ranks.

torchrun --nproc-per-node 2 examples/deepspeed_resume.py out 4
torchrun --nproc-per-node 3 examples/deepspeed_resume.py out 8
"""

from __future__ import annotations

import sys

import deepspeed
import torch
from deepspeed import comm as dist
from torch.utils.data import DataLoader, TensorDataset

import ds_unickpt
import unickpt


def main(folder: str, steps: int) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,  # of the first start; later starts compute it
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
        "unickpt": {"enabled": True, "keep_global_batch": "always", "resume_from": folder},
    }
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(1, 1), config=config)
    start = ds_unickpt.resume_or_start(engine)

    numbers = torch.arange(64.0)
    sampler = unickpt.GlobalOrderSampler(
        len(numbers),
        rank=dist.get_rank(),
        ranks=dist.get_world_size(),
        per_device=engine.train_micro_batch_size_per_gpu(),
        start=start.samples,
    )
    # With a generator of its own the loader draws nothing from torch's, which the checkpoint has restored.
    own = torch.Generator()
    batches = iter(DataLoader(TensorDataset(numbers), batch_size=sampler.per_device, sampler=sampler, generator=own))
    for step in range(start.step, steps):
        for _ in range(engine.gradient_accumulation_steps()):
            (x,) = next(batches)
            print(f"step {step} samples {x.int().tolist()}", flush=True)
            x = x.reshape(-1, 1).to(engine.device)
            engine.backward((engine(x) - 2 * x).square().mean())
            engine.step()
        engine.save_checkpoint(folder)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    dist.destroy_process_group()
