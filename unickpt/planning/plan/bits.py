"""The best number of bits for each weight under a memory limit, and the best cut of layers over devices of unlike memory.

A unit of weights has options, each with a size and a predicted error. The plan has the least sum of errors that fits. For one
device this is a knapsack with one option of each unit. For several, the table of ``partition`` has the least error of each run
of layers on each kind of device. So the cut and the bits are chosen together (LLM-PQ, arXiv 2403.01136, without its latency).

Both are dynamic programmes over memory in steps. If all differences of sizes are multiples of the step, they are exact: no plan
has a smaller error. Otherwise sizes are rounded up to the step. Then the plan fits, and a better one may exist that leaves less
than one step for each unit unused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Floats
from unickpt.planning.plan.partition import Binds, Device, Unmet, any_order, chain, partition

STEPS, TABLE_STEPS = 1 << 18, 1 << 15  # most steps of memory: of one choice, and of the table of all runs of layers


@dataclass(frozen=True, slots=True)
class UnitOption:
    """A way to store a unit.

    Attributes:
        scheme: bits and group, as ``Scheme`` writes them.
        bytes: size in memory.
        error: predicted error; smaller is better, and errors of units add up.
    """

    scheme: str
    bytes: int
    error: float


@dataclass(frozen=True, slots=True)
class UnitChoices:
    """A unit and its options, at least one."""

    unit: str
    options: tuple[UnitOption, ...]


@dataclass(frozen=True, slots=True)
class LayerBits:
    """A layer, which one device holds.

    Attributes:
        fixed_bytes: memory that does not depend on the choice: norms, cache; the embedding or the head of an outer layer.
        units: weights with a choice.
    """

    fixed_bytes: int
    units: tuple[UnitChoices, ...]

    @property
    def least_bytes(self) -> int:
        """Memory with the smallest option of each unit."""
        return self.fixed_bytes + sum(min(option.bytes for option in unit.options) for unit in self.units)


@dataclass(frozen=True, slots=True)
class BitPlan:
    """A plan.

    Attributes:
        chosen: option of each unit, by layer and in the order of the units.
        bounds: first layer of each device, and the number of layers at the end.
        devices: position of the device of each stage, in the list given.
        error: sum of the errors.
        exact: whether no other plan can have a smaller error.
    """

    chosen: tuple[tuple[UnitOption, ...], ...]
    bounds: tuple[int, ...]
    devices: tuple[int, ...]
    error: float
    exact: bool


def plan_bits(layers: Sequence[LayerBits], devices: Sequence[Device], *, reorder: bool = False) -> BitPlan | Unmet:
    """Return the plan with the least error, or the limit that binds.

    Args:
        layers: all layers of the model, in order.
        devices: devices in the order of the pipeline; only their memory is used.
        reorder: whether devices may stand in another order.
    """
    if len(layers) < len(devices):
        return Unmet(Binds.LAYERS, len(layers), len(devices))
    bounds: tuple[int, ...] = (0, len(layers))
    order: tuple[int, ...] = (0,)
    exact = True
    if len(devices) == 1:
        if sum(layer.least_bytes for layer in layers) > devices[0].memory_bytes:
            return _unmet(layers, devices)
    else:
        memories = sorted({device.memory_bytes for device in devices})
        tables, exact = _tables(layers, memories)
        kinds = [memories.index(device.memory_bytes) for device in devices]
        if reorder:
            stages = range(len(devices))
            counts = [kinds.count(kind) for kind in range(len(memories))]
            choices = any_order(counts, {(kind, stage): tables[kind] for kind in range(len(memories)) for stage in stages})
        else:
            choices = chain([tables[kind] for kind in kinds], kinds)
        found = partition(choices, 1)  # one microbatch: the sum of all costs
        if found is None:
            return _unmet(layers, devices)
        bounds, order = found.bounds, _positions(found.kinds, kinds)
    chosen: list[tuple[UnitOption, ...]] = []
    for device, begin, end in zip(order, bounds, bounds[1:], strict=False):
        stage, fine = _choose(layers[begin:end], devices[device].memory_bytes)
        chosen += stage
        exact = exact and fine
    error = math.fsum(option.error for layer in chosen for option in layer)
    return BitPlan(tuple(chosen), bounds, order, error, exact)


def _positions(kinds: Sequence[int], given: Sequence[int]) -> tuple[int, ...]:
    """Return devices of these kinds, each once."""
    left = list(enumerate(given))
    found = []
    for kind in kinds:
        at = next(entry for entry in left if entry[1] == kind)
        left.remove(at)
        found.append(at[0])
    return tuple(found)


def _unmet(layers: Sequence[LayerBits], devices: Sequence[Device]) -> Unmet:
    largest = max(device.memory_bytes for device in devices)
    needed = [layer.least_bytes for layer in layers]
    at = next((at for at, size in enumerate(needed) if size > largest), None)
    if at is not None:
        return Unmet(Binds.LAYER_MEMORY, needed[at], largest, layer=at)
    placed = 0
    for device in devices:
        room = device.memory_bytes
        while placed < len(layers) and needed[placed] <= room:
            room -= needed[placed]
            placed += 1
    return Unmet(Binds.MEMORY, sum(needed), sum(device.memory_bytes for device in devices), placed=placed)


def _options(unit: UnitChoices) -> list[UnitOption]:
    """Return the options that can be best, from the smallest on: each one larger has a smaller error."""
    found: list[UnitOption] = []
    for option in sorted(unit.options, key=lambda option: (option.bytes, option.error)):
        if not found or option.error < found[-1].error:
            found.append(option)
    return found


def _grain(layers: Sequence[LayerBits], room: float, steps: int) -> tuple[int, bool]:
    """Return the step of memory in bytes, and whether all sizes are multiples of it.

    Args:
        layers: layers with the options.
        room: memory above the smallest options.
        steps: most steps.
    """
    units = [_options(unit) for layer in layers for unit in layer.units]
    common = math.gcd(*(option.bytes - own[0].bytes for own in units for option in own)) or 1
    most = sum(own[-1].bytes - own[0].bytes for own in units)
    wanted = math.ceil(min(room, most) / steps)
    return (common, True) if common >= wanted else (wanted, False)


def _added(best: Floats, own: Sequence[UnitOption], grain: int) -> tuple[Floats, npt.NDArray[np.uint8]]:
    """Return the least errors with one more unit by steps of memory, and the option that gives each.

    Args:
        best: float64 ``[steps + 1]``: least error with at most that many steps above the smallest options.
        own: options of the unit, from the smallest on.
        grain: bytes of a step.
    """
    found = best + own[0].error
    taken = np.zeros(len(best), np.uint8)
    for number, option in enumerate(own[1:], 1):
        cost = -(-(option.bytes - own[0].bytes) // grain)
        if cost >= len(best):
            break
        value = best[: len(best) - cost] + option.error
        better = value < found[cost:]
        found[cost:][better] = value[better]
        taken[cost:][better] = number
    return found, taken


def _choose(layers: Sequence[LayerBits], memory_bytes: float) -> tuple[list[tuple[UnitOption, ...]], bool]:
    """Return the best options of layers that fit on one device, and whether they are exact."""
    room = memory_bytes - sum(layer.least_bytes for layer in layers)
    grain, exact = _grain(layers, room, STEPS)
    most = sum(max(option.bytes for option in unit.options) for layer in layers for unit in layer.units)
    best: Floats = np.zeros(int(min(room, most) // grain) + 1)
    steps = []
    for unit in (unit for layer in layers for unit in layer.units):
        own = _options(unit)
        best, taken = _added(best, own, grain)
        steps.append((own, taken))
    at = len(best) - 1
    picked: list[UnitOption] = []
    for own, taken in reversed(steps):
        option = own[taken[at]]
        at -= -(-(option.bytes - own[0].bytes) // grain)
        picked.append(option)
    each = iter(reversed(picked))
    return [tuple(next(each) for _ in layer.units) for layer in layers], exact


def _tables(layers: Sequence[LayerBits], memories: Sequence[float]) -> tuple[list[Floats], bool]:
    """Return for each memory float64 ``[layers + 1, layers + 1]``: least error of a run of layers; infinite if it does not fit.

    Also returns whether they are exact.
    """
    count = len(layers)
    found: list[Floats] = [np.full((count + 1, count + 1), np.inf) for _ in memories]
    room = max(memories) - min(layer.least_bytes for layer in layers)
    grain, exact = _grain(layers, room, TABLE_STEPS)
    most = sum(max(option.bytes for option in unit.options) for layer in layers for unit in layer.units)
    for begin in range(count):
        best: Floats = np.zeros(int(max(min(room, most), 0) // grain) + 1)
        used = 0
        for end in range(begin + 1, count + 1):
            used += layers[end - 1].least_bytes
            for unit in layers[end - 1].units:
                best, _ = _added(best, _options(unit), grain)
            for table, memory in zip(found, memories, strict=True):
                if used <= memory:
                    table[begin, end] = best[min(int((memory - used) // grain), len(best) - 1)]
    return found, exact
