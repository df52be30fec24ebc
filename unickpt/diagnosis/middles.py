"""Medians of many things at once: of rows, of all others in a column, of groups.

A middle is not moved by what one of many does, which is what is looked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def middles(table: Floats) -> Floats:
    """Median of every row of ``[n, m]`` without its NaN; NaN where nothing else is."""
    ordered = np.sort(table, axis=1)  # NaN come last
    count = np.maximum((~np.isnan(table)).sum(axis=1), 1)
    rows = np.arange(len(table))
    found: Floats = (ordered[rows, (count - 1) // 2] + ordered[rows, count // 2]) / 2
    return found


def middles_of_others(table: Floats) -> Floats:
    """Of ``[n, m]``, for every element the median of the others in its column, without NaN; NaN where there is none."""
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


def grouped(keys: npt.NDArray[Any], values: npt.NDArray[Any], *shares: float) -> tuple[npt.NDArray[Any], Floats, Any]:
    """Quantiles of the values of every key.

    Args:
        keys: ``[n]``.
        values: ``[n]``.
        shares: of a key's values that are below; one half, if there is none, for the median.

    Returns:
        Keys ``[k]``, in order; quantiles ``[shares, k]``; how many values each key has.
    """
    order = np.argsort(values)
    order = order[np.argsort(keys[order], kind="stable")]
    keys, values = keys[order], values[order].astype(np.float64)
    first = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])) if len(keys) else np.zeros(0, np.int64)
    counts = np.diff(np.append(first, len(keys)))
    at = np.array(shares or (0.5,))[:, None] * (counts - 1)
    low, high = first + np.floor(at).astype(np.int64), first + np.ceil(at).astype(np.int64)
    return keys[first], values[low] + at % 1 * (values[high] - values[low]), counts
