"""The table of tensors as text: how the index and the ranks' rows name what they hold."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from unickpt.dtypes import itemsize_bytes
from unickpt.errors import FormatError
from unickpt.index import KINDS, MAX_NDIM, TensorInfo


def to_text(tensors: Sequence[TensorInfo]) -> str:
    """JSON of a sorted table."""
    entries = [(t.name, t.state, t.dtype, t.shape, t.kind, t.derived_from) for t in tensors]
    return json.dumps(entries, separators=(",", ":"), ensure_ascii=False)


def from_text(text: str | bytes, *, where: str) -> tuple[TensorInfo, ...]:
    """Parse and validate a table.

    Raises:
        FormatError: not JSON of this form, an unknown dtype or kind, a tensor larger than any storage,
            not sorted by (name, state), or a tensor twice.
    """
    table = json_of(text, where=where)
    if not isinstance(table, list):
        raise FormatError(f"{where}: the tensor table is not a list")
    tensors: list[TensorInfo] = []
    sound: set[tuple[Any, ...]] = set()
    for entry in table:
        if not _is_entry(entry):
            raise FormatError(f"{where}: malformed tensor entry {str(entry)[:200]}")
        name, state, dtype, shape, kind, derived = entry
        info = TensorInfo(name, state, dtype, tuple(shape), kind, derived)
        if (kind, dtype, info.shape) not in sound:
            _check(info, where)
            sound.add((kind, dtype, info.shape))
        tensors.append(info)
    if any(a.key >= b.key for a, b in itertools.pairwise(tensors)):
        raise FormatError(f"{where}: the tensor table is not sorted, or names a tensor twice")
    return tuple(tensors)


def _is_entry(entry: Any) -> bool:
    if type(entry) is not list or len(entry) != 6:
        return False
    name, state, dtype, shape, kind, derived = entry
    texts = type(name) is type(state) is type(dtype) is type(kind) is str and (derived is None or type(derived) is str)
    return texts and type(shape) is list and all(type(n) is int for n in shape)


def _check(info: TensorInfo, where: str) -> None:
    if info.kind not in KINDS or len(info.shape) > MAX_NDIM or not all(0 <= n < 2**62 for n in info.shape):
        raise FormatError(f"{where}: tensor {info.name!r} has kind {info.kind!r} and shape {list(info.shape)}")
    if math.prod(info.shape) * itemsize_bytes(info.dtype) >= 2**62:
        raise FormatError(f"{where}: tensor {info.name!r} of shape {list(info.shape)} is larger than any storage")


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Without the garbage collector: while a large table is made it would look through all of it again and again, and
    find nothing; more than half of the time went there.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def json_of(text: str | bytes, *, where: str) -> Any:
    """Parsed JSON, or FormatError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as err:
        raise FormatError(f"{where}: index metadata is not JSON ({err})") from None
