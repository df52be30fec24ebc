"""Objects requested at a position that the checkpoint lacks."""

from __future__ import annotations

import io

import numpy as np
import pytest

pytest.importorskip("megatron.core")

import torch

from megatron_unickpt.positions import at_another_position, same

NAMES = ("x/shard_0_2", "x/shard_1_2")


def test_a_value_that_all_positions_share_serves_any_position() -> None:
    value = {"a": torch.arange(3), "b": [1, None]}
    found = at_another_position("x", None, [value, {"a": torch.arange(3), "b": [1, None]}], NAMES)
    assert (found.value, found.own, found.refused) == (value, False, False)
    assert found.reason == "the same at all 2 stored positions"


def test_extra_states_that_differ_or_are_missing_are_the_jobs_own() -> None:
    own, key = io.BytesIO(b"own"), "decoder.layers.linear_fc1._extra_state"
    for stored, names in (([io.BytesIO(b"1"), io.BytesIO(b"2")], NAMES), ([], ())):
        found = at_another_position(key, own, stored, names)
        assert (found.value, found.own, found.refused) == (own, True, False)


def test_other_objects_that_differ_or_are_missing_are_refused_with_what_there_is() -> None:
    assert at_another_position("x", None, [1, 2], NAMES).reason == "it has x/shard_0_2, x/shard_1_2"
    assert at_another_position("x", None, [1, 2], NAMES).refused
    assert at_another_position("x", None, [], ()).reason == "it has none of that name"


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), False),
        (np.ones(2), np.ones(2), True),
        (io.BytesIO(b"1"), io.BytesIO(b"1"), True),
        (io.BytesIO(b"1"), io.BytesIO(b"2"), False),
        ({"a": (1, 2)}, {"a": (1, 2)}, True),
        ({"a": 1}, {"b": 1}, False),
        ([1], (1,), False),
        ([1], [1, 2], False),
        (True, 1, False),
    ],
)
def test_equal_objects(a: object, b: object, expected: bool) -> None:
    assert same(a, b) is expected
