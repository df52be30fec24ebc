"""The first place with values that are not finite, and who decides about its cause."""

from __future__ import annotations

import pytest

from unickpt.training.witness.nonfinite import Cause, Counted, NonFinite, Place, Repeat, cause, first_place
from unickpt.training.witness.words import nonfinite


def test_the_forward_pass_of_an_earlier_micro_batch_is_first() -> None:
    steps = [Counted(), Counted({"b": 3, "c": 9, "": 9}, {"c": 4, "b": 4}), Counted({"a": 1})]
    assert first_place(steps) == Place("b", False, 1, 3)
    assert first_place([]) is first_place([Counted()]) is None


def test_the_whole_model_comes_last_in_the_forward_pass_and_first_in_the_backward_pass() -> None:
    assert first_place([Counted({"": 2, "a": 1})]) == Place("a", False, 0, 1)
    assert first_place([Counted({}, {"": 2, "a": 1, "b": 1})]) == Place("", True, 0, 2)
    assert first_place([Counted({}, {"a": 1, "b": 5})]) == Place("b", True, 0, 5)


def test_a_layer_that_is_never_finite_does_not_count() -> None:
    steps = [Counted({"mask": 7, "mlp": 2})]
    assert first_place(steps, usual={"mask"}) == Place("mlp", False, 0, 2)
    assert first_place([Counted({"mask": 7}, {"mask": 1})], usual={"mask"}) == Place("mask", True, 0, 1)


@pytest.mark.parametrize(
    ("repeats", "expected"),
    [
        ([], Cause.UNDECIDED),
        ([Repeat("b", "mlp")], Cause.UNDECIDED),
        ([Repeat("b", "mlp"), Repeat("b", "mlp")], Cause.UNDECIDED),
        ([Repeat("b", "mlp"), Repeat("a", "mlp")], Cause.UNDECIDED),  # a is the host itself
        ([Repeat("b", "mlp"), Repeat("c", "mlp")], Cause.DATA_OR_MODEL),
        ([Repeat("b", None), Repeat("c", None)], Cause.HARDWARE),
        ([Repeat("b", None), Repeat("c", "mlp")], Cause.UNDECIDED),
        ([Repeat("b", "head"), Repeat("c", "head")], Cause.UNDECIDED),  # something else is wrong there
    ],
)
def test_two_other_hosts_decide(repeats: list[Repeat], expected: Cause) -> None:
    assert cause("a", "mlp", repeats) is expected


def test_texts() -> None:
    said = nonfinite(NonFinite(Place("mlp", False, 1, 3), 7, 2, "a", Cause.UNDECIDED))
    assert said == "NONFINITE step 7, micro-batch 1: rank 2 (on a): first in layer mlp: 3 values (UNDECIDED)"
    loss = NonFinite(Place("", True, 0, 1), 7, 2, "a", Cause.UNDECIDED)
    assert "first in the gradient of the loss" in nonfinite(loss)
