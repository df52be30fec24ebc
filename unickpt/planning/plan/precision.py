"""Which layers of slow ranks compute in a lower precision, so that these ranks do not hold up a step.

In a job on unlike devices, the slow ones compute some layers in bf16. The replay says how much time they must save: more than
that is free precision, which is given back. Among all sets of layers that save enough, the plan has the least sum of predicted
errors (QSync, arXiv 2407.02327, sections 4 and 5; there a greedy search, here a knapsack).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unickpt.diagnosis.layer_costs.measured import LAYER, MeasuredLayer
from unickpt.planning.plan.bits import LayerBits, UnitChoices, UnitOption, plan_bits
from unickpt.planning.plan.layers import RankLayers
from unickpt.planning.plan.partition import Device, Unmet

GRID = 64  # parts of the largest saving that are tried, and parts of the one that is found
_NS = 1e-9
_ROUNDING = 1e-9  # of a step
_LEAST_ERROR = 1e-9  # of the largest error: a layer without an error is not lowered for nothing

PredictSteps = Callable[[Sequence[Mapping[int, float]]], Sequence[float]]


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """A layer in both precisions.

    Attributes:
        name: name of the layer.
        full_s, low_s: seconds for one microbatch, forward and backward.
        error: predicted error of the lower precision; smaller is better, and errors of layers add up.
    """

    name: str
    full_s: float
    low_s: float
    error: float

    @property
    def saved_s(self) -> float:
        return max(self.full_s - self.low_s, 0.0)


@dataclass(frozen=True, slots=True)
class SlowRanks:
    """Ranks with the same layers.

    Attributes:
        ranks: global ranks.
        microbatches: microbatches of a step.
        layers: their layers.
    """

    ranks: tuple[int, ...]
    microbatches: float
    layers: tuple[LayerChoice, ...]

    @property
    def most_s(self) -> float:
        """Seconds of a step that all layers in the lower precision save."""
        return self.microbatches * sum(layer.saved_s for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Lowered:
    """Plan for ranks with the same layers.

    Attributes:
        ranks: global ranks.
        low: names of the layers in the lower precision.
        needed_s, saved_s: seconds of a step that they must save, and that they save by prediction.
        error: sum of the predicted errors.
    """

    ranks: tuple[int, ...]
    low: tuple[str, ...]
    needed_s: float
    saved_s: float
    error: float


@dataclass(frozen=True, slots=True)
class PrecisionPlan:
    """A plan.

    Attributes:
        groups: what each group of ranks does.
        step_s: step with the plan, by prediction.
        lowest_s: step with all layers of these ranks in the lower precision.
        unhindered_s: step if these ranks computed in no time: the others' own limit.
    """

    groups: tuple[Lowered, ...]
    step_s: float
    lowest_s: float
    unhindered_s: float


def slow_ranks(
    measured: Sequence[RankLayers], low_s: Callable[[int, float], float], errors: Callable[[str], float]
) -> list[SlowRanks]:
    """Return the slow ranks in groups with the same layers. Embeddings and output layers are not among them.

    Args:
        measured: what the slow ranks have measured.
        low_s: returns the seconds of a layer in the lower precision, from its number and its seconds.
        errors: returns the predicted error of a layer, by its name.
    """
    groups: dict[tuple[int, ...], list[RankLayers]] = {}
    for each in measured:
        groups.setdefault(tuple(sorted(number for number, _ in lowerable(each))), []).append(each)
    found = []
    for numbers, members in groups.items():
        layers = []
        for number in numbers:
            full_s = max(member.layers[number].forward_s + member.layers[number].backward_s for member in members)
            name = members[0].layers[number].name
            layers.append(LayerChoice(name, full_s, low_s(number, full_s), errors(name)))
        ranks = tuple(sorted(member.rank for member in members))
        found.append(SlowRanks(ranks, max(member.microbatches for member in members), tuple(layers)))
    return found


def lowerable(measured: RankLayers) -> list[tuple[int, MeasuredLayer]]:
    """Return the layers of a rank that may have a lower precision, with their numbers. Logits stay in float32."""
    return [(number, layer) for number, layer in measured.layers.items() if layer.role == LAYER]


def plan_precision(
    groups: Sequence[SlowRanks], work_s: Mapping[int, float], steps: PredictSteps, *, within: float
) -> PrecisionPlan:
    """Return the plan with the least predicted error, of those whose step is nearly the shortest possible one.

    Args:
        groups: the slow ranks.
        work_s: seconds of a step that each rank computes.
        steps: returns the predicted step for each set of savings, as ``replay.savings.SavedTimes.steps_s``.
        within: share by which the step may be longer than with all layers in the lower precision.
    """

    def saved(fractions: Sequence[float]) -> dict[int, float]:
        return {rank: part * group.most_s for part, group in zip(fractions, groups, strict=True) for rank in group.ranks}

    ones = [1.0] * len(groups)
    lowest_s, unhindered_s = steps([saved(ones), {rank: work_s[rank] for group in groups for rank in group.ranks}])
    goal_s = lowest_s * (1 + within)
    parts = [_least(lambda part: saved([part] * len(groups)), steps, goal_s, 1.0)] * len(groups)
    for at in range(len(groups) if len(groups) > 1 else 0):  # what one group need not save, while the others do

        def alone(part: float, at: int = at) -> dict[int, float]:
            return saved([*parts[:at], part, *parts[at + 1 :]])

        parts[at] = _least(alone, steps, goal_s, parts[at])
    chosen = [_chosen(group, part * group.most_s) for group, part in zip(groups, parts, strict=True)]
    (step_s,) = steps([{rank: each.saved_s for each in chosen for rank in each.ranks}])
    return PrecisionPlan(tuple(chosen), step_s, lowest_s, unhindered_s)


def _least(saved: Callable[[float], Mapping[int, float]], steps: PredictSteps, goal_s: float, most: float) -> float:
    """Return the smallest part, up to ``most``, from which on the steps reach the goal; ``most`` if no other does."""
    low, high = 0.0, most
    for _ in range(2):
        grid = [low + (high - low) * at / GRID for at in range(GRID + 1)]
        late = np.flatnonzero(np.asarray(steps([saved(part) for part in grid])) > goal_s * (1 + _ROUNDING))
        if not len(late):
            return grid[0]
        low, high = grid[int(late[-1])], grid[min(int(late[-1]) + 1, GRID)]
    return high


def _chosen(group: SlowRanks, needed_s: float) -> Lowered:
    """Return the layers with the least error that save enough."""
    least = max((layer.error for layer in group.layers), default=0.0) * _LEAST_ERROR or 1.0
    rows = [
        LayerBits(0, (UnitChoices(layer.name, (UnitOption("full", _ns(layer.full_s), 0.0), *_low_option(layer, least))),))
        for layer in group.layers
    ]
    whole = sum(_ns(layer.full_s) for layer in group.layers)
    room = max(whole - math.ceil(needed_s / group.microbatches / _NS), sum(row.least_bytes for row in rows))
    found = plan_bits(rows, [Device(memory_bytes=room)])
    assert not isinstance(found, Unmet)  # the room is at least that of the smallest options
    low = [layer for layer, (option,) in zip(group.layers, found.chosen, strict=True) if option.scheme == "low"]
    saved_s = group.microbatches * sum(layer.saved_s for layer in low)
    return Lowered(group.ranks, tuple(layer.name for layer in low), needed_s, saved_s, sum(layer.error for layer in low))


def _low_option(layer: LayerChoice, least: float) -> tuple[UnitOption, ...]:
    """Return the lower precision as an option, if it is faster."""
    return (UnitOption("low", _ns(layer.low_s), max(layer.error, least)),) if _ns(layer.low_s) < _ns(layer.full_s) else ()


def _ns(seconds: float) -> int:
    return round(seconds / _NS)
