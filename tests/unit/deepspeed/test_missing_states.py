"""What a load does with optimizer states that a checkpoint lacks, and how a step tells which an optimizer needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from unickpt.checkpoint.state.first_step import FirstStates, first_states, known
from unickpt.checkpoint.state.missing_states import ALL, StatesOfParameter, described, plan
from unickpt.checkpoint.state.optimizer_record import shared_states

ADAM = FirstStates({"exp_avg": (torch.float32, 0.0), "exp_avg_sq": (torch.float32, 0.0)}, {"step": 0})


def _parameter(name: str, *held: str, trained: bool = True) -> StatesOfParameter:
    return StatesOfParameter(name, trained, frozenset(held))


def test_a_partition_without_any_state_begins_anew() -> None:
    found = plan([_parameter("a"), _parameter("b", trained=False)], (), ADAM)
    assert found.nothing
    assert found.lacking == {"b": (ALL,)}


def test_a_parameter_that_had_no_state_lacks_none_but_a_part_of_the_states_is_a_loss() -> None:
    both = ("exp_avg", "exp_avg_sq")
    found = plan([_parameter("a", *both), _parameter("never stepped"), _parameter("half", "exp_avg")], ("step",), ADAM)
    assert found.lacking == {"half": ("exp_avg_sq",)}
    assert (found.kept, found.tensors, found.fresh) == (2, ["exp_avg", "exp_avg_sq"], frozenset())


def test_a_state_that_was_none_is_not_lacking() -> None:
    none = frozenset(("exp_avg", "step"))
    one = StatesOfParameter("a", trained=True, held=frozenset(("exp_avg_sq",)), none=none)
    found = plan([one], (), ADAM)
    assert (found.scalars, found.lacking) == (none, {})
    assert (found.tensors, found.fresh_scalars, found.nothing) == (["exp_avg_sq"], frozenset(), False)
    found = plan([one, _parameter("b", "exp_avg", "exp_avg_sq")], ("step",), ADAM)
    assert (found.scalars, found.lacking, found.tensors) == (frozenset(("step",)), {}, ["exp_avg", "exp_avg_sq"])
    found = plan([StatesOfParameter("a", trained=True, held=frozenset(), none=none)], (), None)
    assert (found.scalars, found.nothing) == (none, False), "it had no other state"


def test_states_and_scalars_of_another_class_are_fresh() -> None:
    nadam = FirstStates(ADAM.tensors, {"step": torch.zeros(()), "mu_product": torch.ones(())})
    found = plan([_parameter("a", "exp_avg", "exp_avg_sq")], ("step",), nadam)
    assert (found.fresh_scalars, found.lacking) == (frozenset(("mu_product",)), {"a": ("mu_product",)})
    assert described([found.lacking]) == "mu_product of a"
    assert shared_states("AdamW", "NAdam") == {"exp_avg", "exp_avg_sq"}
    assert shared_states("DeepSpeedCPUAdam", "Adamax") == {"exp_avg"}
    assert shared_states("SGD", "RMSprop") == frozenset(), "momentum_buffer has another meaning"


@pytest.mark.parametrize(("make", "tensors", "scalars", "constructed"), [
    (lambda p: torch.optim.AdamW(p, amsgrad=True), {"exp_avg": 0, "exp_avg_sq": 0, "max_exp_avg_sq": 0}, {"step": 0}, False),
    (lambda p: torch.optim.NAdam(p), {"exp_avg": 0.0, "exp_avg_sq": 0.0}, {"step": 0, "mu_product": 1}, False),
    (lambda p: torch.optim.Rprop(p, lr=0.5), {"prev": 0.0, "step_size": 0.5}, {"step": 0}, False),
    (lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.25), {"sum": 0.25}, {"step": 0}, True),
    (lambda p: torch.optim.SGD(p, momentum=0.9), {"momentum_buffer": 0.0}, {}, False),
    (lambda p: torch.optim.SGD(p), {}, {}, False),
])  # fmt: skip
def test_a_step_of_a_copy_tells_the_states(make: Any, tensors: Any, scalars: Any, constructed: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(4, 3))
    weight.grad = torch.ones_like(weight)
    optimizer = make([weight])
    before, called = dict(optimizer.state), []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    found = first_states(optimizer, optimizer.param_groups[0], weight)
    assert found is not None
    assert {key: value for key, (_, value) in found.tensors.items()} == tensors
    assert {key: float(value) for key, value in found.scalars.items()} == scalars
    assert found.constructed == constructed
    assert not called
    assert dict(optimizer.state) == before
    assert torch.equal(weight, torch.ones(4, 3))


def test_an_optimizer_around_another_one_is_not_tried() -> None:
    class Around(torch.optim.SGD):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__([torch.nn.Parameter(torch.ones(1))], lr=1.0)
            self.inner = inner

    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    assert known(plain)
    assert not known(Around(plain))
