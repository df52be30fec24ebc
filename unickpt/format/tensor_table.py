"""Text form of the table of tensors, used by the index and by the index rows of the ranks."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from unickpt.errors import FormatError
from unickpt.format.dtypes import itemsize_bytes
from unickpt.format.index import KINDS, MAX_NDIM, TensorInfo
from unickpt.format.json_text import parse_json


def to_text(tensors: Sequence[TensorInfo]) -> str:
    """Serialise a sorted table to JSON."""
    entries = [(t.name, t.state, t.dtype, t.shape, t.kind, t.derived_from) for t in tensors]
    return json.dumps(entries, separators=(",", ":"), ensure_ascii=False)


def from_text(text: str | bytes, *, where: str) -> tuple[TensorInfo, ...]:
    """Parse and validate a table.

    Raises:
        FormatError: the text is not JSON of this form, a dtype or kind is unknown, a tensor has 2**62 bytes or more, or
            the table is not sorted by (name, state) or has duplicates.
    """
    table = json_of(text, where=where)
    if not isinstance(table, list):
        raise FormatError(f"{where}: the tensor table is not a list")
    tensors: list[TensorInfo] = []
    for entry in table:
        if not _is_entry(entry):
            raise FormatError(f"{where}: malformed tensor entry {str(entry)[:200]}")
        name, state, dtype, shape, kind, derived = entry
        info = TensorInfo(name, state, dtype, tuple(shape), kind, derived)
        problem = _problem(kind, dtype, info.shape)
        if problem:
            raise FormatError(f"{where}: tensor {name!r} {problem}")
        tensors.append(info)
    if any(a.key >= b.key for a, b in itertools.pairwise(tensors)):
        raise FormatError(f"{where}: the tensor table is not sorted or lists a tensor twice")
    return tuple(tensors)


def _is_entry(entry: Any) -> bool:
    if type(entry) is not list or len(entry) != 6:
        return False
    name, state, dtype, shape, kind, derived = entry
    texts = type(name) is type(state) is type(dtype) is type(kind) is str and (derived is None or type(derived) is str)
    return texts and type(shape) is list and all(type(n) is int for n in shape)


@functools.lru_cache(1 << 12)  # a table has few distinct combinations
def _problem(kind: str, dtype: str, shape: tuple[int, ...]) -> str:
    """Return a description of an invalid kind or shape, or ''. Raises FormatError for an unknown dtype."""
    if kind not in KINDS or len(shape) > MAX_NDIM or not all(0 <= n < 2**62 for n in shape):
        return f"has kind {kind!r} and shape {list(shape)}"
    if math.prod(shape) * itemsize_bytes(dtype) >= 2**62:
        return f"of shape {list(shape)} has 2**62 bytes or more"
    return ""


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Disable the cyclic garbage collector in the block.

    While a large table is built, the collector traverses all of it repeatedly and finds nothing. That took more than
    half of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def json_of(text: str | bytes, *, where: str) -> Any:
    """Parse JSON from the metadata of a header. Raises FormatError."""
    return parse_json(
        text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"), where=f"{where}: index metadata"
    )
