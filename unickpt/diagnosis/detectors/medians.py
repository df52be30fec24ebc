"""Vectorised medians: of rows, of the other elements of a column, of groups.

One outlier does not move a median, so the outlier stands out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Floats


def row_medians(table: Floats) -> Floats:
    """Return the median of every row of ``[n, m]``, ignoring NaN; NaN for rows of NaN."""
    ordered = np.sort(table, axis=1)  # NaN come last
    count = np.maximum((~np.isnan(table)).sum(axis=1), 1)
    rows = np.arange(len(table))
    found: Floats = (ordered[rows, (count - 1) // 2] + ordered[rows, count // 2]) / 2
    return found


def medians_of_others(table: Floats) -> Floats:
    """Return for every element of ``[n, m]`` the median of the others in its column, ignoring NaN; NaN without others."""
    order = np.argsort(table, axis=0, kind="stable")
    ordered = np.concatenate([np.take_along_axis(table, order, axis=0), np.full((2, table.shape[1]), np.nan)])
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.broadcast_to(np.arange(len(table))[:, None], table.shape), axis=0)
    others = (~np.isnan(table)).sum(axis=0) - ~np.isnan(table)
    low, high = np.maximum(others - 1, 0) // 2, others // 2
    # without the element itself, all that comes after it moves up by one
    low, high = low + (place <= low), high + (place <= high)
    found: Floats = (np.take_along_axis(ordered, low, axis=0) + np.take_along_axis(ordered, high, axis=0)) / 2
    return np.where(others > 0, found, np.nan)


def grouped_quantiles(keys: npt.NDArray[Any], values: npt.NDArray[Any], *shares: float) -> tuple[npt.NDArray[Any], Floats, Any]:
    """Return quantiles of the values of every key.

    Args:
        keys: ``[n]``.
        values: ``[n]``.
        shares: quantiles, 0 to 1; default: the median.

    Returns:
        Sorted keys ``[k]``, quantiles ``[shares, k]``, and the number of values of each key ``[k]``.
    """
    order = np.argsort(values)
    order = order[np.argsort(keys[order], kind="stable")]
    keys, values = keys[order], values[order].astype(np.float64)
    first = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])) if len(keys) else np.zeros(0, np.int64)
    counts = np.diff(np.append(first, len(keys)))
    at = np.array(shares or (0.5,))[:, None] * (counts - 1)
    low, high = first + np.floor(at).astype(np.int64), first + np.ceil(at).astype(np.int64)
    return keys[first], values[low] + at % 1 * (values[high] - values[low]), counts
