"""Engines of every layout, built as by a user: a model, a JSON, and ``deepspeed.initialize``."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.utils import groups

from tests.jobs.deepspeed.model import Model, batch
from tests.jobs.deepspeed.zero_names import Layout
from tests.jobs.sizes import size_of
from tests.support.rounding import move_weights

BATCH = size_of("BATCH", 12)


def config(layout: Layout, **extra: Any) -> dict[str, Any]:
    """Return the DeepSpeed JSON of a layout. ``extra`` replaces keys, and removes those that are None.

    Saves are synchronous, because tests read the files.
    """
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
    return {key: value for key, value in {**cfg, **extra}.items() if value is not None}


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
    groups.mesh_device = None  # DeepSpeed keeps the one of an earlier engine, and training reads it
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


def train(engine: Any, steps: int, *, moved: int | None = None) -> list[float]:
    """Train further, and return the global losses. The data depend only on the global step.

    With a seed ``moved``, the weights move in the last place before each step (``tests/support/rounding.py``).
    """
    rank, world, tensors = dist.get_rank(), dist.get_world_size(), max(int(engine.autotp_size()), 1)
    losses = []
    for step in range(steps):
        move(engine, moved, step)
        loss = engine(*batch(engine.global_steps, BATCH, rank // tensors, world // tensors))
        engine.backward(loss)
        engine.step()
        if hasattr(engine.module, "seen"):
            engine.module.seen += 1
        total = loss.detach().double().reshape(1).clone()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses


def move(engine: Any, seed: int | None, step: int) -> None:
    """Move the weights of an engine in the last place, unless there is no seed. Ranks with copies of a weight move it alike."""
    if seed is not None:
        held = (p.ds_tensor if hasattr(p, "ds_tensor") else p for p in engine.module.parameters())
        move_weights(held, 100 * seed + step)


def in_a_group(work: Callable[[], None]) -> None:
    """Run work that needs DeepSpeed's process groups, on all ranks of this job."""
    warnings.filterwarnings("ignore")
    deepspeed.init_distributed("gloo", verbose=False)
    work()
    dist.barrier()


def scramble(engine: Any) -> None:
    """Overwrite state that training does not change, so that a load that does not restore it is detected."""
    for p in engine.module.parameters():
        if not p.requires_grad:
            (p.ds_tensor if hasattr(p, "ds_tensor") else p).data.fill_(-7.0)
    for _, buffer in engine.module.named_buffers():
        buffer.fill_(9)


STEPS_BEFORE = 3
