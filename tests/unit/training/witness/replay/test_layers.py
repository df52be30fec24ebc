"""What a replayed step records of layers does not end the step, whatever they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unickpt.training.witness.replay.layers import LayerTap
from unickpt.training.witness.replay.records import Phase


class Model(torch.nn.Module):
    def __init__(self, odd: bool) -> None:
        super().__init__()
        self.layer, self.odd = torch.nn.Linear(4, 4), odd

    def forward(self, x: torch.Tensor) -> Any:
        used, unused = self.layer(x).chunk(2, dim=-1)
        nested = torch.nested.nested_tensor([used.detach()[:1], used.detach()[1:]])
        return used, unused, nested if self.odd else None


@pytest.mark.parametrize("odd", [False, True])
def test_an_output_without_a_gradient_or_a_hash_is_left_out(odd: bool) -> None:
    model, found = Model(odd), list[tuple[Phase, str]]()
    tap = LayerTap([(model, model, "")], add=lambda phase, _at, name, _hash: found.append((phase, name)))
    model(torch.randn(3, 4))[0].sum().backward()
    assert [name for phase, name in found if phase is Phase.OUTPUT] == ["layer", "the model"]
    assert [name for phase, name in found if phase is Phase.OUTPUT_GRADIENT] == ["the model, tensor 0", "layer"]
    assert sorted(name for phase, name in found if phase is Phase.GRADIENT) == ["layer.bias", "layer.weight"]
    tap.close()
