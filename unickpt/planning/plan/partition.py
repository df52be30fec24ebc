"""The best cut of a chain of layers into contiguous stages.

The cost of a stage is a table: ``costs[i, j]`` is its time for the layers ``i`` to ``j - 1``, infinite if they do not fit. So
layers, devices and numbers of bits may have any cost. ``stage_costs`` makes the table from times and memory of layers.

A step of ``m`` microbatches takes ``(m - 1) * slowest + sum`` of the stage times: the pipeline fills once, and then the slowest
stage sets the pace. ``partition`` finds the cut with the least such time, and of several the one with the least slowest stage.
It is exact: a dynamic programme over all cuts for each bound of the slowest stage that can still win.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Floats


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer on a device of speed 1.

    Attributes:
        forward_s, backward_s: time for one microbatch.
        bytes: memory that it needs at all times: weights, gradients, optimizer states.
        activation_bytes: memory that it keeps for each microbatch between its forward and backward computation.
    """

    forward_s: float
    backward_s: float
    bytes: float = 0.0
    activation_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Device:
    """A kind of device.

    Attributes:
        name: for messages and results.
        speed: multiple of the speed at which the layers were measured.
        memory_bytes: memory for weights, states and activations.
    """

    name: str = "device"
    speed: float = 1.0
    memory_bytes: float = float("inf")


class Binds(enum.Enum):
    """Limit that no plan can meet."""

    LAYERS = "layers"
    MEMORY = "memory"
    LAYER_MEMORY = "memory of one layer"


@dataclass(frozen=True, slots=True)
class Unmet:
    """There is no plan.

    Attributes:
        binds: the limit.
        needed, available: in bytes, or as numbers of layers and stages.
        layer: layer that fits nowhere; -1 for others.
        placed: layers that fit at most, from the first one on.
    """

    binds: Binds
    needed: float
    available: float
    layer: int = -1
    placed: int = 0

    def __str__(self) -> str:
        if self.binds is Binds.LAYERS:
            return f"{self.available:.0f} stages need at least as many layers; the model has {self.needed:.0f}"
        if self.binds is Binds.LAYER_MEMORY:
            return (
                f"memory binds: layer {self.layer} alone needs {self.needed / 1e9:.3f} GB, and the largest device has "
                f"{self.available / 1e9:.3f} GB"
            )
        return (
            f"memory binds: the stages hold at most the first {self.placed} layers. All layers need "
            f"{self.needed / 1e9:.3f} GB, and the devices have {self.available / 1e9:.3f} GB together"
        )


@dataclass(frozen=True, slots=True)
class StageCut:
    """A cut into stages.

    Attributes:
        bounds: first layer of each stage, and the number of layers at the end: DeepSpeed's ``parts``.
        kinds: kind of device of each stage.
        times_s: time of each stage for one microbatch.
        step_s: ``(microbatches - 1) * max(times_s) + sum(times_s)``.
    """

    bounds: tuple[int, ...]
    kinds: tuple[int, ...]
    times_s: tuple[float, ...]
    step_s: float

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of layers of each stage."""
        return tuple(end - begin for begin, end in zip(self.bounds, self.bounds[1:], strict=False))


@dataclass(frozen=True, slots=True)
class StageChoice:
    """One way to go on: a stage on a device of one kind.

    Attributes:
        before, after: states, numbered so that ``before < after``. State 0 has no stage; the last state has all.
        kind: kind of device.
        costs: float64 ``[layers + 1, layers + 1]``, seconds for one microbatch of the layers from row to column.
    """

    before: int
    after: int
    kind: int
    costs: Floats


def stage_costs(layers: Sequence[LayerCost], device: Device, in_flight: int) -> Floats:
    """Return float64 ``[layers + 1, layers + 1]``: time of the layers ``i`` to ``j - 1``; infinite if empty or too large.

    Args:
        layers: all layers of the model.
        device: device of the stage.
        in_flight: microbatches whose activations it keeps at once.
    """
    spent = _sums([each.forward_s + each.backward_s for each in layers]) / device.speed
    used = _sums([each.bytes + in_flight * each.activation_bytes for each in layers])
    found: Floats = np.where(used <= device.memory_bytes, spent, np.inf)
    found[np.tril_indices(len(layers) + 1)] = np.inf
    return found


def _sums(values: Sequence[float]) -> Floats:
    total = np.append(0.0, np.cumsum(values))
    found: Floats = total[None, :] - total[:, None]
    return found


def chain(tables: Sequence[Floats], kinds: Sequence[int] | None = None) -> list[StageChoice]:
    """Return the choices for stages in a given order: one table for each stage."""
    return [StageChoice(at, at + 1, kinds[at] if kinds else at, table) for at, table in enumerate(tables)]


def any_order(counts: Sequence[int], table: Mapping[tuple[int, int], Floats]) -> list[StageChoice]:
    """Return the choices for devices that may stand in any order.

    Args:
        counts: number of devices of each kind.
        table: kind and stage -> costs.
    """
    states = sorted(np.ndindex(*(count + 1 for count in counts)), key=lambda state: (sum(state), state))
    number = {state: at for at, state in enumerate(states)}
    return [
        StageChoice(at, number[(*state[:kind], state[kind] + 1, *state[kind + 1 :])], kind, table[kind, sum(state)])
        for state, at in number.items() for kind in range(len(counts)) if state[kind] < counts[kind]
    ]  # fmt: skip


def partition(choices: Sequence[StageChoice], microbatches: int) -> StageCut | None:
    """Return the best cut; None if no cut has a finite cost."""
    least = _least(choices, bottleneck=True)
    if least is None:
        return None
    pace = max(least.times_s)
    best = _rated(_least(choices, limit=pace) or least, microbatches)
    limit = np.inf
    while True:
        found = _least(choices, limit=limit)
        if found is None:
            break
        found = _rated(found, microbatches)
        slowest, total = max(found.times_s), sum(found.times_s)
        if (found.step_s, slowest) < (best.step_s, max(best.times_s)):
            best = found
        # Every cut with a lower slowest stage has at least this sum, and no slowest stage is below ``pace``.
        if slowest <= pace or (microbatches - 1) * pace + total >= best.step_s:
            break
        # A cut that wins has a slowest stage below this: its sum is at least ``total``.
        limit = min(np.nextafter(slowest, 0.0), (best.step_s - total) / (microbatches - 1) if microbatches > 1 else np.inf)
    return best


def _rated(found: StageCut, microbatches: int) -> StageCut:
    step_s = (microbatches - 1) * max(found.times_s) + sum(found.times_s)
    return StageCut(found.bounds, found.kinds, found.times_s, step_s)


def _least(choices: Sequence[StageChoice], *, bottleneck: bool = False, limit: float = np.inf) -> StageCut | None:
    """Return the cut with the least slowest stage, or with the least sum, whose stages take at most ``limit``.

    ``step_s`` is that value.
    """
    last = max(each.after for each in choices)
    layers = len(choices[0].costs) - 1
    best: Floats = np.full((last + 1, layers + 1), np.inf)
    best[0, 0] = 0.0
    came = np.full((last + 1, layers + 1, 2), -1, np.int64)  # choice and first layer
    columns = np.arange(layers + 1)
    for at, choice in sorted(enumerate(choices), key=lambda each: each[1].after):
        costs = choice.costs if limit == np.inf else np.where(choice.costs <= limit, choice.costs, np.inf)
        before = best[choice.before][:, None]
        values = np.maximum(before, costs) if bottleneck else before + costs
        first = np.argmin(values, axis=0)
        value = values[first, columns]
        better = value < best[choice.after]
        best[choice.after][better] = value[better]
        came[choice.after][better] = np.stack([np.full(layers + 1, at), first], axis=1)[better]
    if not np.isfinite(best[last, layers]):
        return None
    state, end = last, layers
    path: list[tuple[int, int, int]] = []
    while state:
        at, begin = came[state, end].tolist()
        path.append((at, begin, end))
        state, end = choices[at].before, begin
    path.reverse()
    times = tuple(float(choices[at].costs[begin, end]) for at, begin, end in path)
    bounds = (0, *(end for _, _, end in path))
    return StageCut(bounds, tuple(choices[at].kind for at, _, _ in path), times, float(best[last, layers]))


def in_flight_1f1b(stage: int, stages: int, microbatches: int) -> int:
    """Return how many microbatches a stage keeps at once under the schedule 1F1B."""
    return min(stages - stage, microbatches)


def plan_stages(
    layers: Sequence[LayerCost], devices: Sequence[Device], microbatches: int, *, reorder: bool = False
) -> StageCut | Unmet:
    """Return the best cut of layers over devices under the schedule 1F1B, or the limit that binds.

    Args:
        layers: all layers.
        devices: device of each stage, in the order of the pipeline.
        microbatches: microbatches of a step.
        reorder: whether unlike devices may stand in another order.

    Returns:
        ``kinds`` of a partition are positions in ``devices``, of the first device that is alike.
    """
    stages = len(devices)
    if len(layers) < stages:
        return Unmet(Binds.LAYERS, len(layers), stages)
    kinds = list(dict.fromkeys(devices))
    table = {
        (kind, stage): stage_costs(layers, device, in_flight_1f1b(stage, stages, microbatches))
        for kind, device in enumerate(kinds) for stage in range(stages) if reorder or devices[stage] == device
    }  # fmt: skip
    if reorder:
        choices = any_order([devices.count(kind) for kind in kinds], table)
    else:
        order = [kinds.index(device) for device in devices]
        choices = chain([table[kind, stage] for stage, kind in enumerate(order)], order)
    found = partition(choices, microbatches)
    if found is None:
        return _unmet(layers, devices, choices, microbatches)
    return StageCut(found.bounds, tuple(devices.index(kinds[kind]) for kind in found.kinds), found.times_s, found.step_s)


def _unmet(layers: Sequence[LayerCost], devices: Sequence[Device], choices: Sequence[StageChoice], microbatches: int) -> Unmet:
    largest = max(device.memory_bytes for device in devices)
    for at, layer in enumerate(layers):
        alone = layer.bytes + layer.activation_bytes  # of the last stage, the least
        if alone > largest:
            return Unmet(Binds.LAYER_MEMORY, alone, largest, layer=at)
    reached = _reached(choices)
    needed = sum(
        layer.bytes + layer.activation_bytes * in_flight_1f1b(len(devices) - 1, len(devices), microbatches) for layer in layers
    )
    return Unmet(Binds.MEMORY, needed, sum(device.memory_bytes for device in devices), placed=reached)


def _reached(choices: Sequence[StageChoice]) -> int:
    """Return how many layers from the first one on fit into all stages."""
    layers = len(choices[0].costs) - 1
    last = max(each.after for each in choices)
    reach: npt.NDArray[np.bool_] = np.zeros((last + 1, layers + 1), bool)
    reach[0, 0] = True
    for choice in sorted(choices, key=lambda each: each.after):
        reach[choice.after] |= (reach[choice.before][:, None] & np.isfinite(choice.costs)).any(axis=0)
    found = np.flatnonzero(reach.any(axis=0))
    return int(found.max(initial=0))
