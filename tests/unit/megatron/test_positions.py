"""Objects requested at a position that the checkpoint lacks."""

from __future__ import annotations

import io

import numpy as np
import pytest

pytest.importorskip("megatron.core")

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_unickpt.held_state.positions import PositionFree, at_another_position, same

NAMES = ("x/shard_0_2", "x/shard_1_2")


def item(key: str = "x", data: object = None, kind: type[ShardedObject] = ShardedObject) -> ShardedObject:
    return kind(key, data, (3,), (2,))


def test_a_value_that_is_declared_free_and_equal_at_all_positions_serves_any_position() -> None:
    value = {"a": torch.arange(3), "b": [1, None]}
    stored = [value, {"a": torch.arange(3), "b": [1, None]}]
    found = at_another_position(item(kind=PositionFree), stored, NAMES)
    assert (found.value, found.own, found.refused) == (value, False, False)
    assert found.reason == "the same at all 2 stored positions"
    assert at_another_position(item(kind=PositionFree), [1, 2], NAMES).reason.endswith("which are not equal")


def test_an_equal_value_does_not_serve_another_position_by_itself() -> None:
    for stored in ([7], [7, 7]):
        assert at_another_position(item(), stored, NAMES[: len(stored)]).refused


def test_extra_states_that_differ_or_are_missing_are_the_jobs_own() -> None:
    own, key = io.BytesIO(b"own"), "decoder.layers.linear_fc1._extra_state"
    for stored, names in (([io.BytesIO(b"1"), io.BytesIO(b"2")], NAMES), ([], ())):
        found = at_another_position(item(key, own), stored, names)
        assert (found.value, found.own, found.refused) == (own, True, False)


def test_other_objects_that_differ_or_are_missing_are_refused_with_what_there_is() -> None:
    assert at_another_position(item(), [1, 2], NAMES).reason == "it has x/shard_0_2, x/shard_1_2"
    assert at_another_position(item(), [1, 2], NAMES).refused
    assert at_another_position(item(), [], ()).reason == "it has none of that name"


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
