"""Plans of bits, compared with all plans of small models."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from unickpt.planning.plan import bits
from unickpt.planning.plan.bits import BitPlan, LayerBits, UnitChoices, UnitOption, plan_bits
from unickpt.planning.plan.partition import Binds, Device, Unmet


def model(rng: random.Random, layers: int, units: int, grain: int = 1) -> list[LayerBits]:
    """Layers with random sizes and errors; errors do not always fall with the size."""

    def options() -> tuple[UnitOption, ...]:
        sizes = [grain * rng.randint(1, 30) for _ in range(rng.randint(1, 3))]
        return tuple(UnitOption(str(at), size, round(rng.random() * 100 / size, 3)) for at, size in enumerate(sizes))

    return [
        LayerBits(rng.randint(0, 9), tuple(UnitChoices(f"{layer}.{unit}", options()) for unit in range(units)))
        for layer in range(layers)
    ]


def least_error(layers: list[LayerBits], memories: list[float]) -> float:
    """Try all cuts and all options. Infinite if nothing fits."""
    best = math.inf
    count = len(layers)
    for inner in itertools.combinations(range(1, count), len(memories) - 1):
        bounds = (0, *inner, count)
        total = 0.0
        for memory, begin, end in zip(memories, bounds, bounds[1:], strict=False):
            units = [unit.options for layer in layers[begin:end] for unit in layer.units]
            room = memory - sum(layer.fixed_bytes for layer in layers[begin:end])
            errors = [sum(o.error for o in each) for each in itertools.product(*units) if sum(o.bytes for o in each) <= room]
            total += min(errors, default=math.inf)
        best = min(best, total)
    return best


def check(found: BitPlan | Unmet, layers: list[LayerBits], memories: list[float], best: float) -> None:
    """The plan fits and has the least error; there is none only if nothing fits."""
    if isinstance(found, Unmet):
        assert best == math.inf
        return
    assert found.error == pytest.approx(best)
    for device, begin, end in zip(found.devices, found.bounds, found.bounds[1:], strict=False):
        used = sum(layer.fixed_bytes for layer in layers[begin:end])
        used += sum(option.bytes for chosen in found.chosen[begin:end] for option in chosen)
        assert used <= memories[device]
    for layer, chosen in zip(layers, found.chosen, strict=True):
        assert all(option in unit.options for unit, option in zip(layer.units, chosen, strict=True))


@pytest.mark.parametrize("seed", range(30))
def test_one_device_has_the_best_of_all_plans(seed: int) -> None:
    rng = random.Random(seed)
    layers = model(rng, rng.randint(1, 3), 2)
    memory = float(rng.randint(5, 160))
    found = plan_bits(layers, [Device(memory_bytes=memory)])
    check(found, layers, [memory], least_error(layers, [memory]))
    assert isinstance(found, Unmet) or found.exact


@pytest.mark.parametrize("seed", range(30))
def test_unlike_devices_have_the_best_of_all_cuts_and_plans(seed: int) -> None:
    rng = random.Random(seed)
    layers = model(rng, 5, 1)
    memories = [float(rng.randint(10, 90)) for _ in range(rng.randint(2, 3))]
    devices = [Device(str(memory), memory_bytes=memory) for memory in memories]
    check(plan_bits(layers, devices), layers, memories, least_error(layers, memories))
    best = min(least_error(layers, list(order)) for order in itertools.permutations(memories))
    found = plan_bits(layers, devices, reorder=True)
    check(found, layers, memories, best)
    if isinstance(found, BitPlan):
        assert sorted(found.devices) == list(range(len(devices)))


def test_a_coarse_step_still_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "STEPS", 40)
    monkeypatch.setattr(bits, "TABLE_STEPS", 40)
    for seed in range(20):
        layers = model(random.Random(seed), 4, 2, grain=1)
        memories = [90.0, 70.0]
        found = plan_bits(layers, [Device(memory_bytes=memory) for memory in memories])
        best = least_error(layers, memories)
        if isinstance(found, BitPlan):
            assert found.error >= best - 1e-9
            assert found.error <= best * 1.5
            check(BitPlan(found.chosen, found.bounds, found.devices, best, found.exact), layers, memories, best)
            if found.error > best + 1e-9:
                assert not found.exact


def test_the_limit_that_binds_is_named() -> None:
    def layer(size: int) -> LayerBits:
        return LayerBits(0, (UnitChoices("unit", (UnitOption("4", size, 1.0),)),))

    layers = [layer(10), layer(30), layer(10)]
    found = plan_bits(layers, [Device(memory_bytes=20), Device(memory_bytes=25)])
    assert found == Unmet(Binds.LAYER_MEMORY, 30, 25, layer=1)
    found = plan_bits(layers, [Device(memory_bytes=30), Device(memory_bytes=15)])
    assert found == Unmet(Binds.MEMORY, 50, 45, placed=1)
    assert isinstance(plan_bits(layers, [Device(memory_bytes=49)]), Unmet)
    assert plan_bits(layers[:1], [Device(), Device()]) == Unmet(Binds.LAYERS, 1, 2)
