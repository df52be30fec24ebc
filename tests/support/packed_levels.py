"""The levels in packed words, by the tests' own code."""

from __future__ import annotations

import torch


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the levels of packed words, int8 ``[rows, in]``."""
    values = words.contiguous().view(torch.uint8)
    if bits == 4:
        values = torch.stack((values & 15, values >> 4), dim=2).flatten(1)
    return (values.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
