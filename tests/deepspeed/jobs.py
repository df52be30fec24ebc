"""Engines of every layout, built the way a user builds them: a model, a JSON, ``deepspeed.initialize``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.utils import groups

from tests.deepspeed.model import Model, batch

BATCH = 12


@dataclass(frozen=True)
class Layout:
    """One point of the matrix. ``precision``: fp32, bf16, or bf16o (BF16_Optimizer: ZeRO-1, fp32 accumulation)."""

    stage: int
    world: int
    precision: str = "fp32"

    @property
    def name(self) -> str:
        return f"z{self.stage}w{self.world}{self.precision}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def layouts(world: int) -> list[Layout]:
    """Every stage and precision at one world size."""
    found = [Layout(stage, world, precision) for precision in ("fp32", "bf16") for stage in (0, 1, 2, 3)]
    return [*found, Layout(1, world, "bf16o")]


def config(layout: Layout, **extra: Any) -> dict[str, Any]:
    """The DeepSpeed JSON of a layout; keys in ``extra`` replace its own. Saves wait: most tests look at files."""
    cfg: dict[str, Any] = {
        "train_batch_size": BATCH,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7, "warmup_max_lr": 1e-2}},
        "zero_optimization": {"stage": layout.stage, "sub_group_size": 1500, "stage3_param_persistence_threshold": 40},
        "zero_allow_untested_optimizer": True,
        "unickpt": {"enabled": True, "async_save": False},
    }
    if layout.precision.startswith("bf16"):
        cfg["bf16"] = {"enabled": True}
    if layout.precision == "bf16o":
        cfg["data_types"] = {"grad_accum_dtype": "fp32"}
    return {**cfg, **extra}


def build(
    layout: Layout,
    *,
    seed: int,
    model: torch.nn.Module | None = None,
    parameters: Any = None,
    client_optimizer: Any = None,
    mesh: tuple[int, int] | None = None,
    **extra: Any,
) -> Any:
    """An engine whose model starts from ``seed``; under ZeRO-3 it is built under ``zero.Init`` for odd seeds.

    ``mesh`` is the number of data-parallel and of sequence-parallel ranks (``deepspeed.initialize(mesh_param=...)``).
    """
    cfg = config(layout, **extra)
    groups.mesh_device = None  # DeepSpeed keeps that of an engine before, and training reads it
    torch.manual_seed(seed)
    if model is None:
        with deepspeed.zero.Init(config_dict_or_path=copy.deepcopy(cfg), enabled=layout.stage == 3 and seed % 2 == 1):
            model = Model()
    if parameters is None and client_optimizer is None:
        parameters = [p for p in model.parameters() if p.requires_grad]
    if callable(parameters):
        parameters = parameters(model)
    if client_optimizer is not None:
        del cfg["optimizer"]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameters, optimizer=client_optimizer, config=cfg, mesh_param=mesh
    )
    return engine


def train(engine: Any, steps: int) -> list[float]:
    """Train on; returns the global losses. The data depend on the global step alone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for _ in range(steps):
        loss = engine(*batch(engine.global_steps, BATCH, rank, world))
        engine.backward(loss)
        engine.step()
        engine.module.seen += 1
        total = loss.detach().double().reshape(1).clone()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses


def in_a_group(work: Callable[[], None]) -> None:
    """Work that needs DeepSpeed's process groups, on all ranks of this job."""
    warnings.filterwarnings("ignore")
    deepspeed.init_distributed("gloo", verbose=False)
    work()
    dist.barrier()


def scramble(engine: Any) -> None:
    """Spoil what training does not touch, so that a load that forgets it is seen."""
    for p in engine.module.parameters():
        if not p.requires_grad:
            (p.ds_tensor if hasattr(p, "ds_tensor") else p).data.fill_(-7.0)
    for _, buffer in engine.module.named_buffers():
        buffer.fill_(9)
