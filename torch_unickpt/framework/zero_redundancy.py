"""``ZeroRedundancyOptimizer`` of torch: each rank steps on a part of the parameters, with an optimizer of its own."""

from __future__ import annotations

import sys
from typing import Any

import torch

from unickpt.base.errors import UnsupportedLayoutError

_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


def is_divided(optimizer: Any) -> bool:
    """Whether an optimizer divides the parameters among the ranks. Imports nothing."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def of_rank(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that has the states of this rank: its own, or the given one. Their groups have the same numbers.

    The settings of the groups are those of the given one, which each step copies.

    Raises:
        UnsupportedLayoutError: it steps within the backward pass, on functional states.
    """
    if not is_divided(optimizer):
        return optimizer
    own: Any = getattr(optimizer, "optim", None)
    if not isinstance(own, torch.optim.Optimizer):
        raise UnsupportedLayoutError(
            "ZeroRedundancyOptimizer with overlap_with_ddp=True is not supported: it has no optimizer with states of its own. "
            "Make it without overlap_with_ddp, or use fully_shard (FSDP2)"
        )
    return own
