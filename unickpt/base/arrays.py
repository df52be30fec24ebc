"""Types of arrays and shapes, and numbers of equal rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Shape = tuple[int, ...]  # of a tensor


def row_numbers(*columns: npt.NDArray[Any]) -> Ints:
    """Return int64 ``[n]``: the same number for equal rows of columns ``[n]``, from 0, in ascending order of the rows."""
    rows = np.stack([column.astype(np.int64) for column in columns], axis=1)
    found: Ints = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
    return found
