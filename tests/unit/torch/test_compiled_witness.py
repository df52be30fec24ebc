"""A program may compile, export or trace a model that is watched: it has no hooks then, and no error."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torch_unickpt


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(torch.relu(self.first(x)))
        return found


def compiled(model: torch.nn.Module) -> Any:
    return torch.compile(model, fullgraph=True, backend="eager")


def compiled_itself(model: torch.nn.Module) -> Any:
    model.compile(fullgraph=True, backend="eager")
    return model


def compiled_function(model: torch.nn.Module) -> Any:
    return torch.compile(lambda x: model(x), fullgraph=True, backend="eager")


def trained(model: torch.nn.Module, call: Callable[[torch.nn.Module], Any], *, watched: bool) -> torch.nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"every": 2, "checks": ["rest", "nonfinite", "outlier"]} if watched else None
    watching = torch_unickpt.witness(model, optimizer, options)
    called = call(model)
    for _ in range(3):
        called(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    watching.close()
    return model


@pytest.mark.parametrize("call", [compiled, compiled_itself, compiled_function])
def test_a_model_that_is_compiled_later_is_one_graph(
    call: Callable[[torch.nn.Module], Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    alone = trained(copy.deepcopy(model), call, watched=False)
    found = trained(model, call, watched=True)
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), found.parameters(), strict=True))
    (line,) = [text for text in caplog.messages if "see no layers" in text]
    assert "witness: nonfinite and outlier see no layers: the program has compiled the model since" in line


@pytest.mark.parametrize("strict", [False, True])
def test_a_watched_model_is_exported(strict: bool, caplog: pytest.LogCaptureFixture) -> None:
    model, x = Model(), torch.ones(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = torch_unickpt.witness(model, optimizer, {"every": 1})
    exported = torch.export.export(model, (x,), strict=strict).module()
    assert torch.equal(exported(x), model(x))
    model(x).sum().backward()
    optimizer.step()
    watching.close()
    assert "see no layers" not in caplog.text


def test_a_trace_has_no_warnings_of_hooks(recwarn: pytest.WarningsRecorder) -> None:
    model, x = Model(), torch.ones(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watching = torch_unickpt.witness(model, optimizer, {"every": 1})
    traced = torch.jit.trace(model, x)  # type: ignore[no-untyped-call]
    assert torch.equal(traced(x), model(x))
    assert not [each for each in recwarn if each.category is torch.jit.TracerWarning]
    watching.close()
