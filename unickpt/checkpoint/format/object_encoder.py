"""Encoder of non-tensor state (see ``objects.py``)."""

from __future__ import annotations

import argparse
import base64
import collections
import enum
import json
import math
import pickle
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from unickpt.base.errors import FormatError
from unickpt.checkpoint.format import dtypes, object_types
from unickpt.checkpoint.format.dtypes import byte_view
from unickpt.checkpoint.format.object_types import MAX_DIGITS, ROWS, TypeRow

MAX_DEPTH = 128


@dataclass(slots=True)
class Encoded:
    """Result of ``encode``.

    Attributes:
        value: JSON value.
        tensors: detached CPU tensors by key, to be stored separately.
        opaque: paths (``a.b[0]``) and class names of the values stored as blobs, or not stored because pickle
            failed.
    """

    value: Any
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    opaque: list[str] = field(default_factory=list)


def encode(value: Any, *, prefix: str) -> Encoded:
    """Encode any Python value. No content of ``value`` raises an exception.

    References to one object stay references to one object, also those of an object to itself.

    Args:
        value: the value to store.
        prefix: prefix of the keys of extracted tensors.
    """
    out = Encoded(None)
    repeated = set() if type(value) in _PLAIN else _repeated(value)
    out.value = _Encoder(prefix, out, repeated).encode(value, path="", depth=0)
    return out


def digest_of(value: Any) -> str:
    """Return a digest of any Python value. Ranks compare digests instead of the values themselves."""
    encoded = encode(value, prefix="")
    found = xxhash.xxh3_128(json.dumps(encoded.value, sort_keys=True).encode())
    for key, tensor in encoded.tensors.items():
        found.update(key.encode())
        found.update(byte_view(tensor).numpy().tobytes() if tensor.numel() else b"")
    return found.hexdigest()


_SHAREABLE = (
    list, dict, set, bytearray, collections.OrderedDict, collections.Counter, collections.defaultdict, collections.deque,
    argparse.Namespace, types.SimpleNamespace, np.ndarray,
)  # fmt: skip


def _inside(value: Any) -> Iterable[Any]:
    """Return the values in a container, keys included."""
    kind = type(value)
    found: Iterable[Any] = ()
    if kind in (list, tuple, set, frozenset, collections.deque):
        found = value
    elif isinstance(value, dict):
        found = (each for pair in value.items() for each in pair)
    elif kind in (argparse.Namespace, types.SimpleNamespace):
        found = vars(value).values()
    elif kind not in _LEAVES and _is_record(value):
        found = value if isinstance(value, tuple) else object_types.dataclass_members(value).values()
    return found


_SAME = frozenset({type(None), bool, str})  # are JSON values
_PLAIN = _SAME | {int, float}
_LEAVES = _PLAIN | {bytes, bytearray, torch.Tensor, np.ndarray}
_UNSHARED = _LEAVES - frozenset(_SHAREABLE)


def _is_record(value: Any) -> bool:
    """Whether a value is an instance of a named tuple or of a dataclass that the codec stores by its members."""
    kind = type(value)
    if isinstance(value, tuple):
        return object_types.is_named_tuple(kind) and not getattr(value, "__dict__", None)
    return object_types.is_plain_dataclass(kind)


def _repeated(value: Any) -> set[int]:
    """Return the ids of the objects with an identity to which a value has more than one reference."""
    seen: set[int] = set()
    found: set[int] = set()
    waiting: list[Iterable[Any]] = [(value,)]
    while waiting:
        for each in waiting.pop():
            kind = type(each)
            if kind in _UNSHARED:
                continue
            key = id(each)
            if key in seen:
                found.add(key)
                continue
            seen.add(key)
            if kind is dict:
                waiting += [tuple(each), tuple(each.values())]
                continue
            try:
                waiting.append(tuple(_inside(each)))
            except Exception:  # a property of the user's class
                continue
    return found


class _Encoder:
    """Recursive encoder. ``repeated``: ids of the objects to keep as one object."""

    def __init__(self, prefix: str, out: Encoded, repeated: set[int]) -> None:
        self._prefix, self._out, self._repeated = prefix, out, repeated
        self._numbers: dict[int, int] = {}  # of repeated objects
        self._open: set[int] = set()  # those that are being encoded
        self._keys: dict[int, str] = {}  # of tensors
        self._kept: list[Any] = []  # a temporary value must not give its id to another one

    def encode(self, value: Any, *, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:  # extreme nesting
            return self._opaque(value, path)
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return self._int(value, path)
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if id(value) in self._repeated and (kind in _SHAREABLE or (_is_record(value) and not isinstance(value, tuple))):
            return self._shared(value, path, depth)
        return self._plain(value, path, depth)

    def _shared(self, value: Any, path: str, depth: int) -> Any:
        """Encode an object at its first place, and a reference to it at the others."""
        number = self._numbers.get(id(value))
        if number is not None:
            if id(value) in self._open and not _may_contain_itself(type(value)):
                return self._opaque(value, path)
            return {"$same": number}
        number = self._numbers[id(value)] = len(self._numbers)
        self._open.add(id(value))
        encoded = self._plain(value, path, depth + 1)  # a reader needs more levels for it
        self._open.discard(id(value))
        return {"$shared": [number, encoded]}

    def _plain(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind is list:
            return self._items(value, path, depth)
        if kind is dict:
            return self._mapping(value, path, depth)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path, depth)
        if kind in (argparse.Namespace, types.SimpleNamespace):
            return {ROWS[kind].tag: self._mapping(vars(value), path, depth + 1)}
        row = ROWS.get(kind)
        if row is not None:
            return self._row(row, value, path, depth)
        if isinstance(value, enum.Enum):
            known = kind.__members__.get(value.name) is value if isinstance(value.name, str) else False
            return {"$enum": [kind.__module__, kind.__qualname__, value.name]} if known else self._opaque(value, path)
        if kind is np.ndarray:
            return self._array(value, path, depth)
        if isinstance(value, np.generic):
            return self._number(value, path, depth)
        if _is_record(value):
            return self._record(value, path, depth)
        return self._opaque(value, path)

    def _int(self, value: int, path: str) -> Any:
        if abs(value) < 2**63:
            return value
        return {"$int": str(value)} if abs(value) < 10**MAX_DIGITS else self._opaque(value, path)

    def _row(self, row: TypeRow, value: Any, path: str, depth: int) -> Any:
        try:
            parts = row.parts(value)
        except Exception:  # such as a time zone with rules of its own: the table has no form for it
            return self._opaque(value, path)
        self._kept.append(parts)
        return {row.tag: self.encode(parts, path=path, depth=depth + 1)}

    def _record(self, value: Any, path: str, depth: int) -> Any:
        """Encode a named tuple or a dataclass by its members."""
        kind = type(value)
        where = [kind.__module__, kind.__qualname__]
        if isinstance(value, tuple):
            return {"$namedtuple": [*where, self._items(list(value), path, depth + 1)]}
        try:
            members = object_types.dataclass_members(value)
        except Exception:
            return self._opaque(value, path)
        return {"$dataclass": [*where, self._mapping(members, path, depth + 1)]}

    def _items(self, values: list[Any], path: str, depth: int) -> list[Any]:
        return [
            item if type(item) in _SAME else self.encode(item, path=f"{path}[{at}]", depth=depth + 1)
            for at, item in enumerate(values)
        ]

    def _mapping(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {
                key: item if type(item) in _SAME else self.encode(item, path=f"{path}.{key}" if path else key, depth=depth + 1)
                for key, item in value.items()
            }
        return {"$dict": self._items([[key, item] for key, item in value.items()], path, depth)}

    def _tensor(self, value: torch.Tensor, path: str, depth: int) -> Any:
        if isinstance(value, torch.nn.Parameter) and type(value) is torch.nn.Parameter:
            return self._row(object_types.PARAMETER, value, path, depth)
        if value.requires_grad and value.is_leaf:
            return self._row(object_types.LEAF, value, path, depth)
        if id(value) in self._keys:
            return {"$tensor": self._keys[id(value)]}
        try:
            tensor = object_types.row_major(value)
            dtypes.name_of(tensor.dtype)
        except FormatError:
            return self._row(object_types.VIEWED, value, path, depth)
        except Exception:  # the format cannot store it
            return self._opaque(value, path)
        key = f"{self._prefix}/{len(self._out.tensors)}"
        self._out.tensors[key] = tensor
        self._keys[id(value)] = key
        self._kept.append(value)
        return {"$tensor": key}

    def _array(self, value: np.ndarray[Any, Any], path: str, depth: int) -> Any:
        if value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
            parts = _array_as_tensor(value)
            self._kept.append(parts)
            return {"$ndarray": self.encode(parts, path=path, depth=depth + 1)}
        return self._row(object_types.RAW, value, path, depth)

    def _number(self, value: Any, path: str, depth: int) -> Any:
        if value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
            return {"$numpy": [value.dtype.str, self.encode(value.item(), path=path, depth=depth + 1)]}
        return self._row(object_types.RAW_SCALAR, value, path, depth)

    def _opaque(self, value: Any, path: str) -> Any:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        self._out.opaque.append(f"{path or '(root)'}: {name}")
        try:
            blob = base64.b64encode(pickle.dumps(value)).decode()
        except Exception:  # locks, files, lambdas, recursion: an error of pickle must not fail a save
            return {"$lost": name}
        return {"$opaque": {"type": name, "pickle": blob}}


def _may_contain_itself(kind: type) -> bool:
    return kind in (list, dict) or (kind in ROWS and ROWS[kind].empty is not None)


def _array_as_tensor(array: np.ndarray[Any, Any]) -> Any:
    native = array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
    return [array.dtype.str, torch.from_numpy(native)]
