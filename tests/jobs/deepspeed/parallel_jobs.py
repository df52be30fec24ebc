"""What the jobs of several kinds of parallelism share: engines, micro-batches, training, and the gathered state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as functional
from deepspeed import comm as dist
from deepspeed.utils import groups

from tests.jobs.deepspeed.jobs import BATCH, move
from tests.jobs.deepspeed.model import VOCABULARY, batch
from tests.jobs.deepspeed.truth import Truth

TIED = "tied_modules."  # begins the names of tied layers of a pipeline
MICRO = 2  # rows of a micro-batch
STATES = ("exp_avg", "exp_avg_sq")


def forget_groups() -> None:
    """Forget what DeepSpeed keeps of an earlier engine of this process."""
    groups.mpu = groups.mesh_device = None


def forget_expert_groups() -> None:
    """Forget the groups of experts of an earlier engine of this process. DeepSpeed reuses them by the number of ranks alone."""
    for kind in ("_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP"):
        getattr(groups, kind).clear()
        getattr(groups, f"{kind}_RANKS").clear()


def same(x: torch.Tensor) -> torch.Tensor:
    """A layer of a pipeline without parameters."""
    return x


def seed_layer(value: Any) -> None:
    """``seed_fn`` of a pipeline. DeepSpeed passes its own type of number."""
    torch.manual_seed(int(value))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float().reshape(-1, VOCABULARY), targets.reshape(-1))


def engine_of(model: nn.Module, cfg: dict[str, Any], **more: Any) -> Any:
    """Return the engine of a model and a configuration. The optimizer gets the parameters with a gradient."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=cfg, **more)[0]


def _micro_batches(step: int, rank: int, world: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    tokens, targets = batch(step, BATCH, rank, world)
    yield from zip(tokens.split(MICRO), targets.split(MICRO), strict=True)


def train(engine: Any, steps: int, *, moved: int | None = None) -> list[float]:
    """Train a pipeline or a plain module further, and return the global losses. The data depend only on the global step.

    With a seed ``moved``, the weights move in the last place before each step (``tests/support/rounding.py``).
    """
    losses, data = [], engine.seq_data_parallel_group
    for step in range(steps):
        move(engine, moved, step)
        own = _micro_batches(engine.global_steps, dist.get_rank(group=data), dist.get_world_size(group=data))
        if engine.pipeline_parallelism:
            losses.append(float(engine.train_batch(own)))
            continue
        total = torch.zeros(1, dtype=torch.float64)
        for tokens, targets in own:
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        dist.all_reduce(total, group=data)
        losses.append(total.item() * MICRO / BATCH)
    return losses


def scramble_frozen(engine: Any) -> None:
    """Overwrite the parameters that training does not change, so that a load that does not restore them is detected."""
    for p in engine.module.parameters():
        if not p.requires_grad:
            (p.ds_tensor if hasattr(p, "ds_tensor") else p).data.fill_(-7.0)


def of_all_ranks(own: Any) -> list[Any]:
    """Return what every rank has. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    torch.distributed.all_gather_object(everyone, own)
    return everyone


def merged(states: list[Truth]) -> Truth:
    """Return the state of several ranks. Checks that what more than one of them has is equal.

    Stages of a pipeline sum the gradients of a tied layer in another order if there are many data-parallel ranks, so their
    copies differ by rounding. The first one counts, as in a checkpoint.
    """
    found: Truth = {}
    for rank, state in enumerate(states):
        for key, value in state.items():
            before = found.setdefault(key, value)
            equal = torch.equal(before, value) if isinstance(value, torch.Tensor) else before == value
            tied = TIED in key and isinstance(value, torch.Tensor)
            assert equal or (tied and torch.allclose(before, value, rtol=1e-5, atol=1e-8)), f"rank {rank} has another {key}"
    return found
