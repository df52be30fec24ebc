"""Masters that TransformerEngine keeps as 16 bits beside a bf16 weight (``store_param_remainders``).

The weight is the upper half of the master, rounded up if the lower half, as a signed number, is negative. The remainder is the
lower half (transformer_engine/common/multi_tensor/adam.cu, ``AdamFunctorMasterParamRemainder``). This rounds a tie up, and a
cast to bf16 rounds it to even: a weight and a remainder belong together.
"""

from __future__ import annotations

import torch


def joined(weights: torch.Tensor, remainders: torch.Tensor) -> torch.Tensor:
    """Return the masters, float32, of bf16 weights and int16 remainders of the same shape."""
    upper = weights.detach().contiguous().view(torch.int16).to(torch.int32) - (remainders < 0).to(torch.int32)
    return ((upper << 16) | (remainders.to(torch.int32) & 0xFFFF)).view(torch.float32)


def divided(masters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bf16 weights and int16 remainders of float32 masters; the inverse of ``joined``."""
    bits = masters.detach().contiguous().view(torch.int32)
    remainders = (bits << 16) >> 16
    weights = (bits >> 16) + (remainders < 0).to(torch.int32)
    return ((weights << 16) >> 16).to(torch.int16).view(torch.bfloat16), remainders.to(torch.int16)
