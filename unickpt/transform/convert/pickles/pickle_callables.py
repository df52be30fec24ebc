"""Classes and functions that a pickle stream may name, each with a pure function that returns the value of a call.

No module of a framework is imported. Every function checks the types of its arguments.
"""

from __future__ import annotations

import reprlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

from unickpt.base.errors import FormatError
from unickpt.transform.convert.pickles.pickle_machine import keyed
from unickpt.transform.convert.pickles.pickle_records import Name, Record, UnsafePickleError


class StorageType(Name):
    """A storage class. A pickle may name it but not call it."""

    __slots__ = ("dtype",)

    def __init__(self, name: str, dtype: str | None) -> None:
        super().__init__(name)
        self.dtype = dtype


def first(data: Any, *_more: Any) -> Any:
    return data


def _of(*kinds: type) -> Any:
    """Return a function that checks the type of its single argument and returns it."""

    def check(value: Any) -> Any:
        if type(value) not in kinds:
            raise FormatError(f"builds a {kinds[0].__name__} from a {type(value).__name__}")
        return value

    return check


def _items(values: Any = ()) -> list[Any]:
    listed: list[Any] = list(_of(list, tuple, set, frozenset, deque)(values))
    return listed


def _mapping(values: Any = ()) -> Mapping[Any, Any]:
    if type(values) in (dict, OrderedDict):
        return dict(values)
    pairs = _items(values)
    keyed((_of(tuple, list)(pair)[0] for pair in pairs), set)
    return dict(pairs)


def _no_factory(*factory: Any) -> dict[Any, Any]:
    """Return a ``defaultdict`` as a plain dictionary."""
    _of(Name, type(None))(factory[0] if factory else None)
    return _mapping(*factory[1:]) if len(factory) > 1 else {}  # type: ignore[return-value]


def _deque(values: Any = (), _limit: Any = None) -> deque[Any]:
    return deque(_items(values))


def _latin1(text: Any, encoding: Any = "latin1") -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1", "ascii", "utf-8"):
        raise FormatError(f"encodes a {type(text).__name__} as {reprlib.repr(encoding)[:40]}")
    return text.encode(encoding)


def _bytes(data: Any = b"") -> bytes:
    """Return bytes. Protocol 2 writes empty bytes as a call of ``bytes``."""
    return bytes(_of(bytes, bytearray)(data))


def _bytearray(data: Any = b"", encoding: Any = "latin1") -> bytearray:
    return bytearray(_latin1(data, encoding) if type(data) is str else _of(bytes, bytearray)(data))


def _timedelta(*numbers: Any) -> timedelta:
    return timedelta(*(_of(int)(number) for number in numbers))


def _complex(*parts: Any) -> complex:
    return complex(*(_of(float, int)(part) for part in parts))


def _unique(kind: type) -> Callable[..., Any]:
    return lambda values=(): keyed(_items(values), kind)


def _tuple(values: Any = ()) -> tuple[Any, ...]:
    return tuple(_items(values))


def _ordered(values: Any = ()) -> OrderedDict[Any, Any]:
    return OrderedDict(_mapping(values))


def _member(owner: Any, name: Any) -> Record:
    """Return the record of a member of an enumeration.

    Python 3.11.2 pickles ``Kind.ONE`` as ``getattr(Kind, "ONE")`` (``Enum.__reduce_ex__``), and 3.11.7 as ``Kind(1)``.
    """
    if type(owner) is not Name or owner.make is not None or type(name) is not str or name.startswith("_"):
        raise UnsafePickleError(
            "calls builtins.getattr for something else than a member of a stored class, which is not on the list of allowed "
            "classes; no code of the file was run"
        )
    return Record(owner.name, (name,))


_MAKERS = {
    "builtins.getattr": _member,
    "collections.OrderedDict": _ordered, "collections.defaultdict": _no_factory, "collections.deque": _deque,
    "builtins.set": _unique(set), "builtins.frozenset": _unique(frozenset), "builtins.list": _items, "builtins.tuple": _tuple,
    "builtins.dict": _mapping, "builtins.int": _of(int, bool), "builtins.float": _of(float, int), "builtins.bool": _of(bool),
    "builtins.str": _of(str), "builtins.complex": _complex, "builtins.bytearray": _bytearray,
    "builtins.bytes": _bytes, "datetime.timedelta": _timedelta, "_codecs.encode": _latin1, "torch.Size": _tuple,
    "torch.serialization._get_layout": _of(str),
}  # fmt: skip
_ARRAYS = ("numpy.core.multiarray", "numpy._core.multiarray")


def _records(full: Iterable[str], kind: str = "") -> dict[str, Name]:
    return {each: Name(kind or each) for each in full}


KNOWN: Mapping[str, Name] = {
    **{full: Name(full, make) for full, make in _MAKERS.items()},
    "torch.storage.UntypedStorage": StorageType("torch.storage.UntypedStorage", None),
    "torch.UntypedStorage": StorageType("torch.UntypedStorage", None),
    **_records(("_io.BytesIO", "torch.device", "torch.Tensor", "numpy.dtype", "numpy.ndarray")),
    **_records(("torch.nn.parameter.Parameter",), "torch.Parameter"),
    **_records((f"{module}._reconstruct" for module in _ARRAYS), "numpy.array"),
    **_records((f"{module}.scalar" for module in _ARRAYS), "numpy.scalar"),
}
