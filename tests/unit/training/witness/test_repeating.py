"""A recorded micro-batch gives the same output and gradients again, and leaves no trace; what cannot be repeated says why."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from unickpt.training.witness.agreeing import Ranks
from unickpt.training.witness.buddies import Buddies
from unickpt.training.witness.cases import Case
from unickpt.training.witness.recalling import Recalled
from unickpt.training.witness.repeating import Tap
from unickpt.training.witness.surroundings import Surroundings


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


class Averaging(Model):
    """A model whose forward pass follows the mean of its input in a parameter that nothing trains."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        self.calls = torch.nn.Parameter(torch.tensor(0), requires_grad=False)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, Any]:
        with torch.no_grad():
            self.calls += 1
            self.mean.lerp_(x.mean(0), 0.1)
        return super().forward(x, scale=scale)


def test_a_repetition_leaves_parameters_that_nothing_trains_as_they_were() -> None:
    model = Averaging()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    with torch.no_grad():
        model.first.bias.requires_grad_(False).add_(1)  # one that no forward pass writes to
    tap = Tap(model, trained)
    tap.arm()
    forward(model).backward()
    case = recorded(tap)
    mean, calls, bias = model.mean.clone(), int(model.calls), model.first.bias._version
    tap.repeat(case.data)
    assert (int(model.calls), model.first.bias._version) == (calls, bias)
    assert torch.equal(model.mean, mean)


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


class Stage(torch.nn.Module):
    """Takes its input from an attribute, as a stage of a pipeline does."""

    input_tensor: torch.Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self) -> torch.Tensor:
        assert self.input_tensor is not None
        found: torch.Tensor = self.layer(self.input_tensor)
        return found


class OneSlot(Surroundings):
    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def slots(self) -> list[tuple[Any, str]]:
        return [(self._stage, "input_tensor")]


def test_of_interleaved_micro_batches_the_first_is_recorded_with_what_another_stage_sent() -> None:
    """Forward passes of later micro-batches come before the backward pass of the first one."""
    torch.manual_seed(0)
    stage = Stage()
    tap = Tap(stage, dict(stage.named_parameters()), surroundings=OneSlot(stage))
    assert tap.names == [
        "the output",
        "the gradient of layer.weight",
        "the gradient of layer.bias",
        "the gradient of the input",
    ]
    tap.arm()
    outputs, inputs = [], []
    for _ in range(3):
        inputs.append(torch.randn(2, 4, requires_grad=True))
        stage.input_tensor = inputs[-1]
        outputs.append(stage())
    weights = [torch.randn(2, 3) for _ in outputs]
    for output, weight in zip(outputs, weights, strict=True):
        output.backward(weight)
    case = recorded(tap)
    assert tap.repeat(case.data) == case.values
    assert all(case.values)
    assert stage.input_tensor is inputs[-1]
    alone = tap_of_stage(stage, inputs[0], weights[0])
    assert alone == case.values


def tap_of_stage(stage: Stage, given: torch.Tensor, weight: torch.Tensor) -> tuple[int, ...]:
    """Return the values of one micro-batch."""
    tap = Tap(stage, dict(stage.named_parameters()), surroundings=OneSlot(stage))
    tap.arm()
    stage.input_tensor = given.detach().clone().requires_grad_()
    stage().backward(weight)
    values = recorded(tap).values
    tap.close()
    return values


def test_a_backward_pass_of_another_micro_batch_before_or_with_the_first_is_not_taken_for_its_own() -> None:
    stage = Stage()
    tap = Tap(stage, dict(stage.named_parameters()), surroundings=OneSlot(stage))
    weight = torch.ones(2, 3)
    for together in (False, True):
        tap.arm()
        outputs = []
        for at in range(2):
            stage.input_tensor = torch.full((2, 4), 1.0 + at, requires_grad=True)
            outputs.append(stage())
        if together:
            torch.autograd.backward(outputs, [weight, weight])
            assert tap.take() == (None, "several micro-batches share a backward pass, or one has several")
        else:
            outputs[1].backward(weight)
            outputs[0].backward(weight)
            assert recorded(tap).values == tap_of_stage(stage, torch.ones(2, 4), weight)


def test_what_is_frozen_later_or_has_no_hash_does_not_hinder_training(model: Model) -> None:
    tap = tap_of(model)
    model.first.weight.requires_grad_(False)
    tap.arm()
    forward(model).backward()
    case = recorded(tap)
    assert case.values[1] == 0
    assert tap.repeat(case.data) == case.values
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    other = Tap(embedding, dict(embedding.named_parameters()))
    other.arm()
    embedding(torch.tensor([1, 2])).sum().backward()
    assert embedding.weight.grad is not None
    found, why = other.take()
    assert found is None
    assert why.startswith("the gradient of weight has no hash (")


def full(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_a_device_without_memory_does_not_hinder_training(model: Model, pass_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    unwatched = copy.deepcopy(model)
    forward(unwatched).backward()
    alone = {name: each.grad for name, each in unwatched.named_parameters()}
    tap = tap_of(model)
    tap.arm()
    torch.manual_seed(1)
    with monkeypatch.context() as patch:
        if pass_ == "forward":
            patch.setattr(torch.Tensor, "clone", full)
        loss = forward(model)
        patch.setattr(torch.Tensor, "clone", full)
        loss.backward()
    case, why = tap.take()
    assert case is None
    assert "out of memory" in why
    for name, each in model.named_parameters():
        assert (each.grad is None) == (alone[name] is None)
        assert each.grad is None or torch.equal(each.grad, alone[name])  # type: ignore[arg-type]
    tap.arm()
    forward(model).backward()
    recorded(tap)


def test_what_cannot_be_kept_of_a_micro_batch_does_not_hinder_training(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    recalled = Recalled(tap_of(model))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", full)
        forward(model).backward()
    forward(model).backward()
    assert [recalled.data(number) != b"" for number in range(2)] == [False, True]


class Halves(torch.nn.Module):
    """Of two outputs of one operator, nothing uses the second one, so torch has no gradient for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.layer(x).chunk(2, dim=-1)


def test_an_output_that_nothing_uses_is_recorded_without_a_gradient() -> None:
    model = Halves()
    tap = Tap(model, dict(model.named_parameters()))
    recalled = Recalled(tap)
    tap.arm()
    model(torch.randn(3, 4))[0].square().sum().backward()
    case = recorded(tap)
    assert tap.repeat(case.data) == case.values
    kept = recalled.kept(0)
    assert kept is not None
    assert list(kept.of_output) == [0]
    assert not kept.large


class Unused(torch.autograd.Function):
    """An operator without a gradient for its second input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # noqa: ARG004
        return gradient * 2, None


def test_a_parameter_without_a_gradient_is_recorded_as_such() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> Any:
            return Unused.apply(self.used(x), self.unused)

    model = Model()
    tap = Tap(model, dict(model.named_parameters()))
    tap.arm()
    model(torch.randn(3, 4)).square().sum().backward()
    case = recorded(tap)
    assert tap.repeat(case.data) == case.values
    assert case.values[tap.names.index("the gradient of unused")] == 0


def test_a_micro_batch_whose_forward_pass_an_error_ends_is_not_mixed_with_the_next_one(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    tap = tap_of(model)
    tap.arm()
    with monkeypatch.context() as patch:
        patch.setattr(model.second, "forward", full)
        with pytest.raises(torch.OutOfMemoryError):
            forward(model)
    forward(model).backward()  # the program leaves that one out
    forward(model).backward()
    case = recorded(tap)
    assert tap.repeat(case.data) == case.values


def test_a_recorded_micro_batch_that_cannot_be_sent_leaves_no_rank_waiting(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    tap = tap_of(model)
    check = Buddies(tap, Ranks(None, torch.device("cpu"), 0, (0,), ("a",)))
    tap.arm()
    forward(model).backward()
    monkeypatch.setattr(torch, "save", full)
    assert check.check(1, 0) is None
    assert check.off == "what was recorded cannot be sent to another rank: OutOfMemoryError: out of memory"


def test_an_input_whose_writes_torch_does_not_count_does_not_hinder_training() -> None:
    class Masked(torch.nn.Linear):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x) if mask is None else super().forward(x) * mask.tolist()[0]

    masked = Masked(2, 2)
    recalled = Recalled(Tap(masked, dict(masked.named_parameters())))
    with torch.inference_mode():
        mask = torch.ones(1)
    masked(torch.ones(1, 2), mask).sum().backward()
    masked(torch.ones(1, 2)).sum().backward()
    assert [recalled.data(number) != b"" for number in range(2)] == [False, True]


def test_a_repetition_keeps_no_gradient(model: Model) -> None:
    tap = tap_of(model)
    tap.arm()
    forward(model).backward()
    case = recorded(tap)
    seen: list[tuple[int, int]] = []
    before, of_output = tap.loaded(case.data)

    def note(at: int, gradient: torch.Tensor) -> None:
        seen.append((at, gradient.untyped_storage().nbytes()))

    tap.play(tap.loaded(before), of_output, gradient=note)
    assert sorted(at for at, _ in seen) == [0, 1, 2, 3, 4, 5]
    assert all(size > 4 for _, size in seen)
    model.first.weight.grad = None
    tap.play(tap.loaded(before), of_output)
    assert model.first.weight.grad is None


class Checkpointed(torch.nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(checkpoint(self.first, x, use_reentrant=self.reentrant))
        return found


def test_reentrant_checkpointing_is_refused_before_anything_is_repeated() -> None:
    """Its backward pass would raise halfway, and leave the parameters of FSDP2 gathered: training would go on wrongly."""
    for reentrant in (False, True):
        model = Checkpointed(reentrant=reentrant)
        tap = Tap(model, dict(model.named_parameters()))
        tap.arm()
        model(torch.randn(3, 4, requires_grad=True)).sum().backward()
        case, why = tap.take()
        assert (case is None) == reentrant
        assert why == ("reentrant checkpointing (use_reentrant=True) cannot be repeated" if reentrant else "")
