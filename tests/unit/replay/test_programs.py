"""Step times of schedules against their closed forms."""

from __future__ import annotations

import pytest

from unickpt.planning.replay.programs import in_flight, order_of, step_time


def even(stages: int, chunks: int = 1, value: float = 1.0) -> list[list[float]]:
    return [[value / chunks] * chunks for _ in range(stages)]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 7, 16])
def test_even_stages_take_a_forward_and_a_backward_for_each_microbatch_and_fill_the_pipeline(
    stages: int, microbatches: int
) -> None:
    found = step_time(even(stages), even(stages, value=2.0), microbatches)
    assert found == pytest.approx((microbatches + stages - 1) * 3.0)


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 4, 16), (2, 3, 2)])
def test_interleaving_divides_the_time_to_fill_the_pipeline(stages: int, chunks: int, microbatches: int) -> None:
    """Narayanan et al., 2104.04473, section 2.2.2: the bubble is ``(p - 1) (f + b) / v``."""
    found = step_time(even(stages, chunks), even(stages, chunks, 2.0), microbatches)
    assert found == pytest.approx((microbatches + (stages - 1) / chunks) * 3.0)


def test_the_slowest_stage_sets_the_pace() -> None:
    """Stage 1 begins at 1, works for 60, waits for 1 before its first backward, and stage 0 ends 2 later."""
    forward, backward = [[1.0], [2.0], [1.0]], [[2.0], [4.0], [2.0]]
    assert step_time(forward, backward, 10) == pytest.approx(1 + 60 + 1 + 2)


def test_transfers_that_are_on_the_path_take_time() -> None:
    # one microbatch passes two links forward and two backward
    assert step_time(even(3), even(3, value=2.0), 1, 0.25) == pytest.approx(9 + 4 * 0.25)


def test_activations_of_1f1b_are_those_of_the_stages_below() -> None:
    assert [in_flight(stage, 4, 8) for stage in range(4)] == [[4], [3], [2], [1]]
    assert [in_flight(stage, 4, 2) for stage in range(4)] == [[2], [2], [2], [1]]
    assert in_flight(0, 2, 4, 2) == [3, 2]
    assert sum(in_flight(0, 4, 8, 2)) == 11  # of half the layers each: 5.5 microbatches instead of 4


def test_every_computation_is_made_once() -> None:
    for stage in range(4):
        found = order_of(stage, 4, 8, 3)
        assert len(set(found)) == len(found) == 2 * 8 * 3
