"""The record of optimizers is the same with what an earlier save knows of their scalars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_unickpt.held_state.names import names_of
from torch_unickpt.held_state.optimizers import Optimizers


def _nothing(job: Any, optimizer: torch.optim.Optimizer) -> None:
    pass


def _step(job: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def _frozen_for_a_step(job: Any, optimizer: torch.optim.Optimizer) -> None:
    job[0].weight.grad = None
    optimizer.step()


def _set(value: float, *others: float) -> Callable[[Any, torch.optim.Optimizer], None]:
    def change(job: Any, optimizer: torch.optim.Optimizer) -> None:
        for each, new in zip(optimizer.state.values(), (value, *others, *([value] * 9)), strict=False):
            each["step"].fill_(new)

    return change


@pytest.mark.parametrize(
    "change",
    [
        _nothing,
        _step,
        _frozen_for_a_step,
        _set(7.0),
        _set(0.0, -0.0),
        _set(float("nan")),
        _set(3.0, float("inf")),
    ],
    ids=["nothing", "a step", "a step of some", "set", "zeros", "nan", "several"],
)
@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.SGD, torch.optim.Rprop, torch.optim.Adagrad]
)
def test_the_record_with_a_known_scalar(kind: Any, change: Callable[[Any, torch.optim.Optimizer], None]) -> None:
    job = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1), torch.nn.Linear(1, 1))
    optimizer = kind([{"params": job[0].parameters(), "lr": 0.1}, {"params": job[1:].parameters()}], lr=0.2)
    job(torch.ones(2)).sum().backward()
    optimizer.step()
    first = Optimizers([optimizer], names_of(job))
    common = first.common_scalar(first.states())
    if kind in (torch.optim.AdamW, torch.optim.Rprop, torch.optim.Adagrad):
        assert common is not None
        assert (common.key, common.names) == ("step", list(names_of(job).parameters))
    else:  # two scalars, and none
        assert common is None
    if kind is not torch.optim.SGD:
        change(job, optimizer)
    later = Optimizers([optimizer], names_of(job))
    assert repr(later.record(later.states(), common)) == repr(later.record())
    found = later.record()
    assert found is not None
    assert [each.parameters for each in found.groups] == [("0.weight", "0.bias"), ("1.weight", "1.bias", "2.weight", "2.bias")]
