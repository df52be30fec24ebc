"""What a pickle held, as plain values: tensors read, arrays and namespaces made, nothing that only its own code can read."""

from __future__ import annotations

import argparse
import pathlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from unickpt import megatron_keys
from unickpt.foreign.located import Located
from unickpt.foreign.pickles import Record

BYTES_IO = "_io.BytesIO"
_NAMESPACE, _ARRAY, _SCALAR, _DTYPE = "argparse.Namespace", "numpy.array", "numpy.scalar", "numpy.dtype"


class NotPlainError(ValueError):
    """It holds an object that is for its own code."""


def plain(value: Any, where: str = "") -> Any:
    """The same in plain values.

    Args:
        value: of ``pickles.load`` and its kin.
        where: it is, for the message.

    Raises:
        NotPlainError: says where in it what is.
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
        raise NotPlainError(f"{where or 'it'} is an object of {value.kind}, which is for its own code")
    if isinstance(value, dict):
        kind = OrderedDict if isinstance(value, OrderedDict) else dict
        return kind((key, plain(each, f"{where}.{key}".lstrip("."))) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(plain(each, f"{where}[{at}]") for at, each in enumerate(value))
    return value


def members(value: Mapping[str, Any], where: str, told: Callable[[str], None]) -> dict[str, Any]:
    """The members that are plain; the others are told of."""
    found = {}
    for key, each in value.items():
        try:
            found[key] = plain(each, f"{where}.{key}".lstrip("."))
        except NotPlainError as err:
            told(str(err))
    return found


def _namespace(value: Record, where: str) -> argparse.Namespace:
    made = argparse.Namespace()
    vars(made).update({str(key): plain(each, f"{where}.{key}") for key, each in value.state.items()})
    return made


def _bytes_io(value: Record, where: str) -> dict[str, bytes]:
    """As the Megatron adapter keeps it (megatron_unickpt/mapping.py, ``plain_object``). State: bytes, position, attributes."""
    held = value.state.get("")
    data = held[0] if isinstance(held, tuple) and held else value.arguments[0] if value.arguments else b""
    if not isinstance(data, bytes):
        raise NotPlainError(f"{where or 'it'} is a {BYTES_IO} of {type(data).__name__}")
    return {megatron_keys.BYTES_IO: data}


def _dtype(value: Any, where: str) -> np.dtype[Any]:
    """Of ``numpy.dtype("u4", False, True)`` with the state ``(version, byte order, ...)``."""
    if isinstance(value, Record) and value.kind == _DTYPE and value.arguments:
        order = value.state.get("") or (3, "|")
        code = str(value.arguments[0])
        if len(code) <= 3 and code[:1] in "biuf" and order[1] in ("<", "|", ">", "="):
            return np.dtype(order[1] + code)
    raise NotPlainError(f"{where or 'it'} is an array of {value!r:.60}")


def _array(value: Record, where: str) -> np.ndarray[Any, Any]:
    """State: version, shape, dtype, whether in Fortran's order, bytes."""
    state = value.state.get("")
    if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[4], bytes) or state[3]:
        raise NotPlainError(f"{where or 'it'} is an array in a form that is not known")
    try:
        return np.frombuffer(state[4], _dtype(state[2], where)).reshape(state[1]).copy()
    except (ValueError, TypeError) as err:
        raise NotPlainError(f"{where or 'it'} is an array that does not fit its shape ({err})") from None


def _scalar(value: Record, where: str) -> Any:
    if len(value.arguments) != 2 or not isinstance(value.arguments[1], bytes):
        raise NotPlainError(f"{where or 'it'} is a number in a form that is not known")
    dtype = _dtype(value.arguments[0], where)
    if len(value.arguments[1]) != dtype.itemsize:
        raise NotPlainError(f"{where or 'it'} is a number of {len(value.arguments[1])} bytes")
    return np.frombuffer(value.arguments[1], dtype)[0]


_MAKERS: Mapping[str, Callable[[Record, str], Any]] = {
    _NAMESPACE: _namespace, BYTES_IO: _bytes_io, _ARRAY: _array, _SCALAR: _scalar,
}  # fmt: skip
