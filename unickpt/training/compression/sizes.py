"""Bytes that a rank sends in one exchange. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable

from unickpt.training.compression.powersgd import factored
from unickpt.training.compression.schemes import codec_of
from unickpt.training.compression.settings import Compression


def _row_bytes(settings: Compression, shape: tuple[int, ...], world: int) -> int:
    """Return the bytes of one rank's slice of a parameter. ``powersgd`` sends two factors, all others their code of it."""
    elements = math.prod(shape)
    found = factored(settings, shape)
    if found is not None:
        rows, columns, rank = found
        return 4 * (math.ceil(rows * rank / world) + math.ceil(columns * rank / world))
    return codec_of(settings, elements).size_bytes(math.ceil(elements / world))


def sent_bytes(settings: Compression, shapes: Iterable[tuple[int, ...]], world: int) -> int:
    """Return the bytes that a rank sends to other ranks for the mean of parameters of these shapes.

    A reduce-scatter and an all-gather of the compressed slices: ``2 (world - 1)`` slices, as a ring all-reduce sends.
    """
    return 2 * (world - 1) * sum(_row_bytes(settings, shape, world) for shape in shapes)
