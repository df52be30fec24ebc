"""Random values for free elements. A value depends on the seed, the name of the tensor and the position alone.

Blocks can therefore be read in any order and of any size. The generator is SplitMix64 (Steele, Lea and Flood, 2014) as a hash
of the position, with the Box-Muller transform.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from unickpt.checkpoint.format.boxes import Box, strides_of

_STEP, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def normal(seed: int, name: str, shape: Sequence[int], box: Box, std: float) -> torch.Tensor:
    """Return normally distributed values.

    Args:
        seed: seed.
        name: name of the tensor.
        shape: shape of the whole tensor.
        box: box to return.
        std: standard deviation.

    Returns:
        float64 ``box.shape``; a value is finite and within 12 standard deviations.
    """
    at = np.zeros((), np.uint64)
    for dim, step in enumerate(strides_of(shape)):
        where = np.arange(box.start[dim], box.start[dim] + box.shape[dim], dtype=np.uint64) * np.uint64(step)
        at = at[..., None] + where
    key = np.uint64(int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little"))
    first, second = _uniform(at * np.uint64(2) + key), _uniform(at * np.uint64(2) + np.uint64(1) + key)
    found = np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second) * std
    return torch.from_numpy(np.asarray(found).reshape(box.shape))


def _uniform(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Return uniform values in (0, 1] by a hash of integers."""
    z = state * _STEP  # wraps
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    z ^= z >> np.uint64(31)
    return ((z >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53
