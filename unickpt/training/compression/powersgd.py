"""PowerSGD: a gradient matrix as a product of two thin factors. Pure functions.

Source: Vogels et al. 2019 (arXiv:1905.13727). Both factors are means over the ranks, so the ranks and the mean lose the same.
"""

from __future__ import annotations

import torch

from unickpt.training.compression.schemes import seed_of
from unickpt.training.compression.settings import POWERSGD, Compression


def factored(settings: Compression, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Return ``(rows, columns, rank)`` of a parameter that is sent as factors, or None.

    A parameter with one dimension, a small one, and one whose factors would not be smaller are sent as float32.
    """
    if settings.scheme != POWERSGD or len(shape) < 2:
        return None
    rows = shape[0]
    columns = torch.Size(shape[1:]).numel()
    rank = min(settings.rank, rows, columns)
    if rows * columns < settings.least_elements or (rows + columns) * rank >= rows * columns:
        return None
    return rows, columns, rank


def first_factor(settings: Compression, name: str, columns: int, rank: int) -> torch.Tensor:
    """Return the factor of a first step: float32 ``[columns, rank]``, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed_of(settings, name, 0))
    return torch.randn(columns, rank, generator=generator, device="cpu")


def orthogonal(factor: torch.Tensor) -> torch.Tensor:
    """Return the factor with orthonormal columns (modified Gram-Schmidt). Columns of zeros stay zeros; NaN stays NaN."""
    found = factor.clone()
    for at in range(factor.shape[1]):
        column = found[:, at]
        norm = column.norm()
        column.div_(torch.where(norm == 0, 1.0, norm))
        if at + 1 < factor.shape[1]:
            rest = found[:, at + 1 :]
            rest.sub_(torch.outer(column, column @ rest))
    return found
