"""Round to nearest, symmetric around zero, as compressed-tensors computes it, and the packed form of its files.

The scale of a group is its largest absolute value over 7.5 (4 bits) or 127.5 (8 bits), in the dtype of the file. A value is the
nearest of the levels -8 to 7 (-128 to 127), times the scale. Ties go to the even level. The division is in float32.
"""

from __future__ import annotations

import sys

import torch

from unickpt.transform.quantise.scheme import Scheme


def rounded(rows: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Round whole rows of a weight.

    Args:
        rows: floating point ``[rows, in]``, finite.
        scheme: bits below 16, and a group that divides ``in``.
        dtype: dtype of the scales.

    Returns:
        Levels, int8 ``[rows, in]``, and scales ``[rows, groups]``.
    """
    grouped = rows.float().view(*scheme.scales(rows.shape), -1)
    most = 2 ** (scheme.bits - 1)
    scales = (grouped.abs().amax(2) / (most - 0.5)).to(dtype)
    scales[scales == 0] = torch.finfo(dtype).eps  # a group of zeros
    levels = (grouped / scales.float()[:, :, None]).round_().clamp_(-most, most - 1)
    return levels.to(torch.int8).flatten(1), scales


def restored(levels: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the weight that the levels stand for, float32 ``[rows, in]``."""
    values: torch.Tensor = levels.float().view(*scales.shape, -1) * scales.float()[:, :, None]
    return values.flatten(1)


def packed(levels: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack levels into words: int32 ``[rows, in * bits / 32]``, the first value in the lowest bits.

    Args:
        levels: int8 ``[rows, in]``; a row fills whole words.
        bits: 4 or 8.
    """
    _need_little_endian()
    values: torch.Tensor = (levels.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
    if bits == 4:
        values = values[:, 0::2] | (values[:, 1::2] << 4)
    return values.contiguous().view(torch.int32)


def _need_little_endian() -> None:
    if sys.byteorder != "little":
        raise NotImplementedError("packed weights are only supported on little-endian machines")
