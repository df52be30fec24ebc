"""Kept micro-batches are freed when a step begins, and do not fill the memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from unickpt.training.witness.counting import Counters
from unickpt.training.witness.recalling import Recalled
from unickpt.training.witness.repeating import Tap


def recalled_of(model: torch.nn.Module) -> Recalled:
    return Recalled(Tap(model, dict(model.named_parameters())))


class Layer(torch.nn.Module):
    def __init__(self, found: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.found = torch.nn.Parameter(torch.ones(4)), found

    def forward(self, x: torch.Tensor) -> Any:
        return self.found(x, self.weight)


@pytest.mark.parametrize("found", [lambda x, weight: (x, x * weight), lambda x, weight: (x.mul_(weight),)])
def test_an_input_that_the_model_returns_is_freed(found: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    """A tensor keeps its hooks, which Python's garbage collection does not see."""
    model = Layer(found)
    recalled, before = recalled_of(model), torch.nn.Linear(4, 4)
    x = before(torch.ones(3, 4))
    outputs = model(x)
    sum(each.sum() for each in outputs).backward()
    freed = weakref.ref(x)
    del x, outputs
    recalled.clear()
    gc.collect()
    assert freed() is None


def test_an_output_that_is_used_in_several_steps_collects_no_hooks() -> None:
    model, position = torch.nn.Sequential(torch.nn.Identity()), torch.ones(3, requires_grad=True) * 2
    recalled, counters = Recalled(Tap(model, {"": torch.ones(1)})), Counters(model)
    for _ in range(3):
        model(position)
        recalled.clear()
        counters.clear()
    assert not position._backward_hooks
