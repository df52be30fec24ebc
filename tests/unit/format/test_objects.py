"""The codec for non-tensor state: everything plain comes back equal; nothing unknown is run or lost."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import json
import os
import pathlib
import signal
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unickpt.errors import FormatError
from unickpt.format import objects

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
HASHABLE = st.integers() | st.text() | st.booleans() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(HASHABLE, inner) | st.dictionaries(st.text(), inner)
    ),
    max_leaves=20,
)


def round_trip(value: Any, **options: Any) -> objects.Decoded:
    encoded = objects.encode(value, prefix="p")
    text = json.dumps(encoded.value, allow_nan=False)
    return objects.decode(json.loads(text), tensors=encoded.tensors, where="test", **options)


@given(VALUES)
def test_plain_values_come_back_equal_and_of_the_same_type(value: Any) -> None:
    found = round_trip(value)
    assert repr(found.value) == repr(value)
    assert found.left_out == []


@pytest.mark.parametrize(
    "value",
    [
        {1, 2, 3}, frozenset({"a"}), collections.OrderedDict([("b", 1), ("a", 2)]), complex(1, -2), float("inf"), 2**200,
        torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), argparse.Namespace(lr=0.1, nested=argparse.Namespace(x=1)),
        pathlib.PosixPath("/a/b"), datetime.datetime(2024, 1, 2), np.float64(1.5), np.int32(7),
        np.bool_(True),
        {"$tensor": "not one"}, {"$opaque": 3}, {"a": {"$x": [1]}},
    ],
    ids=str,
)  # fmt: skip
def test_known_types_come_back(value: Any) -> None:
    found = round_trip(value).value
    assert type(found) is type(value)
    assert found == value


def test_tensors_and_arrays_are_pulled_out() -> None:
    value = {
        "t": torch.arange(6).reshape(2, 3).t(),
        "b": torch.ones(2, dtype=torch.bfloat16),
        "a": np.eye(3),
        "u": np.arange(3, dtype=">u4"),
    }
    encoded = objects.encode(value, prefix="client")
    assert sorted(encoded.tensors) == ["client/0", "client/1", "client/2", "client/3"]
    found = round_trip(value).value
    assert torch.equal(found["t"], value["t"])
    assert found["b"].dtype == torch.bfloat16
    assert found["a"].dtype == np.float64
    assert (found["a"] == value["a"]).all()
    assert (found["u"] == value["u"]).all()


class Bomb:
    """Runs code when it is unpickled."""

    ran = False

    def __reduce__(self) -> Any:
        return (setattr, (Bomb, "ran", True))


def test_an_unknown_object_is_kept_but_only_read_with_allow_pickle() -> None:
    encoded = objects.encode({"x": [Bomb()]}, prefix="p")
    assert encoded.opaque == ["x[0]: tests.unit.format.test_objects.Bomb"]
    refused = objects.decode(encoded.value, tensors={}, where="here")
    assert refused.value == {"x": [objects.Opaque("tests.unit.format.test_objects.Bomb")]}
    assert "allow_pickle" in refused.left_out[0]
    assert not Bomb.ran
    objects.decode(encoded.value, tensors={}, allow_pickle=True, where="here")
    assert Bomb.ran


def test_objects_that_cannot_be_pickled_do_not_fail_a_save() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    for value in (threading.Lock(), lambda: 1, cycle, {"f": os.scandir(".")}):
        found = round_trip(value)
        assert found.left_out, value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"$nonsense": 1}, "unknown tag '\\$nonsense'"),
        ({"$tensor": "gone"}, "tensor 'gone' is not stored"),
        ({"$tuple": [], "$set": []}, "is not one tag"),
        ({"$opaque": {"type": 1, "pickle": ""}}, "malformed opaque"),
        ({"$dtype": "nn"}, "cannot hold"),
        ({"$float": "1e9"}, "cannot hold"),
        ({"$numpy": ["O", 1]}, "cannot hold"),
        ({"$bytes": "???"}, "cannot hold"),
        ({"$int": "9" * 5000}, "cannot hold"),
    ],
)
def test_hostile_values_are_errors(value: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        objects.decode(value, tensors={}, where="here")


class _Colour(enum.Enum):
    RED = 1


def test_enumerations_come_back_where_they_are_known_and_import_nothing() -> None:
    encoded = objects.encode({"c": _Colour.RED, "l": [signal.SIGTERM]}, prefix="p")
    assert encoded.opaque == []
    assert objects.decode(encoded.value, tensors={}, where="x").value == {"c": _Colour.RED, "l": [signal.SIGTERM]}
    for strange in (["nowhere_to_be_found", "C", "RED"], ["os", "system", "RED"], [__name__, "_Colour", "BLUE"]):
        found = objects.decode({"$enum": strange}, tensors={}, where="x")
        assert isinstance(found.value, objects.Opaque)
        assert len(found.left_out) == 1
    assert "nowhere_to_be_found" not in sys.modules
    with pytest.raises(FormatError, match="malformed"):
        objects.decode({"$enum": "RED"}, tensors={}, where="x")
