"""An ordinary Lightning script: a LightningModule under ``DeepSpeedStrategy``, resumed by ``fit(ckpt_path=...)``.

Lightning allows this strategy on CUDA devices only. ``OnCpu`` is the one thing here that a user's script lacks: it
passes Lightning's check and gives each process a CPU device.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn

from tests.jobs.hf.recorder import record

FEATURES, ROWS = 16, 36  # three steps make an epoch: Lightning resumes at the first batch of an epoch


class OnCpu(CUDAAccelerator):
    """DeepSpeed's CPU accelerator as Lightning's."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def setup(self, trainer: pl.Trainer) -> None:
        pass

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(int(devices)))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cpu", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True


class Regression(pl.LightningModule):
    """Two layers that learn a fixed linear map; a scheduler that Lightning steps and saves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        self.losses.append(float(self.all_gather(loss.detach()).mean()))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Recorder(pl.Callback):
    """Records ``begin`` (after a resume), ``save-<step>`` and ``end``."""

    def __init__(self, folder: str, every: int) -> None:
        self.folder, self.every = folder, every

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step:
            self._record("begin", trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step % self.every == 0:
            self._record(f"save-{trainer.global_step}", trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._record("end", trainer, pl_module)

    def _record(self, event: str, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        lr = [group["lr"] for group in trainer.optimizers[0].param_groups]
        record(self.folder, event, module, step=trainer.global_step, lr=lr, losses=module.losses)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--deepspeed", "--output_dir", "--record", "--resume"):
        parser.add_argument(name)
    for name in ("--per_device_train_batch_size", "--max_steps", "--save_steps"):
        parser.add_argument(name, type=int)
    parser.add_argument("--keep", type=int, default=-1)
    args = parser.parse_args()

    pl.seed_everything(7 if args.resume else 42)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, FEATURES, generator=generator)
    y = x @ torch.randn(FEATURES, 1, generator=generator)
    rows, world = torch.utils.data.TensorDataset(x, y), int(os.environ["WORLD_SIZE"])
    # Lightning's own sampler shuffles under several processes: another number of them then sees other batches.
    sampler = torch.utils.data.DistributedSampler(rows, world, int(os.environ["RANK"]), shuffle=False)
    loader = torch.utils.data.DataLoader(rows, batch_size=args.per_device_train_batch_size, sampler=sampler)
    checkpoints = ModelCheckpoint(args.output_dir, filename="{step}", every_n_train_steps=args.save_steps, save_top_k=args.keep)
    trainer = pl.Trainer(
        accelerator=OnCpu(),
        devices=world,
        use_distributed_sampler=False,
        plugins=[TorchElasticEnvironment()],
        strategy=DeepSpeedStrategy(config=json.loads(Path(args.deepspeed).read_text())),
        max_steps=args.max_steps,
        callbacks=[checkpoints, Recorder(args.record, args.save_steps)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), loader, ckpt_path=args.resume)


if __name__ == "__main__":
    main()
