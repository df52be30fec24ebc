"""Layers of a DeepSpeed job that compute in a dtype of their own, by a plan (option ``precision``)."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ds_unickpt.framework import internals
from ds_unickpt.measuring.timed_layers import layers_of
from unickpt.training.precision.apply import apply_policy, log
from unickpt.training.precision.policy import read_policy


def begin(engine: Any, path: str) -> None:
    """Let the layers of a plan compute in its dtype, if this rank is one of its ranks.

    The module keeps its weights: checkpoints are the same with and without a plan. A plan that this job cannot have is a
    warning, and the layers compute as they would without.

    Raises:
        ConfigError: the file (of ``unickpt plan precision``) cannot be read, or is no plan.
    """
    layers = {each.name: each.module for each in layers_of(engine.module)}
    whole = not engine.pipeline_parallelism
    applied = apply_policy(
        read_policy(path), layers, path, rank=dist.get_rank(), world=dist.get_world_size(), all_layers=whole,
        together=internals.groups_within_layers(engine),
    )  # fmt: skip
    log(applied, dist.get_rank())
