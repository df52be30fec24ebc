"""A training that ``unickpt replay-step`` repeats.

Usage: ``worker.py KIND FOLDER [FAULT]``, under a launcher. ``KIND``: ``torch`` (DDP), ``torch:fsdp``, ``deepspeed`` (ZeRO-1),
``deepspeed:3`` and other stages, ``megatron`` (data parallel), ``megatron:tp`` and ``megatron:pp`` on all ranks. It resumes
from ``FOLDER``, trains up to step 6, and saves after each second step. ``FAULT`` may be ``flip``: in the second repetition a
bit of a gradient of rank 1 flips; ``noise``: the model adds noise without a seed; ``data``: each start has other data;
``once``: step 6 has other data unless it is repeated; ``none``.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

STEPS, EVERY = 6, 2
Prepare = Callable[[torch.nn.Module], None]  # called after the model is wrapped, and before the load
FLIPPED = ("second", "linear_fc2")


class Training(Protocol):
    """A model in training.

    Attributes:
        module: the model.
        start: steps done.
    """

    module: Any
    start: int

    def step(self, inputs: torch.Tensor) -> None: ...
    def save(self, number: int) -> None: ...


class Model(torch.nn.Module):
    """Two layers with dropout."""

    def __init__(self, *, noise: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.noise = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4), noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.dropout(torch.tanh(self.first(x)), 0.3)
        if self.noise:
            hidden = hidden + _noise_like(hidden)
        found: torch.Tensor = self.second(hidden)
        return found


class OfTorch:
    """DDP, or FSDP2."""

    def __init__(self, folder: Path, kind: str, prepare: Prepare, *, noise: bool) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.nn.parallel import DistributedDataParallel

        import torch_unickpt

        torch.distributed.init_process_group("gloo")
        torch.manual_seed(5)
        self.module, self._folder = Model(noise=noise), folder
        if kind == "fsdp":
            for each in (self.module.first, self.module.second, self.module):
                fully_shard(each)
        self._model: Any = self.module if kind == "fsdp" else DistributedDataParallel(self.module)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.01)
        prepare(self.module)
        self.start = torch_unickpt.resume_or_start(self._model, self._optimizer, self._folder).step

    def step(self, inputs: torch.Tensor) -> None:
        self._model(inputs).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def save(self, number: int) -> None:
        import torch_unickpt

        torch_unickpt.save_training(self._model, self._optimizer, self._folder / f"s{number}", step=number)


class OfDeepSpeed:
    """A stage of ZeRO in fp32."""

    def __init__(self, folder: Path, kind: str, prepare: Prepare, *, noise: bool) -> None:
        import warnings

        import deepspeed

        import ds_unickpt

        ds_unickpt.install()
        warnings.filterwarnings("ignore")
        deepspeed.init_distributed("gloo", verbose=False)
        torch.manual_seed(5)
        self.module, self._folder = Model(noise=noise), str(folder)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": int(kind or 1)},
            "steps_per_print": 1 << 30,
            "unickpt": {"enabled": True},
        }
        self._engine, *_ = deepspeed.initialize(model=self.module, model_parameters=self.module.parameters(), config=config)
        prepare(self.module)
        self.start = ds_unickpt.resume_or_start(self._engine, self._folder).step

    def step(self, inputs: torch.Tensor) -> None:
        self._engine.backward(self._engine(inputs).square().mean())
        self._engine.step()

    def save(self, number: int) -> None:
        self._engine.save_checkpoint(self._folder, tag=f"s{number}")


class OfMegatron:
    """Megatron's distributed optimizer. Its batches depend on its own count."""

    def __init__(self, folder: Path, kind: str, prepare: Prepare, *, noise: bool) -> None:
        import megatron_unickpt
        from megatron_unickpt.testing.jobs import Job
        from megatron_unickpt.testing.layouts import Layout

        torch.distributed.init_process_group("gloo")
        ranks = torch.distributed.get_world_size()
        self._job, self._folder = (
            Job(Layout(**{kind or "dp": ranks}), batch=ranks, layers=max(1, ranks * (kind == "pp"))),
            folder,
        )
        self.module = self._job.modules[0]
        if noise:
            self.module.decoder.register_forward_hook(lambda _module, _given, found: found + _noise_like(found))
        prepare(self.module)
        self.start = megatron_unickpt.resume_or_start(folder, self._job.chunks, self._job.optimizer)["iteration"]
        self._job.step = self.start

    def step(self, inputs: torch.Tensor) -> None:  # noqa: ARG002 - see above
        self._job.train(1)

    def save(self, number: int) -> None:
        import megatron_unickpt

        megatron_unickpt.save(self._folder / f"s{number}", self._job.chunks, self._job.optimizer, iteration=number)


def _noise_like(values: torch.Tensor) -> torch.Tensor:
    return torch.randn(values.shape, generator=_unseeded()).to(values.dtype)


def _unseeded() -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(os.urandom(6), "little"))


def flip(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient with a flipped bit, as a fault of the hardware makes one."""
    found = gradient.clone()
    found.view(torch.int32).view(-1)[3] ^= 1 << 20
    return found


def before_forks(arguments: list[str]) -> None:
    """Make the imports of a framework."""
    for each in {
        "torch": ("torch_unickpt.loading.load_training", "torch_unickpt.saving.save_training"),
        "deepspeed": ("deepspeed", "ds_unickpt.loading.load_checkpoint", "ds_unickpt.saving.save_checkpoint"),
        "megatron": ("megatron_unickpt.testing.jobs", "megatron_unickpt.api"),
    }[arguments[0].partition(":")[0]]:
        importlib.import_module(each)


def _let_flip(module: torch.nn.Module) -> None:
    """Flip a bit of a gradient before any reduction, and before it is recorded. With FSDP2 the forward pass has other
    parameters than those at rest."""
    holder = next(each for name, each in module.named_modules() if name.endswith(FLIPPED))
    seen: list[torch.Tensor] = []

    def watch(layer: torch.nn.Module, _given: Any) -> None:
        parameter = layer.get_parameter("weight")
        if parameter.requires_grad and all(parameter is not each for each in seen):
            seen.append(parameter)
            parameter.register_hook(flip)  # type: ignore[no-untyped-call]

    holder.register_forward_pre_hook(watch)


def main(kind: str, folder: Path, fault: str) -> None:
    made = {"torch": OfTorch, "deepspeed": OfDeepSpeed, "megatron": OfMegatron}[kind.partition(":")[0]]
    flips = fault == "flip" and os.environ.get("UNICKPT_REPLAY", "").endswith("run2") and os.environ["RANK"] == "1"
    job: Training = made(folder, kind.partition(":")[2], _let_flip if flips else lambda _module: None, noise=fault == "noise")
    rank = torch.distributed.get_rank()
    for number in range(job.start + 1, STEPS + 1):
        seed = 1000 * number + rank
        other = fault == "data" or (fault == "once" and number == STEPS and "UNICKPT_REPLAY" not in os.environ)
        generator = _unseeded() if other else torch.Generator().manual_seed(seed)
        job.step(torch.randn(4, 8, generator=generator))
        if number % EVERY == 0:
            job.save(number)
    print(f"rank {rank} has come to its end")

    from unickpt.testing.launch import leave

    leave()


if __name__ == "__main__":
    importlib.import_module("torch.distributed")
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "none")
