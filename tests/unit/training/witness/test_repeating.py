"""A recorded micro-batch gives the same output and gradients again, and leaves no trace; what cannot be repeated says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unickpt.training.witness.repeating import Case, Tap


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.5)
        self.second, self.unused = torch.nn.Linear(6, 2), torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, Any]:
        hidden = self.drop(self.norm(self.first(x)))
        return {"logits": self.second(hidden) * scale, "hidden": (hidden, None), "count": 3}


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def tap_of(model: Model) -> Tap:
    return Tap(model, dict(model.named_parameters()))


def forward(model: Model) -> torch.Tensor:
    logits: torch.Tensor = model(torch.randn(5, 4), scale=torch.tensor(2.0))["logits"]
    return logits.square().mean()


def recorded(tap: Tap) -> Case:
    case, why = tap.take()
    assert case is not None, why
    return case


@pytest.mark.parametrize("autocast", [False, True])
def test_a_repetition_is_equal_and_leaves_no_trace(model: Model, autocast: bool) -> None:
    tap = tap_of(model)
    tap.arm()
    for _ in range(3):  # the first of them is recorded
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = forward(model)
        loss.backward()
    case = recorded(tap)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [None if each.grad is None else each.grad.clone() for each in model.parameters()]
    random = torch.get_rng_state()
    assert tap.repeat(case.data) == tap.repeat(case.data) == case.values
    assert len(case.values) == len(tap.names) == 9
    assert case.values[-2:] == (0, 0)  # of what is not used
    assert all(case.values[:-2])
    assert len(set(case.values[:-2])) == 7
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]
    with torch.no_grad():
        model.first.weight[0, 0] += 1e-3
    changed = {name for name, a, b in zip(tap.names, tap.repeat(case.data), case.values, strict=True) if a != b}
    assert changed >= {"the output", *(f"the gradient of {name}" for name in ("first.weight", "norm.weight", "second.weight"))}
    tap.close()
    assert not model._forward_hooks


def test_only_the_first_micro_batch_of_an_armed_step_is_recorded(model: Model) -> None:
    tap = tap_of(model)
    forward(model).backward()
    assert tap.take() == (None, "the program did not call the model that it has given to the witness")
    tap.arm()
    model.eval()
    forward(model)
    model.train()
    forward(model).backward()
    first = model.first.weight.grad
    assert first is not None
    forward(model).backward()
    case = recorded(tap)
    assert tap.repeat(case.data) == case.values


def test_what_cannot_be_repeated_says_why(model: Model) -> None:
    tap = tap_of(model)
    tap.arm()
    (forward(model) + forward(model)).backward()
    assert tap.take() == (None, "several micro-batches share a backward pass, or one has several")
    tap.arm()
    loss = forward(model)
    loss.backward(retain_graph=True)
    loss.backward()
    assert tap.take() == (None, "several micro-batches share a backward pass, or one has several")
    tap.arm()
    forward(model)
    case, why = tap.take()
    assert case is None
    assert why.startswith("no gradient comes to the output")
    tap.arm()
    model.forward = lambda x, **_: model.second(model.first(x))  # type: ignore[method-assign]
    model(torch.randn(5, 4), on_end=lambda: None).sum().backward()
    case, why = tap.take()
    assert case is None
    assert why.startswith("the input of the model cannot be sent to another rank (")
