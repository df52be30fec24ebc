"""Saves and loads of a Megatron job in unickpt's format and in those of megatron-core. For worker processes alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_unickpt.testing.jobs import Job  # isort: skip  before anything of megatron

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy, get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

from megatron_unickpt.held_state.optimizer import METADATA


def shard_bytes(job: Job) -> int:
    """Return the bytes of the masters and moments that this rank's optimizer holds: three of fp32 per element."""
    return sum(held.numel() for group in job.optimizer.param_groups for held in group["params"]) * 12


def save(job: Job, kind: str, where: Path, queue: AsyncCallsQueue | None = None) -> None:
    """Save through a queue, as the training scripts save asynchronously. The save ends when the queue is finalized."""
    strategy = get_default_save_sharded_strategy("unickpt" if kind == "unickpt" else "torch_dist")
    if kind != "unickpt":
        strategy = FullyParallelSaveStrategyWrapper(strategy, _group())
    state = _described(job, kind, False)
    behind = queue is not None
    request = dist_checkpointing.save(state, str(where), strategy, validate_access_integrity=False, async_sharded_save=behind)
    if queue is not None:
        queue.schedule_async_request(request)


def load(job: Job, kind: str, where: Path) -> None:
    """Load into the job's model and optimizer."""
    strategy = get_default_load_sharded_strategy(str(where))
    if kind != "unickpt":
        strategy = FullyParallelLoadStrategyWrapper(strategy, _group())
    together = kind == "unickpt"  # Megatron's validation exchanges metadata; in unickpt the ranks agree on failures
    state = _described(job, kind, True)
    loaded = dist_checkpointing.load(state, str(where), strategy, validate_access_integrity=together)
    job.modules[0].load_state_dict(loaded["model"])
    job.optimizer.load_state_dict(loaded["optimizer"])


def _described(job: Job, kind: str, is_loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {"model": job.modules[0].sharded_state_dict(metadata=_metadata(kind))}
    state["optimizer"] = job.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=_metadata(kind))
    return state


def _metadata(kind: str) -> dict[str, Any]:
    own = METADATA if kind == "unickpt" else {"distrib_optim_sharding_type": kind}
    return {**own, "chained_optim_avoid_prefix": True, "singleton_local_shards": False, "dp_cp_group": _group()}


def _group() -> Any:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)
