"""Steps of all ranks side by side."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Floats
from unickpt.diagnosis.snapshot.steps import StepRows

WARM_UP = 5  # steps that are not compared
COLUMNS = ("begin_ns", "end_ns", "own_ns", "garbage_ns", "data_ns", "long", "calls")


def step_tables(steps: StepRows, over: int) -> tuple[npt.NDArray[np.int32], Floats, npt.NDArray[np.uint32]]:
    """Return the ranks, for the newest steps that all of them have ``[column, rank, step]``, and the numbers of these steps."""
    steps = steps[steps["number"] > WARM_UP]
    ranks, row = np.unique(steps["rank"], return_inverse=True)
    numbers, count = np.unique(steps["number"], return_counts=True)
    numbers = numbers[count == len(ranks)][-over:]
    keep = np.isin(steps["number"], numbers)
    table = np.full((len(COLUMNS), len(ranks), len(numbers)), np.nan)
    at = np.searchsorted(numbers, steps["number"][keep])
    for place, name in enumerate(COLUMNS):
        table[place, row[keep], at] = steps[name][keep]
    return ranks, table, numbers
