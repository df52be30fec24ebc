"""How long a call may take before it is a hang: by what this job's calls and steps have taken so far.

Collectives of training are periodic and alike (C4, arXiv 2406.04594, section 4): what has taken a second in each of
a hundred steps does not take a minute in the next one. Before there are steps, much is rightly slow: first
steps allocate and compile.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.middles import grouped
from unickpt.diagnosis.steps import Steps

SHORTEST_S, BEFORE_S, LONGEST_S = 5.0, 120.0, 1800.0
ENOUGH_STEPS = 5
TIMES = 3.0  # of the longest step, and of the longest call, that are known


def deadline_s(steps: Steps, waits_ns: npt.ArrayLike) -> float:
    """Seconds that a call may take.

    Args:
        steps: of every rank, as far back as they are known.
        waits_ns: ``[ranks]``, how long each has waited in its longest call; also of ranks without a step.
    """
    waits = np.asarray(waits_ns, np.float64)
    _, (middle,), counts = grouped(steps["rank"], steps["end_ns"] - steps["begin_ns"])
    if not len(waits) or (counts >= ENOUGH_STEPS).sum() < len(waits):
        return BEFORE_S
    longest = float(max(middle.max(), waits.max()))
    return min(max(SHORTEST_S, TIMES * longest / 1e9), LONGEST_S)
