"""Types of arrays and shapes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Shape = tuple[int, ...]  # of a tensor
