"""The first place with values that are not finite, and who decides about its cause."""

from __future__ import annotations

import math

import pytest
import torch

from unickpt.training.witness.counting import all_finite
from unickpt.training.witness.nonfinite import Cause, Counted, NonFinite, Place, Repeat, cause, first_place
from unickpt.training.witness.words import next_nonfinite, nonfinite


def test_the_forward_pass_of_an_earlier_micro_batch_is_first() -> None:
    steps = [Counted(), Counted(("b", "c", ""), ("b", "c")), Counted(("a",))]
    assert first_place(steps) == Place("b", False, 1)
    assert first_place([]) is first_place([Counted()]) is None


def test_the_whole_model_comes_last_in_the_forward_pass_and_first_in_the_backward_pass() -> None:
    assert first_place([Counted(("a", ""))]) == Place("a", False, 0)
    assert first_place([Counted((), ("a", "b", ""))]) == Place("", True, 0)
    assert first_place([Counted((), ("a", "b"))]) == Place("b", True, 0)


def test_a_layer_that_is_never_finite_does_not_count() -> None:
    steps = [Counted(("mask", "mlp"))]
    assert first_place(steps, usual={"mask"}) == Place("mlp", False, 0)
    assert first_place([Counted(("mask",), ("mask",))], usual={"mask"}) == Place("mask", True, 0)


SAME, OTHER = "mlp", "head"


@pytest.mark.parametrize(
    ("repeats", "expected"),
    [
        ({}, Cause.UNDECIDED),
        ({"b1": SAME}, Cause.UNDECIDED),
        ({"b1": None}, Cause.UNDECIDED),
        ({"b1": SAME, "b2": SAME}, Cause.DATA_OR_MODEL),
        ({"b1": SAME, "a1": SAME}, Cause.UNDECIDED),  # a is the host itself
        ({"b1": SAME, "a1": None}, Cause.UNDECIDED),
        ({"a1": SAME, "a2": SAME}, Cause.DATA_OR_MODEL),  # nobody is on another host
        ({"a1": None, "a2": None}, Cause.HARDWARE),
        ({"b1": SAME, "c1": SAME}, Cause.DATA_OR_MODEL),
        ({"b1": None, "c1": None}, Cause.HARDWARE),
        ({"b1": None, "c1": SAME}, Cause.UNDECIDED),
        ({"b1": OTHER, "c1": OTHER}, Cause.UNDECIDED),  # something else is wrong there
        ({"b1": SAME, "a0": SAME}, Cause.DATA_OR_MODEL),  # one other rank, and the rank itself once more
        ({"b1": None, "a0": SAME}, Cause.UNDECIDED),
        ({"b1": None, "a0": None}, Cause.HARDWARE),
        ({"b1": SAME, "a0": None}, Cause.UNDECIDED),
        ({"a0": None}, Cause.HARDWARE),
        ({"a0": SAME}, Cause.UNDECIDED),
    ],
)
def test_two_others_decide(repeats: dict[str, str | None], expected: Cause) -> None:
    found = [Repeat(ord(who[0]) * 10 + int(who[1]), who[0], first) for who, first in repeats.items()]
    assert cause(Repeat(970, "a", SAME), found) is expected


def test_texts() -> None:
    said = nonfinite(NonFinite(Place("mlp", False, 1), 7, 2, "a"))
    assert said == "NONFINITE step 7, micro-batch 1: rank 2 (on a): first in layer mlp (UNDECIDED)"
    loss = NonFinite(Place("", True, 0), 7, 2, "a")
    assert "first in the gradient of the loss" in nonfinite(loss)
    data = NonFinite(Place("mlp", False, 1), 7, 2, "a", Cause.DATA_OR_MODEL, "/out/x.pt")
    assert nonfinite(data).endswith("(DATA_OR_MODEL: other ranks find the same there); the micro-batch is in /out/x.pt")
    assert "test the memory and the GPU of a" in next_nonfinite(NonFinite(data.place, 7, 2, "a", Cause.HARDWARE))


def test_texts_of_outliers() -> None:
    found = NonFinite(Place("mlp", True, 1), 7, 2, "a", Cause.HARDWARE, times=3e34)
    assert nonfinite(found) == (
        "OUTLIER step 7, micro-batch 1: rank 2 (on a): first in the gradient of layer mlp, 3.0e+34 times the largest value of "
        "the steps before (HARDWARE: a repetition finds usual values)"
    )
    assert next_nonfinite(found) == "test the memory and the GPU of a"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_is_seen_among_the_largest_finite_ones(dtype: torch.dtype, value: float) -> None:
    largest = torch.finfo(dtype).max
    values = torch.tensor([largest, -largest] * 500, dtype=torch.float64).to(dtype)
    assert all_finite([None, values, values[:0]])
    values[321] = value
    assert not all_finite([values[:100], values])
