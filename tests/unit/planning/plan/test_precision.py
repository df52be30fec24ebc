"""Layers in bf16 on slow ranks: the choice, on steps with a known formula and on a simulated job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import pytest

from unickpt.diagnosis.layer_costs.measured import MeasuredLayer
from unickpt.planning.plan.layers import RankLayers
from unickpt.planning.plan.precision import LayerChoice, PrecisionPlan, SlowRanks, plan_precision, slow_ranks
from unickpt.planning.replay.savings import SavedTimes
from unickpt.testing.simulation.layout import ParallelLayout
from unickpt.testing.simulation.traces import simulated_trace

LAYERS = tuple(
    LayerChoice(f"layers.{at}", full_s, full_s / 2, error)
    for at, (full_s, error) in enumerate([(0.2, 5.0), (0.1, 1.0), (0.3, 2.0), (0.2, 4.0), (0.2, 9.0)])
)
WORK = {0: 0.81, 1: 1.0}


def even(saved: Sequence[Mapping[int, float]]) -> list[float]:
    """A data parallel job: the step is that of the slowest rank."""
    return [max(WORK[rank] - each.get(rank, 0.0) for rank in WORK) for each in saved]


def planned(*groups: SlowRanks, within: float = 0.0) -> PrecisionPlan:
    return plan_precision(groups, WORK, even, within=within)


def test_the_plan_saves_what_is_needed_with_the_least_error() -> None:
    found = planned(SlowRanks((1,), 1, LAYERS))
    (group,) = found.groups
    assert found.lowest_s == found.unhindered_s == found.step_s == pytest.approx(0.81)
    assert group.needed_s == pytest.approx(0.19, abs=0.5 / 64**2)
    assert group.saved_s >= group.needed_s
    sets = [
        each for count in range(6) for each in combinations(LAYERS, count) if sum(x.saved_s for x in each) >= group.needed_s
    ]
    best = min(sets, key=lambda each: sum(x.error for x in each))
    assert group.error == sum(layer.error for layer in best)
    assert group.low == tuple(layer.name for layer in best) == ("layers.1", "layers.2")


def test_a_longer_step_that_is_allowed_gives_precision_back() -> None:
    (group,) = planned(SlowRanks((1,), 1, LAYERS), within=0.06).groups  # 0.141 s
    assert group.low == ("layers.2",)
    (none,) = planned(SlowRanks((1,), 1, LAYERS), within=0.3).groups
    assert none.low == ()
    assert none.saved_s == none.error == 0


def test_speed_that_is_not_enough_lowers_all_layers_and_shows() -> None:
    found = plan_precision(
        [SlowRanks((1,), 1, LAYERS)], {0: 0.2, 1: 1.0}, lambda saved: [1.0 - each.get(1, 0.0) for each in saved], within=0.0
    )
    assert found.groups[0].low == tuple(layer.name for layer in LAYERS)
    assert found.lowest_s == found.step_s == pytest.approx(0.5)
    assert found.unhindered_s == pytest.approx(0.0)


def test_each_group_saves_only_what_it_must() -> None:
    work = {0: 0.81, 1: 1.0, 2: 0.84}
    steps = lambda saved: [max(work[rank] - each.get(rank, 0.0) for rank in work) for each in saved]  # noqa: E731
    found = plan_precision([SlowRanks((1,), 1, LAYERS), SlowRanks((2,), 1, LAYERS)], work, steps, within=0.0)
    assert [group.low for group in found.groups] == [("layers.1", "layers.2"), ("layers.1",)]
    assert found.step_s == pytest.approx(0.81)


def test_a_layer_that_is_not_faster_stays() -> None:
    slower = LayerChoice("odd", 0.1, 0.2, 0.0)
    (group,) = planned(SlowRanks((1,), 1, (*LAYERS, slower))).groups
    assert "odd" not in group.low


def test_layers_without_an_error_stay_if_nothing_is_needed() -> None:
    free = tuple(LayerChoice(each.name, each.full_s, each.low_s, 0.0) for each in LAYERS)
    (group,) = plan_precision([SlowRanks((0,), 1, free)], WORK, even, within=0.0).groups
    assert group.low == ()


def test_microbatches_multiply_what_is_saved() -> None:
    short = tuple(LayerChoice(each.name, each.full_s / 4, each.low_s / 4, each.error) for each in LAYERS)
    (group,) = planned(SlowRanks((1,), 4, short)).groups
    assert group.low == ("layers.1", "layers.2")


def test_ranks_with_the_same_layers_are_one_group() -> None:
    def measured(rank: int, numbers: range, seconds: float) -> RankLayers:
        layers = {n: MeasuredLayer(f"layers.{n}", "layer", seconds, 2 * seconds) for n in numbers}
        layers[9] = MeasuredLayer("output_layer", "loss", seconds, seconds)  # stays as it is
        return RankLayers(rank, "cpu", 4, layers)

    found = slow_ranks(
        [measured(3, range(2), 0.1), measured(1, range(2), 0.2), measured(5, range(2, 4), 0.1)],
        lambda _number, full_s: full_s / 3, lambda name: float(name[-1]),
    )  # fmt: skip
    assert [each.ranks for each in found] == [(1, 3), (5,)]
    assert [layer.name for layer in found[0].layers] == ["layers.0", "layers.1"]
    second = found[0].layers[1]
    assert (second.name, second.error) == ("layers.1", 1.0)
    assert (second.full_s, second.low_s) == pytest.approx((0.6, 0.2))
    assert found[0].most_s == pytest.approx(4 * 2 * 0.4)


def test_saved_time_of_a_slow_rank_brings_the_sound_step() -> None:
    layout = ParallelLayout(2, 2, 2)
    sound, slow = SavedTimes(simulated_trace(layout, 6, 4)), SavedTimes(simulated_trace(layout, 6, 4, slow={5: 1.5}))
    added = slow.work_s[5] - sound.work_s[5]
    same, half, whole = slow.steps_s([{}, {5: added / 2}, {5: added}])
    assert same == pytest.approx(slow.step_s, rel=1e-9)
    assert whole == pytest.approx(sound.step_s, rel=1e-3)
    assert same > half > whole
