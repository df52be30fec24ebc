"""What the caller of ``load_checkpoint`` asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Wanted:
    """Arguments of a load.

    Attributes:
        strict: module parameters and buffers have to match the checkpoint's one to one.
        optimizer: optimizer states and hyperparameters as well as weights.
        scheduler: the learning-rate scheduler's state.
        module_only: weights and nothing else; counters, generators and client state stay.
        custom_load_fn: ``f(src=full state dict, dst=module)`` instead of loading the weights here.
    """

    strict: bool = True
    optimizer: bool = True
    scheduler: bool = True
    module_only: bool = False
    custom_load_fn: Callable[..., Any] | None = None
