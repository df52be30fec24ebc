"""How long a call may take before it is a hang: by what this job's calls and steps have taken so far.

Collectives of training are periodic and alike (C4, arXiv 2406.04594, section 4): what has taken a second in each of
a hundred steps does not take a minute in the next one. Before there are steps, much is rightly slow: first
steps allocate and compile.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from unickpt.diagnosis.slowness import Step

SHORTEST_S, BEFORE_S, LONGEST_S = 5.0, 120.0, 1800.0
ENOUGH_STEPS = 5
TIMES = 3.0  # of the longest step, and of the longest call, that are known


def deadline_s(steps: Mapping[int, Sequence[Step]], waits_ns: Sequence[float]) -> float:
    """Seconds that a call may take.

    Args:
        steps: of every rank, as far back as they are known.
        waits_ns: how long ranks have waited in their calls, the longest of each rank.
    """
    known = [own for own in steps.values() if len(own) >= ENOUGH_STEPS]
    if not known or len(known) < len(steps):
        return BEFORE_S
    longest_step = max(statistics.median(step.end_ns - step.begin_ns for step in own) for own in known)
    longest = max([longest_step, *waits_ns])
    return min(max(SHORTEST_S, TIMES * longest / 1e9), LONGEST_S)
