"""The best cut against all cuts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unickpt.planning.plan.partition import Binds, Device, LayerCost, StageCut, Unmet, in_flight_1f1b, plan_stages


def all_cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Yield every cut of layers into stages with at least one layer each, as bounds."""
    if stages == 1:
        yield (0, layers)
        return
    for first in range(1, layers - stages + 2):
        for rest in all_cuts(layers - first, stages - 1):
            yield (0, *(first + each for each in rest))


def time_of(layers: list[LayerCost], bounds: tuple[int, ...], devices: list[Device], microbatches: int) -> float:
    """Return the step time of a cut by its definition; infinite if a stage does not fit."""
    times = []
    for stage, (begin, end) in enumerate(pairwise(bounds)):
        own, device = layers[begin:end], devices[stage]
        kept = in_flight_1f1b(stage, len(devices), microbatches)
        if sum(each.bytes + kept * each.activation_bytes for each in own) > device.memory_bytes:
            return float("inf")
        times.append(sum(each.forward_s + each.backward_s for each in own) / device.speed)
    return (microbatches - 1) * max(times) + sum(times)


numbers = st.integers(1, 9).map(float)
layer = st.builds(LayerCost, numbers, numbers, numbers, numbers)
device = st.builds(Device, st.just("device"), st.sampled_from([1.0, 2.0, 3.0]), st.sampled_from([40.0, 80.0, float("inf")]))


@settings(max_examples=150, deadline=None)
@given(st.lists(layer, min_size=1, max_size=8), st.lists(device, min_size=1, max_size=4), st.integers(1, 6), st.booleans())
def test_no_other_cut_is_faster(layers: list[LayerCost], devices: list[Device], microbatches: int, reorder: bool) -> None:
    orders = set(permutations(devices)) if reorder else {tuple(devices)}
    known = [
        time_of(layers, bounds, list(order), microbatches)
        for order in orders for bounds in (all_cuts(len(layers), len(devices)) if len(layers) >= len(devices) else ())
    ]  # fmt: skip
    least = min(known, default=float("inf"))
    found = plan_stages(layers, devices, microbatches, reorder=reorder)
    if least == float("inf"):
        assert isinstance(found, Unmet)
        return
    assert isinstance(found, StageCut)
    assert found.step_s == pytest.approx(least)
    assert time_of(layers, found.bounds, [devices[each] for each in found.kinds], microbatches) == pytest.approx(least)
    if not reorder:
        assert [devices[each] for each in found.kinds] == devices


def test_layers_of_unlike_time_are_cut_by_time_and_not_by_number() -> None:
    layers = [LayerCost(1.0, 2.0)] * 6 + [LayerCost(2.0, 4.0)] * 3
    found = plan_stages(layers, [Device()] * 2, 8)
    assert isinstance(found, StageCut)
    assert found.bounds == (0, 6, 9)
    assert found.counts == (6, 3)
    assert found.times_s == (18.0, 18.0)
    assert found.step_s == 7 * 18 + 36


def test_a_faster_device_has_more_layers_and_stands_where_memory_allows_it() -> None:
    layers = [LayerCost(1.0, 2.0, 1.0, 1.0)] * 6
    devices = [Device("fast", 2.0, 8.0), Device("slow", 1.0)]
    fixed = plan_stages(layers, devices, 4)
    free = plan_stages(layers, devices, 4, reorder=True)
    assert isinstance(fixed, StageCut)
    assert isinstance(free, StageCut)
    assert fixed.counts == (2, 4)  # the first stage keeps two microbatches: 8 bytes hold two layers
    assert free.counts == (2, 4)  # the last stage keeps one: 8 bytes hold four layers
    assert (fixed.kinds, free.kinds) == ((0, 1), (1, 0))
    assert free.step_s < fixed.step_s


def test_with_few_microbatches_the_sum_counts() -> None:
    """One microbatch goes through all stages once, so the fast device takes all that it can."""
    layers = [LayerCost(0.0, 1.0)] * 6
    devices = [Device("fast", 4.0), Device("slow", 1.0)]
    one, many = plan_stages(layers, devices, 1), plan_stages(layers, devices, 1000)
    assert isinstance(one, StageCut)
    assert isinstance(many, StageCut)
    assert one.counts == (5, 1)
    assert max(many.times_s) == 1.25


def test_the_limit_that_binds_is_named() -> None:
    layers = [LayerCost(1.0, 1.0, 10e9, 1e9)] * 4
    few = plan_stages(layers[:1], [Device()] * 2, 4)
    large = plan_stages(layers, [Device(memory_bytes=9e9)] * 2, 4)
    whole = plan_stages(layers, [Device(memory_bytes=12e9)] * 2, 4)
    assert isinstance(few, Unmet)
    assert isinstance(large, Unmet)
    assert isinstance(whole, Unmet)
    assert (few.binds, large.binds, whole.binds) == (Binds.LAYERS, Binds.LAYER_MEMORY, Binds.MEMORY)
    assert str(few) == "2 stages need at least as many layers; the model has 1"
    assert str(large).startswith("memory binds: layer 0 alone needs 11.000 GB")
    assert whole.placed == 2
    assert "at most the first 2 layers. All layers need 44.000 GB, and the devices have 24.000 GB together" in str(whole)


def test_a_hundred_layers_on_two_kinds_of_devices_take_less_than_some_seconds() -> None:
    varied = np.random.default_rng(1)
    layers = [LayerCost(float(each), float(2 * each), 1.0, 0.1) for each in varied.uniform(1, 3, 100)]
    devices = [Device("a", 1.0, 40.0), Device("b", 1.7, 25.0)] * 4
    found = plan_stages(layers, devices, 32, reorder=True)
    assert isinstance(found, StageCut)
    assert sum(found.counts) == 100
