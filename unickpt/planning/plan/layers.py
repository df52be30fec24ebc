"""The layers of a model from those that its ranks have measured, and the cut of a pipeline in the words of each framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from statistics import median
from typing import Any

from unickpt.base.errors import FormatError
from unickpt.diagnosis.layer_costs.measured import EMBEDDING, LAYER, LOSS, MeasuredLayer, layers_of
from unickpt.planning.plan.partition import LayerCost

MOST = 100_000  # layers of a model
_LETTERS = {EMBEDDING: "E", LAYER: "t", LOSS: "L"}


def cost_of(layer: MeasuredLayer, bytes_per_parameter: float) -> LayerCost:
    """Return the cost of a layer for the partition.

    Args:
        layer: measured layer.
        bytes_per_parameter: of weights, gradients and optimizer states of a rank.
    """
    return LayerCost(layer.forward_s, layer.backward_s, layer.parameters * bytes_per_parameter, float(layer.activation_bytes))


def combined(samples: Mapping[int, Sequence[MeasuredLayer]], total: int) -> list[MeasuredLayer]:
    """Return the layers of the model from those that several ranks have measured.

    Args:
        samples: number of the layer in the model -> the same layer on the ranks that have it.
        total: number of layers of the model. A layer that no rank has measured takes no time: it is a function, not a module.
    """
    found = [_middle(samples[number]) if number in samples else None for number in range(total)]
    return [each or MeasuredLayer(str(number), LAYER, 0.0, 0.0) for number, each in enumerate(found)]


@dataclass(frozen=True, slots=True)
class RankLayers:
    """What one rank has measured.

    Attributes:
        rank: global rank.
        device: name of its kind of device.
        microbatches: microbatches of a step.
        layers: its layers, by number in the whole model.
    """

    rank: int
    device: str
    microbatches: float
    layers: Mapping[int, MeasuredLayer]

    @property
    def layers_s(self) -> float:
        """Time of its layers for one microbatch, forward and backward."""
        return sum(each.forward_s + each.backward_s for each in self.layers.values())


def ranks_of(documents: Mapping[str, Any]) -> list[RankLayers]:
    """Return what each rank has measured, from the documents of ``layers_of_ranks``. Ranks without a number are left out."""
    found = []
    for where, document in documents.items():
        rank, steps = document.get("rank"), document.get("steps")
        calls = [row.get("calls") for row in document["layers"]]
        if type(rank) is int and type(steps) is int and steps > 0 and all(type(each) is int for each in calls):
            layers = layers_of(document, where)
            numbers = [row["number"] for row in document["layers"]]
            found.append(RankLayers(rank, layers[0].device, max(calls) / steps, dict(zip(numbers, layers, strict=True))))
    return found


def layers_of_ranks(documents: Mapping[str, Any]) -> list[MeasuredLayer]:
    """Return the layers of the model from the files of its ranks.

    Args:
        documents: file -> parsed JSON of ``unickpt.diagnosis.recording.layer_times``.

    Raises:
        FormatError: a file is no such document, or the files are of different models.
    """
    samples: dict[int, list[MeasuredLayer]] = {}
    totals: dict[int, str] = {}
    for where, document in documents.items():
        layers = layers_of(document, where)
        total = document.get("total")
        numbers = [row.get("number") for row in document["layers"]]
        if not all(type(each) is int for each in (*numbers, total)) or not 0 <= min(numbers) <= max(numbers) < total <= MOST:
            raise FormatError(f"{where}: the numbers of its layers are not those of a model of {total!r} layers")
        totals[total] = where
        for number, layer in zip(numbers, layers, strict=True):
            samples.setdefault(number, []).append(layer)
    if len(totals) > 1:
        raise FormatError(f"the files are of different models: {', '.join(f'{f}: {n} layers' for n, f in totals.items())}")
    return combined(samples, next(iter(totals)))


def _middle(each: Sequence[MeasuredLayer]) -> MeasuredLayer:
    return replace(
        each[0],
        forward_s=median(one.forward_s for one in each),
        backward_s=median(one.backward_s for one in each),
        parameters=max(one.parameters for one in each),
        activation_bytes=max(one.activation_bytes for one in each),
    )


def megatron_layout(roles: Sequence[str], bounds: Sequence[int]) -> str:
    """Return the value of ``--pipeline-model-parallel-layout``, such as ``Et*3|t*5L``.

    A model without measured embedding or loss has them in its first and last stage.

    Args:
        roles: role of each layer.
        bounds: first layer of each stage, and the number of layers.
    """
    stages = [[_LETTERS[role] for role in roles[begin:end]] for begin, end in pairwise(bounds)]
    if EMBEDDING not in roles:
        stages[0].insert(0, "E")
    if LOSS not in roles:
        stages[-1].append("L")
    return "|".join("".join(_repeated(letter, len(list(same))) for letter, same in groupby(stage)) for stage in stages)


def _repeated(letter: str, count: int) -> str:
    return letter if count == 1 else f"{letter}*{count}"


def megatron_arguments(roles: Sequence[str], bounds: Sequence[int]) -> list[str]:
    """Return Megatron's arguments for a cut."""
    return [
        "--pipeline-model-parallel-size",
        str(len(bounds) - 1),
        "--pipeline-model-parallel-layout",
        megatron_layout(roles, bounds),
    ]


def vllm_partition(roles: Sequence[str], bounds: Sequence[int]) -> str:
    """Return the value of the environment variable ``VLLM_PP_LAYER_PARTITION``: layers of each stage, such as ``3,5``."""
    return ",".join(str(list(roles[begin:end]).count(LAYER)) for begin, end in pairwise(bounds))
