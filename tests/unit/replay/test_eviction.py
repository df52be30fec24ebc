"""The gain of an eviction against the step of the sound job."""

from __future__ import annotations

import numpy as np
import pytest

from unickpt.base.errors import FormatError
from unickpt.planning.replay.edits import like_other_parties
from unickpt.planning.replay.eviction import gain_without
from unickpt.planning.replay.price import analyse
from unickpt.testing.simulation.layout import ParallelLayout
from unickpt.testing.simulation.traces import simulated_trace

LAYOUT = ParallelLayout(1, 2, 4)


def test_the_gain_is_the_distance_to_the_sound_step() -> None:
    slow = simulated_trace(LAYOUT, 6, 4, slow={1: 1.5})
    sound_s = analyse(simulated_trace(LAYOUT, 6, 4)).step_s
    assert gain_without(slow, [1]) == pytest.approx(1 - sound_s / analyse(slow).step_s, rel=0.01)
    assert gain_without(slow, [0]) == pytest.approx(0.0, abs=1e-6)
    assert gain_without(slow, [0, 1]) == pytest.approx(gain_without(slow, [1]), rel=0.01)


def test_a_rank_that_nobody_waits_for_gains_nothing() -> None:
    """Rank 3 is as slow as rank 1 and waits with it, so that one of them alone cannot be gained."""
    both = simulated_trace(LAYOUT, 6, 4, slow={1: 1.5, 3: 1.5})
    assert gain_without(both, [1]) < 0.2 * gain_without(both, [1, 3])


def test_ranks_and_links_without_records_are_refused() -> None:
    trace = simulated_trace(LAYOUT, 4, 4)
    with pytest.raises(FormatError, match="ranks 99 have no records"):
        gain_without(trace, [99])
    with pytest.raises(FormatError, match="no other pair makes transfers like those of ranks 0 and 1"):
        gain_without(trace, [], [(0, 1)])
    assert gain_without(trace, [], [(0, 4)]) == pytest.approx(0.0, abs=1e-6)


def test_slow_links_are_compared_with_the_others_and_not_with_each_other() -> None:
    took, parties, kinds = np.array([9.0, 9.0, 9.0, 2.0, 9.0]), np.array([0, 1, 2, 3, 4]), np.array([7, 7, 7, 7, 8])
    found = like_other_parties(took, np.array([0, 1, 2]), parties, kinds)
    assert found is not None
    assert found.tolist() == [2.0, 2.0, 2.0, 2.0, 9.0]
    assert like_other_parties(took, np.array([4]), parties, kinds) is None
