"""Conversion of unpickled values to plain values: tensors are read; arrays, namespaces and byte streams are rebuilt."""

from __future__ import annotations

import argparse
import pathlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from unickpt.transform.convert.pickles.lazy_tensor import Located
from unickpt.transform.convert.pickles.pickle_records import BYTES_IO_KEY, Record

_BYTES_IO, _NAMESPACE, _ARRAY, _SCALAR, _DTYPE = (
    "_io.BytesIO",
    "argparse.Namespace",
    "numpy.array",
    "numpy.scalar",
    "numpy.dtype",
)


class NotPlainError(ValueError):
    """The value contains an object that only its own class can interpret."""


def plain(value: Any, where: str = "") -> Any:
    """Return a value in plain types.

    Args:
        value: value from ``safe_pickle``.
        where: path of the value in messages.

    Raises:
        NotPlainError: the value contains an object without a plain form; the message says where.
        FormatError: a tensor cannot be read.
    """
    if isinstance(value, Located):
        return value.read().view(value.shape)
    if isinstance(value, Record):
        make = _MAKERS.get(value.kind)
        if make is not None:
            return make(value, where)
        if value.kind.startswith("pathlib."):
            return pathlib.PurePosixPath(*map(str, value.arguments)).as_posix()
        raise NotPlainError(f"{where or '(root)'} is an object of {value.kind}, which only its own code can read")
    if isinstance(value, dict):
        kind = OrderedDict if isinstance(value, OrderedDict) else dict
        return kind((key, plain(each, f"{where}.{key}".lstrip("."))) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(plain(each, f"{where}[{at}]") for at, each in enumerate(value))
    return value


def members(value: Mapping[str, Any], where: str, report: Callable[[str], None]) -> dict[str, Any]:
    """Return the members that have a plain form. ``report`` is called with a sentence for every other member."""
    found = {}
    for key, each in value.items():
        try:
            found[key] = plain(each, f"{where}.{key}".lstrip("."))
        except NotPlainError as err:
            report(str(err))
    return found


def _namespace(value: Record, where: str) -> argparse.Namespace:
    made = argparse.Namespace()
    vars(made).update({str(key): plain(each, f"{where}.{key}") for key, each in value.state.items()})
    return made


def _bytes_io(value: Record, where: str) -> dict[str, bytes]:
    """Return the bytes, as the Megatron adapter (``sharded_tensors.py``) stores them. State: bytes, position, attributes."""
    held = value.state.get("")
    data = held[0] if isinstance(held, tuple) and held else value.arguments[0] if value.arguments else b""
    if not isinstance(data, bytes):
        raise NotPlainError(f"{where or '(root)'} is a {_BYTES_IO} of {type(data).__name__}")
    return {BYTES_IO_KEY: data}


def _dtype(value: Any, where: str) -> np.dtype[Any]:
    """Return the dtype of ``numpy.dtype("u4", False, True)`` with the state ``(version, byte order, ...)``."""
    if isinstance(value, Record) and value.kind == _DTYPE and value.arguments:
        order = value.state.get("") or (3, "|")
        code = str(value.arguments[0])
        if len(code) <= 3 and code[:1] in "biuf" and order[1] in ("<", "|", ">", "="):
            return np.dtype(order[1] + code)
    raise NotPlainError(f"{where or '(root)'} is an array of {value!r:.60}")


def _array(value: Record, where: str) -> np.ndarray[Any, Any]:
    """Rebuild an array. State: version, shape, dtype, whether in Fortran order, bytes."""
    state = value.state.get("")
    if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[4], bytes) or state[3]:
        raise NotPlainError(f"{where or '(root)'} is an array in an unknown form")
    try:
        return np.frombuffer(state[4], _dtype(state[2], where)).reshape(state[1]).copy()
    except (ValueError, TypeError) as err:
        raise NotPlainError(f"{where or '(root)'} is an array that does not fit its shape ({err})") from None


def _scalar(value: Record, where: str) -> Any:
    if len(value.arguments) != 2 or not isinstance(value.arguments[1], bytes):
        raise NotPlainError(f"{where or '(root)'} is a number in an unknown form")
    dtype = _dtype(value.arguments[0], where)
    if len(value.arguments[1]) != dtype.itemsize:
        raise NotPlainError(f"{where or '(root)'} is a number of {len(value.arguments[1])} bytes")
    return np.frombuffer(value.arguments[1], dtype)[0]


_MAKERS: Mapping[str, Callable[[Record, str], Any]] = {
    _NAMESPACE: _namespace,
    _BYTES_IO: _bytes_io,
    _ARRAY: _array,
    _SCALAR: _scalar,
}
