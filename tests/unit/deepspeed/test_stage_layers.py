"""Stages of given layers with the public arguments of ``PipelineModule``."""

from __future__ import annotations

import pytest
import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.utils import partition_balanced

from ds_unickpt.measuring.timed_layers import MARK, layers_of, stage_layers


def parts_of(layers: list[object], method: str, stages: int) -> list[int]:
    """Return the parts that ``PipelineModule`` makes (``_partition_layers``, method ``type:``)."""
    assert method == f"type:{MARK}"
    kinds = [layer.typename if isinstance(layer, LayerSpec) else layer for layer in layers]
    names = [kind.__name__ if isinstance(kind, type) or not isinstance(kind, torch.nn.Module) else "" for kind in kinds]
    names = [name or type(kind).__name__ for name, kind in zip(names, kinds, strict=True)]
    return list(map(int, partition_balanced([int(MARK in name) for name in names], stages)))


@pytest.mark.parametrize("parts", [[0, 1, 8], [0, 7, 8], [0, 3, 4, 8], [0, 1, 2, 3, 8], [0, 8], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
def test_the_parts_are_those_asked_for(parts: list[int]) -> None:
    layers = [LayerSpec(torch.nn.Linear, 3, 3), torch.nn.Linear(3, 3), lambda x: x, torch.nn.ReLU()] * 2
    weights = [layers[1].weight, layers[5].weight]  # type: ignore[union-attr]
    marked, method = stage_layers(layers, parts)
    assert parts_of(marked, method, len(parts) - 1) == parts
    assert all(marked[at].weight is weight for at, weight in zip((1, 5), weights, strict=True))
    assert marked[0].build()(torch.ones(1, 3)).shape == (1, 3)
    assert marked[2](5) == 5


@pytest.mark.parametrize("parts", [[0, 9], [1, 8], [0, 5, 5, 8], [0, 5, 3, 8], [8]])
def test_other_parts_are_refused(parts: list[int]) -> None:
    with pytest.raises(ValueError, match="parts must ascend from 0 to the number of layers, 8"):
        stage_layers([torch.nn.ReLU()] * 8, parts)


def test_a_model_without_a_pipeline_has_the_layers_of_its_largest_list() -> None:
    model = torch.nn.Module()
    model.small = torch.nn.ModuleList([torch.nn.Linear(1, 1)] * 5)
    model.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])
    model.words = torch.nn.Embedding(4, 8)
    model.get_input_embeddings = lambda: model.words
    found = layers_of(model)
    assert [(each.number, each.name, each.role, each.total) for each in found] == [
        (1, "blocks.0", "layer", 5), (2, "blocks.1", "layer", 5), (3, "blocks.2", "layer", 5),
        (0, "input_embeddings", "embedding", 5),
    ]  # fmt: skip
    assert layers_of(torch.nn.Linear(1, 1)) == []


def test_a_model_without_a_list_has_the_layers_of_its_largest_sequence() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Sequential(torch.nn.Linear(3, 3)))
    assert [(each.number, each.name, each.total) for each in layers_of(model)] == [(1, "0", 4), (2, "1", 4)]
    model.append(torch.nn.ModuleList([torch.nn.Linear(1, 1)]))
    assert [each.name for each in layers_of(model)] == ["2.0"]


def test_a_layer_computes_with_whole_parameters_under_zero_3() -> None:
    layer = torch.nn.Linear(4, 3)
    assert layers_of(torch.nn.Sequential(layer))[0].count() == 15
    layer.weight.ds_numel, layer.weight.data = 12, torch.empty(0)  # as DeepSpeed leaves it between steps
    assert layers_of(torch.nn.Sequential(layer))[0].count() == 15
