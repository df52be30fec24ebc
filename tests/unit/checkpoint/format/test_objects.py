"""The codec for non-tensor state: everything plain comes back equal; nothing unknown is run or lost."""

from __future__ import annotations

import abc
import argparse
import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import json
import os
import pathlib
import random
import signal
import sys
import threading
import types
import typing
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unickpt.base.errors import FormatError
from unickpt.checkpoint.format import object_encoder, objects

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
HASHABLE = st.integers() | st.text() | st.booleans() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(HASHABLE, inner) | st.dictionaries(st.text(), inner)
    ),
    max_leaves=20,
)


HUGE = {"$range": [0, 10**11, 1]}


def _chain(levels: int, wrap: Callable[[Any], Any]) -> Any:
    """Return an encoded value that refers to the next one many times, and so on."""
    made: Any = 0
    for number in range(levels):
        shared = {"$shared": [number, made]}
        same = {"$same": number}
        made = json.loads(json.dumps(wrap(same)))
        made = _first(made, same, shared)
    return made


def _first(value: Any, old: Any, new: Any) -> Any:
    """Return a JSON value with the first one of another in place of it."""
    text, at = json.dumps(value), json.dumps(old)
    return json.loads(text.replace(at, json.dumps(new), 1))


def _frozen(**members: Any) -> Any:
    return {"$dataclass": [__name__, "_Pairs", members]}


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
    assert encoded.opaque == ["x[0]: tests.unit.checkpoint.format.test_objects.Bomb"]
    refused = objects.decode(encoded.value, tensors={}, where="here")
    assert refused.value == {}, "nothing stands in for the value"
    assert "x[0]: " in str(refused.left_out[0])
    assert "allow_pickle" in str(refused.left_out[0])
    assert not Bomb.ran
    objects.decode(encoded.value, tensors={}, allow_pickle=True, where="here")
    assert Bomb.ran


def test_objects_that_cannot_be_pickled_do_not_fail_a_save() -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    for value in (threading.Lock(), lambda: 1, deep, {"f": os.scandir(".")}):
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
        ({"$decimal": "1e999999999"}, "cannot hold"),
        ({"$decimal": "9" * 5000}, "cannot hold"),
        ({"$range": [0, "x", 1]}, "cannot hold"),
        ({"$range": [0, 5, 0]}, "cannot hold"),
        ({"$fraction": [1, 0]}, "cannot hold"),
        ({"$deque": [-1, []]}, "cannot hold"),
        ({"$defaultdict": ["eval", []]}, "cannot hold"),
        ({"$counter": [[[], 1]]}, "cannot hold"),
        ({"$dict": 3}, "not pairs"),
        ({"$raw_array": ["|O", [1], 1]}, "cannot hold"),
        ({"$bit_generator": {"bit_generator": "SystemRandom", "state": {}}}, "cannot hold"),
        ({"$random_state": {"bit_generator": "MT19937", "state": {"key": 1, "pos": 10**9}}}, "cannot hold"),
        ({"$tuple": HUGE}, "cannot hold"),
        ({"$set": HUGE}, "cannot hold"),
        ({"$frozenset": HUGE}, "cannot hold"),
        ({"$deque": [1, HUGE]}, "cannot hold"),
        ({"$slice": HUGE}, "cannot hold"),
        ({"$size": HUGE}, "unexpected \\$range"),
        ({"$array": ["q", HUGE]}, "unexpected \\$range"),
        ({"$random": {"$tuple": [2, HUGE, None]}}, "unexpected \\$range"),
        ({"$raw_array": ["<f8", HUGE, 0]}, "unexpected \\$range"),
        ({"$fraction": [_chain(9, lambda inner: [inner] * 10), 1]}, "unexpected \\$same"),
        ({"$set": [_chain(9, lambda inner: {"$tuple": [inner] * 10})]}, "\\$tuple has no identity"),
        ({"$set": [_chain(9, lambda inner: _frozen(first=inner, second={"$tuple": [inner] * 10}))]}, "values in keys"),
        ({"$dict": [[_chain(9, lambda inner: _frozen(first=inner, second={"$tuple": [inner] * 10})), 1]]}, "values in keys"),
        ({"$same": 0}, "malformed reference"),
        ({"$same": []}, "malformed reference"),
        ({"$shared": [0]}, "malformed reference"),
        ({"a": {"$shared": [0, []]}, "b": {"$shared": [0, []]}}, "malformed reference"),
        ({"$shared": [0, {"$deque": 3}]}, "malformed object"),
        ({"$dataclass": ["os", "environ", 5]}, "malformed"),
        ({"$namedtuple": ["os", "x", {}]}, "malformed"),
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
        found = objects.decode({"a": {"$enum": strange}, "b": 1}, tensors={}, where="x")
        assert found.value == {"b": 1}
        assert len(found.left_out) == 1
    assert "nowhere_to_be_found" not in sys.modules
    with pytest.raises(FormatError, match="malformed"):
        objects.decode({"$enum": "RED"}, tensors={}, where="x")


@dataclasses.dataclass
class _Plain:
    a: int
    b: list[Any] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        assert self.a != _RUNS, "code of the class ran"


@dataclasses.dataclass(frozen=True, slots=True)
class _Frozen:
    a: int
    b: str = "x"


@dataclasses.dataclass
class _WithFinalizer:
    path: str

    def __del__(self) -> None:
        raise AssertionError("code of the class ran")


class _Pair(typing.NamedTuple):
    x: int
    y: str


_RUNS = 99
DAY = datetime.datetime(2024, 1, 2)
HOUR = datetime.timezone(datetime.timedelta(hours=1))


@pytest.mark.parametrize(
    "value",
    [
        collections.Counter("aab"), collections.Counter({"a": 0, "b": -1}), collections.deque([1, [2]], maxlen=3),
        collections.deque(), collections.defaultdict(list, {"a": [1]}), collections.defaultdict(None, {1: (2,)}), range(3),
        range(10**30, 10**31, 7), slice(None, 3, -1), slice("a"), ..., bytearray(b"ab"), array.array("d", [1.0, 2.0]),
        decimal.Decimal("1.10"), decimal.Decimal("-0"), decimal.Decimal("-Infinity"), fractions.Fraction(1, 3),
        uuid.UUID(int=7), pathlib.PurePosixPath("/a"), pathlib.PureWindowsPath("c:/a"), datetime.date(2024, 1, 2),
        datetime.time(1, 2, 3, fold=1), datetime.timedelta(days=-1, microseconds=5), HOUR, DAY.replace(tzinfo=HOUR),
        types.SimpleNamespace(a=[1]), _Plain(1, [2]), _Frozen(3), _Pair(1, "a"), np.datetime64("2024-01-02"),
        np.timedelta64(5, "s"), np.str_("ab"), np.bytes_(b"ab"), np.complex128(1 + 2j), np.longdouble(1) / 3,
        torch.strided, torch.channels_last, {1: {None: {(1, 2): {True}}}}, {"$same": 0},
    ],
    ids=repr,
)  # fmt: skip
def test_more_types_come_back(value: Any) -> None:
    assert round_trip({"k": value}).left_out == []
    found = round_trip(value).value
    assert type(found) is type(value)
    assert found == value
    assert repr(found) == repr(value)


def test_arrays_and_tensors_of_any_dtype_come_back() -> None:
    structured = [("a", "<i4"), ("b", "<f8", (2,)), ("c", "<U3")]
    arrays = [
        np.array(["a", "bb"]), np.array([b"a", b"bb"]), np.array(["2024-01-02"], dtype="M8[ns]"), np.ones(2, np.longdouble),
        np.array([(1, [2.5, 3], "ab")], dtype=structured), np.array([1 + 2j]), np.empty((0, 3)), np.array(5.0),
        np.zeros((0,), "U5"), np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    ]  # fmt: skip
    for array_of in arrays:
        found = round_trip(array_of).value
        assert (found.dtype, found.shape) == (array_of.dtype, array_of.shape)
        assert found.tobytes() == array_of.tobytes()
    assert np.isnan(round_trip(np.float32("nan")).value)
    tensors = [
        torch.ones(2, dtype=torch.complex128) * 1j, torch.ones(2, 3, requires_grad=True), torch.nn.Parameter(torch.ones(2)),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
    ]  # fmt: skip
    for tensor in tensors:
        found = round_trip(tensor).value
        assert type(found) is type(tensor)
        assert (found.dtype, found.requires_grad) == (tensor.dtype, tensor.requires_grad)
        assert torch.equal(found, tensor)


_COMPLEX = torch.complex(torch.arange(3.0), torch.ones(3))


@pytest.mark.parametrize(
    "value", [_COMPLEX.conj(), _COMPLEX[1:2].conj(), _COMPLEX.conj().imag[1], _COMPLEX.to(torch.complex128).conj()]
)
def test_tensors_that_torch_conjugates_or_negates_when_they_are_read_come_back(value: torch.Tensor) -> None:
    encoded = objects.encode({"value": value}, prefix="p")
    assert encoded.opaque == []
    found = objects.decode(encoded.value, tensors=encoded.tensors, where="t").value["value"]
    assert found.dtype == value.dtype
    assert torch.equal(found, value)
    assert object_encoder.digest_of([value]) == object_encoder.digest_of([value.clone().resolve_conj().resolve_neg()])


def _without_storage() -> torch.Tensor:
    value = torch.ones(4)
    value.untyped_storage().resize_(0)
    return value


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        lambda: torch.nn.Parameter(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), requires_grad=False),
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        lambda: torch.ones(2, device="meta"),
        _without_storage,
    ],
)
def test_a_tensor_whose_memory_does_not_have_its_values_is_opaque(make: Callable[[], torch.Tensor]) -> None:
    value = {"before": torch.ones(2), "odd": make()}
    encoded = objects.encode(value, prefix="p")
    object_encoder.digest_of(value)
    assert [entry[:3] for entry in encoded.opaque] == ["odd"]
    found = objects.decode(encoded.value, tensors=encoded.tensors, where="t")
    assert list(found.value) == ["before"]
    assert found.left_out


def test_generators_continue_at_the_same_number() -> None:
    torchs, pythons = torch.Generator().manual_seed(3), random.Random(3)
    numpys: list[Any] = [np.random.RandomState(3), np.random.default_rng(3), np.random.Philox(3), np.random.MT19937(3)]
    torch.rand(5, generator=torchs)
    found = round_trip([torchs, pythons, *numpys]).value
    assert torch.equal(torch.rand(9, generator=found[0]), torch.rand(9, generator=torchs))
    assert found[1].random() == pythons.random()
    for one, other in zip(found[2:], numpys, strict=True):
        draw = "random" if hasattr(one, "random") else "random_raw"
        assert getattr(one, draw)() == getattr(other, draw)()


def test_references_to_one_object_stay_so() -> None:
    one, held, tensor, numbers = [1], _Plain(1), torch.ones(2), np.ones(2)
    state: dict[str, Any] = {"a": one, "b": one, "tuple": (one, {"deep": one}), "t": [tensor, tensor], "n": [numbers, numbers]}
    held.b = one
    state |= {
        "self": state,
        "held": [held, held],
        "space": argparse.Namespace(x=one),
        "queue": collections.deque([one], maxlen=2),
    }
    state["space"].me, state["default"] = state["space"], collections.defaultdict(list)
    state["queue"].append(state["queue"])
    state["default"]["me"] = state["default"]
    found = round_trip(state).value
    assert found["self"] is found
    assert all(each is found["a"] for each in (found["b"], found["tuple"][0], found["tuple"][1]["deep"], found["space"].x))
    assert found["held"][0] is found["held"][1]
    assert found["held"][0].b is found["a"]
    assert found["t"][0] is found["t"][1]
    assert found["n"][0] is found["n"][1]
    assert found["space"].me is found["space"]
    assert found["queue"][1] is found["queue"]
    assert found["queue"].maxlen == 2
    assert found["default"]["me"] is found["default"]
    assert round_trip({"a": [1], "b": [1], "c": ((), ()), "d": [None, None]}).value["a"] is not found["a"]
    assert json.dumps(objects.encode({"a": [1], "b": [1]}, prefix="p").value) == '{"a": [1], "b": [1]}'


def test_what_cannot_be_stored_leaves_out_the_entry_that_contains_it_and_no_more() -> None:
    bad, cyclic = Bomb(), _Plain(1)
    cyclic.b.append(cyclic)
    berlin = zoneinfo.ZoneInfo("UTC")
    for value, left in (
        (bad, {}), ([1, bad], {}), ((1, {"x": bad, "y": 2}), {"k": (1, {"y": 2})}), ({3: bad, 4: 5}, {"k": {4: 5}}),
        (argparse.Namespace(a=bad, b=2), {"k": argparse.Namespace(b=2)}), (_Plain(1, [bad]), {}), (cyclic, {}),
        (collections.OrderedDict(a=bad, b=1), {"k": collections.OrderedDict(b=1)}), (10**5000, {}),
        (decimal.Decimal("1e999999"), {}), (collections.defaultdict(lambda: 1), {}), (_Plain, {}), (signal.Handlers, {}),
        (DAY.replace(tzinfo=berlin), {}), (np.array([bad], dtype=object), {}), ([bad, bad], {}),
    ):  # fmt: skip
        found = round_trip({"k": value, "after": 7})
        assert found.value == {**left, "after": 7}, value
        assert found.left_out, value


def test_no_code_of_a_class_runs_and_none_is_imported() -> None:
    found = objects.decode({"$dataclass": [__name__, "_Plain", {"a": _RUNS, "b": []}]}, tensors={}, where="x").value
    assert (type(found), found.a) == (_Plain, _RUNS)
    for kind, path, content in (
        ("dataclass", "_WithFinalizer", {"path": "/"}), ("dataclass", "Bomb", {"ran": 1}), ("dataclass", "os", {}),
        ("dataclass", "_Frozen", {"other": 1}), ("namedtuple", "_Pair", [1]), ("namedtuple", "_Plain", [1]),
    ):  # fmt: skip
        value = {"k": {f"${kind}": [__name__, path, content]}, "l": 1}
        assert objects.decode(value, tensors={}, where="x").value == {"l": 1}, path
    value = {"k": {"$dataclass": ["nowhere_to_be_found", "A", {}]}}
    assert objects.decode(value, tensors={}, where="x").value == {}
    assert "nowhere_to_be_found" not in sys.modules


@dataclasses.dataclass(frozen=True)
class _Pairs:
    first: Any
    second: Any


@dataclasses.dataclass
class _Settings(dict):  # type: ignore[type-arg]
    lr: float = 0.1


@dataclasses.dataclass(init=False)
class _Call(functools.partial):  # type: ignore[type-arg]
    """Has a docstring, because Python 3.10 cannot write one: it finds no signature."""

    lr: float = 0.1


class _Slotted:
    __slots__ = ("inside",)


@dataclasses.dataclass
class _OfSlotted(_Slotted):
    lr: float = 0.1


@dataclasses.dataclass
class _Abstract(abc.ABC):  # noqa: B024 - it is not abstract
    lr: float = 0.1


@dataclasses.dataclass
class _WithState(_Abstract, typing.Generic[typing.TypeVar("T")]):  # type: ignore[misc]
    def __getstate__(self) -> Any:
        return {"lr": 2 * self.lr}


@dataclasses.dataclass
class _NoState:
    lr: float = 0.1
    __setstate__ = None


def _slotted() -> _OfSlotted:
    made = _OfSlotted()
    made.inside = 5
    return made


@pytest.mark.parametrize(
    "value", [_Settings({"a": 1}), _Call(max, 1), _slotted(), _WithState()], ids=lambda v: type(v).__name__
)
def test_a_dataclass_with_contents_beside_its_fields_is_opaque(value: Any) -> None:
    if isinstance(value, dict):
        value["a"] = 1
    refused = round_trip({"k": value, "other": 1})
    assert refused.value == {"other": 1}
    assert "a pickle" in str(refused.left_out[0])
    found = round_trip({"k": value}, allow_pickle=True).value["k"]
    assert type(found) is type(value)
    if isinstance(value, dict):
        assert dict(found) == {"a": 1}
    if isinstance(value, _OfSlotted):
        assert found.inside == 5
    if isinstance(value, _WithState):
        assert found.lr == 0.2


def test_a_dataclass_that_pickle_cannot_restore_does_not_fail_a_save() -> None:
    assert len(objects.encode({"k": _NoState()}, prefix="p").opaque) == 1


def test_a_dataclass_that_became_abstract_is_left_out() -> None:
    encoded = objects.encode({"k": _Abstract(0.2), "other": 1}, prefix="p").value
    assert objects.decode(encoded, tensors={}, where="x").value == {"k": _Abstract(0.2), "other": 1}
    encoded["k"]["$dataclass"][1] = "_NowAbstract"
    found = objects.decode(encoded, tensors={}, where="x")
    assert found.value == {"other": 1}
    assert "abstract" in str(found.left_out[0])


@dataclasses.dataclass
class _NowAbstract(abc.ABC):
    @abc.abstractmethod
    def step(self) -> None: ...


def test_allow_pickle_imports_the_module_of_a_class(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int = 1\n"
    (tmp_path / "only_with_allow_pickle.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    encoded = {"k": {"$dataclass": ["only_with_allow_pickle", "A", {"x": 7}]}}
    assert objects.decode(encoded, tensors={}, where="x").value == {}
    assert "only_with_allow_pickle" not in sys.modules
    assert objects.decode(encoded, tensors={}, where="x", allow_pickle=True).value["k"].x == 7
    absent = {"k": {"$dataclass": ["nowhere_to_be_found", "A", {}]}}
    assert objects.decode(absent, tensors={}, where="x", allow_pickle=True).left_out
