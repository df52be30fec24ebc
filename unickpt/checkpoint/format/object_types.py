"""Types of non-tensor state that the codec (``objects.py``) stores natively: one table of tags.

A row takes a value of its type apart into parts that the codec encodes in turn, and builds a value from decoded parts.
Parts come from checkpoints that nobody trusts. So a row runs no code of the checkpoint or of a user's class, imports no
module, and limits numbers whose use would exhaust memory.
"""

from __future__ import annotations

import argparse
import array
import base64
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import random
import sys
import types
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from unickpt.checkpoint.format.dtypes import byte_view

MAX_DIGITS = 4000  # of an integer
_MAX_EXPONENT = 100_000  # of a decimal number: int() of a larger one takes megabytes
_FACTORIES: Mapping[str, Any] = {
    kind.__name__: kind
    for kind in (list, dict, set, int, float, str, bool, tuple, bytes, frozenset, collections.OrderedDict, collections.Counter,
                 collections.deque)
}  # fmt: skip
_MT_WORDS, _PHILOX_WORDS = 624, 4  # of the states of numpy's bit generators
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


@dataclasses.dataclass(frozen=True, slots=True)
class TypeRow:
    """How values of one type are stored.

    Attributes:
        tag: key of the stored object.
        parts: takes a value apart. It raises ValueError for a value that ``build`` would refuse.
        build: makes a value of decoded parts, or raises.
        empty: makes a value that is filled afterwards, from the undecoded parts. None: the value cannot contain itself.
        fill: gives an empty value the contents of a built one.
    """

    tag: str
    parts: Callable[[Any], Any]
    build: Callable[[Any], Any]
    empty: Callable[[Any], Any] | None = None
    fill: Callable[[Any, Any], object] | None = None


# ---------------------------------------------------------------- numbers and dates


def _decimal(text: Any) -> decimal.Decimal:
    if not isinstance(text, str) or len(text) > MAX_DIGITS:
        raise ValueError(f"not a decimal number of at most {MAX_DIGITS} characters")
    found = decimal.Decimal(text)
    if found.is_finite() and abs(int(found.as_tuple().exponent)) > _MAX_EXPONENT:
        raise ValueError(f"an exponent beyond {_MAX_EXPONENT:,}")
    return found


def _decimal_parts(value: decimal.Decimal) -> str:
    _decimal(str(value))
    return str(value)


def _fraction(parts: Any) -> fractions.Fraction:
    above, below = parts
    return fractions.Fraction(_integer(above), _integer(below))


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{type(value).__name__} is not an integer")  # the text of a hostile value may have any length
    return value


def _optional(value: Any) -> int | None:
    return None if value is None else _integer(value)


def _datetime(value: Any) -> datetime.datetime:
    text, fold = value if isinstance(value, list) else (value, 0)
    return datetime.datetime.fromisoformat(text).replace(fold=_integer(fold))


def _datetime_parts(value: datetime.datetime) -> Any:
    _fixed(value.tzinfo)
    return [value.isoformat(), value.fold] if value.fold else value.isoformat()


def _time(value: Any) -> datetime.time:
    text, fold = value
    return datetime.time.fromisoformat(text).replace(fold=_integer(fold))


def _time_parts(value: datetime.time) -> Any:
    _fixed(value.tzinfo)
    return [value.isoformat(), value.fold]


def _fixed(zone: datetime.tzinfo | None) -> None:
    if zone is not None and type(zone) is not datetime.timezone:
        raise ValueError("a time zone with rules of its own")


def _timedelta(parts: Any) -> datetime.timedelta:
    return datetime.timedelta(*map(_integer, parts))


# ---------------------------------------------------------------- containers


def _list(value: Any) -> list[Any]:
    """Return a list. A ``range`` of a few bytes would do as well, and has any length."""
    if type(value) is not list:
        raise TypeError(f"{type(value).__name__} is not a list")
    return value


def _listed(make: Callable[[list[Any]], Any]) -> Callable[[Any], Any]:
    return lambda value: make(_list(value))


def _items(value: Mapping[Any, Any]) -> list[list[Any]]:
    return [list(pair) for pair in value.items()]


def _counter(pairs: Any) -> collections.Counter[Any]:
    found: collections.Counter[Any] = collections.Counter()
    dict.update(found, {key: item for key, item in pairs})
    return found


def _deque(parts: Any) -> collections.deque[Any]:
    limit, items = _list(parts)
    return collections.deque(_list(items), maxlen=_optional(limit))


def _factory(name: Any) -> Any:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{type(name).__name__} is not the name of a factory")
    return None if name is None else _FACTORIES[name]


def _defaultdict(parts: Any) -> collections.defaultdict[Any, Any]:
    name, pairs = _list(parts)
    return collections.defaultdict(_factory(name), {key: item for key, item in pairs})


def _defaultdict_parts(value: collections.defaultdict[Any, Any]) -> Any:
    factory = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if _factory(name) is not factory:
        raise ValueError("another factory")
    return [name, _items(value)]


def _members(value: Any) -> dict[str, Any]:
    return dict(vars(value))


def _simple(members: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**members)


def _update_members(value: Any, other: Any) -> None:
    vars(value).update(vars(other))


# ---------------------------------------------------------------- arrays and tensors


def _numpy_dtype(parts: Any) -> np.dtype[Any]:
    found = np.lib.format.descr_to_dtype(parts)
    if found.hasobject:
        raise ValueError("an array of objects")
    return found


def _dtype_parts(dtype: np.dtype[Any]) -> Any:
    described = np.lib.format.dtype_to_descr(dtype)
    if dtype.hasobject or _numpy_dtype(described) != dtype:
        raise ValueError("not described completely")
    return described


def _raw_parts(value: Any) -> Any:
    """Return an array as its dtype, shape and bytes."""
    array_of = np.ascontiguousarray(value)
    data = np.frombuffer(bytearray(array_of.tobytes()), dtype=np.uint8)
    return [_dtype_parts(array_of.dtype), list(np.shape(value)), torch.from_numpy(data)]


def _raw(parts: Any) -> np.ndarray[Any, Any]:
    described, shape, data = parts
    return np.frombuffer(data.numpy().tobytes(), dtype=_numpy_dtype(described)).reshape([_integer(n) for n in shape]).copy()


def row_major(value: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor in host memory, in row-major order.

    Raises an exception if the memory of a tensor does not have its values: quantized, sparse, nested, meta, without storage.
    """
    if value.is_quantized:  # its bytes are values only together with scales; torch reads beside its memory
        raise TypeError(f"{value.dtype} is quantized")
    found = value.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    if found.numel():
        byte_view(found).numpy()
    return found


def _viewed_parts(value: torch.Tensor) -> Any:
    """Return a tensor of a dtype that the format does not have as its dtype, shape and bytes."""
    data = row_major(value)
    return [str(data.dtype), list(data.shape), byte_view(data)]


def _viewed(parts: Any) -> torch.Tensor:
    name, shape, data = parts
    found: torch.Tensor = data.view(torch_constant(torch.dtype, name)).reshape([_integer(n) for n in shape])
    return found


def torch_constant(kind: type, text: Any) -> Any:
    """Return a constant of torch, such as ``torch.float32``, by its text."""
    found = vars(torch).get(text.removeprefix("torch."))  # not getattr, which imports lazy modules of torch
    if not isinstance(found, kind):
        raise ValueError(f"{text!r} is not a {kind.__name__}")
    return found


def _parameter(parts: Any) -> torch.nn.Parameter:
    tensor, wanted = parts
    return torch.nn.Parameter(tensor, requires_grad=bool(wanted))


# ---------------------------------------------------------------- random generators


def _torch_generator(parts: Any) -> torch.Generator:
    device, state = parts
    try:
        found = torch.Generator(device=torch.device(device))
    except RuntimeError as err:
        raise NotHereError(f"this process has no generators of {device}: {err}") from None
    found.set_state(state)
    return found


def _random(state: Any) -> random.Random:
    found = random.Random()
    found.setstate(state)
    return found


def _bit_generator(state: Any) -> Any:
    name = state["bit_generator"]
    if name not in _BIT_GENERATORS:
        raise ValueError(f"{name!r} is not a bit generator")
    inside = state["state"]
    if name == "MT19937" and not (0 <= _integer(inside["pos"]) <= _MT_WORDS and inside["key"].shape == (_MT_WORDS,)):
        raise ValueError("a position outside of the state")  # numpy does not check it, and would read there
    if name == "Philox" and not 0 <= _integer(state["buffer_pos"]) <= _PHILOX_WORDS:
        raise ValueError("a position outside of the buffer")
    found = getattr(np.random, name)()
    found.state = state
    return found


def _bits(value: Any) -> Any:
    state = value.state
    if state.get("bit_generator") not in _BIT_GENERATORS:
        raise ValueError("another bit generator")
    return state


def _random_state(state: Any) -> np.random.RandomState:
    if state["bit_generator"] != "MT19937":
        raise ValueError("a RandomState of another bit generator")
    _bit_generator({"bit_generator": "MT19937", "state": state["state"]})  # checks it
    found = np.random.RandomState()
    found.set_state(state)
    return found


# ---------------------------------------------------------------- classes of the job


class NotHereError(Exception):
    """The value is sound, but this process cannot make it: it has not imported the class, or lacks the device."""


def class_of(module: Any, path: Any) -> Any:
    """Return a class of a module that is already imported. Nothing is imported, and no descriptor runs.

    Raises:
        NotHereError: there is none.
    """
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    if not isinstance(found, type):
        raise NotHereError(f"this job has not imported {module}.{path}")
    return found


def is_named_tuple(kind: type) -> bool:
    """Whether a class is what ``collections.namedtuple`` or ``typing.NamedTuple`` makes, perhaps with more methods."""
    fields = getattr(kind, "_fields", None)
    if kind.__mro__[-2:] != (tuple, object) or not isinstance(fields, tuple) or not hasattr(kind, "_make"):
        return False
    return all(type(field) is str for field in fields) and not _methods(kind) & _SPECIAL


def is_plain_dataclass(kind: type) -> bool:
    """Whether the state of an object is the values of its fields: a dataclass without methods for pickle or a finalizer.

    ``dataclasses`` itself adds methods for pickle to a frozen class with slots. A class that derives from one of another
    language, such as ``dict``, has contents there. One that derives from a class with slots may have values in these.
    """
    bases = [base for base in kind.__mro__ if base is not object]
    if not dataclasses.is_dataclass(kind) or _methods(kind) & _SPECIAL:
        return False
    fields = {each.name for each in dataclasses.fields(kind)}
    return all(
        base.__flags__ & _HEAP_TYPE
        and not isinstance(vars(base).get("__new__"), types.BuiltinFunctionType)
        and not any(type(each) is types.MemberDescriptorType and name not in fields for name, each in vars(base).items())
        and all(getattr(vars(base)[name], "__module__", "") == "dataclasses" for name in _OF_PICKLE & set(vars(base)))
        for base in bases
    )


_SPECIAL = frozenset({"__reduce__", "__reduce_ex__", "__del__"})
_OF_PICKLE = frozenset({"__getstate__", "__setstate__"})
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: of every class statement


def _methods(kind: type) -> set[str]:
    """Return the names that a class and its bases define, but for those of ``object`` and ``tuple``."""
    return {name for base in kind.__mro__ if base not in (object, tuple) for name in vars(base)}


def dataclass_members(value: Any) -> dict[str, Any]:
    """Return the fields of an object that are set, and its other attributes."""
    fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if hasattr(value, each.name)}
    return {**fields, **getattr(value, "__dict__", {})}


def made_dataclass(kind: type, members: Mapping[str, Any]) -> Any:
    """Return an object of a dataclass with these members. No method of the class runs, as with pickle."""
    if not is_plain_dataclass(kind):
        raise NotHereError(f"{kind.__module__}.{kind.__qualname__} is not a plain dataclass")
    found: Any = object.__new__(kind)
    inside = getattr(found, "__dict__", None)
    for name, value in members.items():
        slot = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
        if isinstance(slot, types.MemberDescriptorType):
            slot.__set__(found, value)
        elif inside is not None:
            inside[name] = value
        else:
            raise NotHereError(f"{kind.__module__}.{kind.__qualname__} has no member {name!r}")
    return found


def made_named_tuple(kind: type, items: Iterable[Any]) -> Any:
    """Return a named tuple. No method of the class runs."""
    found = list(items)
    if not is_named_tuple(kind) or len(kind._fields) != len(found):  # type: ignore[attr-defined]
        raise NotHereError(f"{kind.__module__}.{kind.__qualname__} is no named tuple of {len(found)} fields")
    return tuple.__new__(kind, found)


def enum_member(kind: type, name: str) -> Any:
    """Return a member of an enumeration by its name."""
    if not isinstance(kind, enum.EnumMeta) or name not in kind.__members__:
        raise NotHereError(f"{kind.__module__}.{kind.__qualname__} has no member {name!r}")
    return kind.__members__[name]


# ---------------------------------------------------------------- the table


def _b64(value: Any) -> str:
    return base64.b64encode(value).decode()


def _unb64(text: Any) -> bytes:
    return base64.b64decode(text, validate=True)


def _size(extents: Any) -> torch.Size:
    if not all(type(n) is int and 0 <= n < 2**63 for n in extents):
        raise ValueError("not a list of extents")
    return torch.Size(extents)


def _text(make: Callable[[str], Any]) -> Callable[[Any], Any]:
    def build(text: Any) -> Any:
        if not isinstance(text, str):
            raise TypeError(f"{type(text).__name__} is not text")
        return make(text)

    return build


def _same(value: Any) -> Any:
    return value


def _dict(pairs: Any) -> dict[Any, Any]:
    return {key: item for key, item in pairs}


def _ordered(pairs: Any) -> collections.OrderedDict[Any, Any]:
    return collections.OrderedDict((key, item) for key, item in pairs)


_UPDATE: Any = dict.update
ROWS: Mapping[type, TypeRow] = {
    tuple: TypeRow("$tuple", list, _listed(tuple)),
    set: TypeRow("$set", list, _listed(set)),
    frozenset: TypeRow("$frozenset", list, _listed(frozenset)),
    collections.OrderedDict: TypeRow(
        "$ordered", _items, _ordered, lambda _: collections.OrderedDict(), lambda to, other: to.update(other)
    ),
    collections.Counter: TypeRow("$counter", _items, _counter, lambda _: collections.Counter(), _UPDATE),
    collections.defaultdict: TypeRow(
        "$defaultdict", _defaultdict_parts, _defaultdict, lambda parts: collections.defaultdict(_factory(parts[0])), _UPDATE
    ),
    collections.deque: TypeRow(
        "$deque",
        lambda v: [v.maxlen, list(v)],
        _deque,
        lambda parts: collections.deque(maxlen=_optional(parts[0])),
        lambda to, other: to.extend(other),
    ),
    argparse.Namespace: TypeRow(
        "$namespace", _members, lambda found: argparse.Namespace(**found), lambda _: argparse.Namespace(), _update_members
    ),
    types.SimpleNamespace: TypeRow("$simple_namespace", _members, _simple, lambda _: types.SimpleNamespace(), _update_members),
    bytes: TypeRow("$bytes", _b64, _unb64),
    bytearray: TypeRow("$bytearray", _b64, lambda text: bytearray(_unb64(text))),
    array.array: TypeRow("$array", lambda v: [v.typecode, v.tolist()], lambda parts: array.array(parts[0], parts[1])),
    complex: TypeRow("$complex", lambda v: [v.real, v.imag], lambda parts: complex(*parts)),
    decimal.Decimal: TypeRow("$decimal", _decimal_parts, _decimal),
    fractions.Fraction: TypeRow("$fraction", lambda v: [v.numerator, v.denominator], _fraction),
    range: TypeRow("$range", lambda v: [v.start, v.stop, v.step], lambda parts: range(*map(_integer, parts))),
    slice: TypeRow("$slice", lambda v: [v.start, v.stop, v.step], _listed(lambda parts: slice(*parts))),
    type(Ellipsis): TypeRow("$ellipsis", lambda _: None, lambda _: Ellipsis),
    uuid.UUID: TypeRow("$uuid", lambda v: v.hex, _text(uuid.UUID)),
    pathlib.PosixPath: TypeRow("$path", str, _text(pathlib.Path)),
    pathlib.PurePosixPath: TypeRow("$posix_path", str, _text(pathlib.PurePosixPath)),
    pathlib.PureWindowsPath: TypeRow("$windows_path", str, _text(pathlib.PureWindowsPath)),
    datetime.datetime: TypeRow("$datetime", _datetime_parts, _datetime),
    datetime.date: TypeRow("$date", lambda v: v.isoformat(), _text(datetime.date.fromisoformat)),
    datetime.time: TypeRow("$time", _time_parts, _time),
    datetime.timedelta: TypeRow("$timedelta", lambda v: [v.days, v.seconds, v.microseconds], _timedelta),
    datetime.timezone: TypeRow("$timezone", lambda v: v.utcoffset(None), lambda offset: datetime.timezone(offset)),
    torch.Size: TypeRow("$size", list, _size),
    torch.dtype: TypeRow("$dtype", str, lambda text: torch_constant(torch.dtype, text)),
    torch.layout: TypeRow("$layout", str, lambda text: torch_constant(torch.layout, text)),
    torch.memory_format: TypeRow("$memory_format", str, lambda text: torch_constant(torch.memory_format, text)),
    torch.device: TypeRow("$device", str, _text(torch.device)),
    torch.Generator: TypeRow("$generator", lambda v: [str(v.device), v.get_state()], _torch_generator),
    random.Random: TypeRow("$random", lambda v: v.getstate(), _random),
    np.random.RandomState: TypeRow("$random_state", lambda v: v.get_state(legacy=False), _random_state),
    np.random.Generator: TypeRow(
        "$numpy_generator", lambda v: _bits(v.bit_generator), lambda state: np.random.Generator(_bit_generator(state))
    ),
    **{getattr(np.random, name): TypeRow("$bit_generator", _bits, _bit_generator) for name in _BIT_GENERATORS},
}
DICT = TypeRow("$dict", _items, _dict, lambda _: {}, _UPDATE)
LIST = TypeRow("", _same, _same, lambda _: [], lambda to, other: to.extend(other))
PARAMETER = TypeRow("$parameter", lambda v: [v.detach(), v.requires_grad], _parameter)
LEAF = TypeRow("$requires_grad", lambda v: v.detach(), lambda tensor: tensor.requires_grad_())
VIEWED = TypeRow("$viewed", _viewed_parts, _viewed)
RAW = TypeRow("$raw_array", _raw_parts, _raw)
RAW_SCALAR = TypeRow("$raw_scalar", _raw_parts, lambda parts: _raw(parts)[()])
OPEN = frozenset(row.tag for kind, row in ROWS.items() if row.empty is not None or kind in (tuple, set, frozenset, slice)) | {
    DICT.tag
}  # rows whose parts are any values
BUILT: Mapping[str, TypeRow] = {row.tag: row for row in (*ROWS.values(), DICT, PARAMETER, LEAF, VIEWED, RAW, RAW_SCALAR)}
