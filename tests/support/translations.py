"""Translations with numpy, element by element."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.transform.dialects.translation import Translation

Array = npt.NDArray[Any]


def carried_out(found: Translation, wanted: Mapping[str, Array], given: Mapping[str, Array]) -> dict[str, Array]:
    """Return the targets, filled element by element from the pieces. Other elements are 0."""
    made = {}
    for name, like in wanted.items():
        made[name] = np.zeros(like.shape, like.dtype)
        for piece in found.pieces[name]:
            for part in piece.reads():
                box = part.source_box
                data = given[part.source][box.slices()]
                view = np.lib.stride_tricks.as_strided(
                    made[name].reshape(-1)[_flat(part.target_start, like.shape) :],
                    data.shape,
                    [step * like.itemsize for step in part.strides(_strides(like.shape))],
                )
                view += (data * part.weight).astype(like.dtype)
    return made


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[at + 1 :]) for at in range(len(shape))]


def _flat(start: Sequence[int], shape: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(start, _strides(shape), strict=True))


def numbered(shapes: Mapping[str, Sequence[int]]) -> dict[str, Array]:
    """Return arrays with distinct numbers."""
    found, at = {}, 1
    for name, shape in shapes.items():
        size = math.prod(shape)
        found[name] = np.arange(at, at + size).reshape(shape)
        at += size
    return found
