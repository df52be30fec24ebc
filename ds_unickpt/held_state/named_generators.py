"""The named generators of DeepSpeed (``deepspeed.checkpointing.get_cuda_rng_tracker``), as for dropout in divided layers.

A program adds each with a seed of its tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker

KEY = "named_generators"  # of the objects of a rank


def captured() -> dict[str, torch.Tensor]:
    """Return the states by name."""
    return dict(get_cuda_rng_tracker().get_states())


def restore(saved: Mapping[str, torch.Tensor]) -> list[str]:
    """Set the generators that this process has. Return the names of the others."""
    own = captured()
    fitting = {name: state for name, state in saved.items() if name in own and own[name].shape == state.shape}
    get_cuda_rng_tracker().set_states({**own, **fitting})
    return sorted(saved.keys() - fitting.keys())
