"""Headers of safetensors files: building, parsing and validation of untrusted ones.

Data files and the index are ordinary safetensors files (8-byte little-endian header length, JSON header, bytes
without holes), so any safetensors reader opens them. The ``safetensors`` package offers neither sequential writing
without the whole file in memory nor reads of a part of a tensor. The I/O path needs both, hence this module. The
tests read the files back through ``safetensors``.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from unickpt.base.errors import FormatError
from unickpt.checkpoint.format.dtype_names import itemsize_bytes
from unickpt.checkpoint.format.json_text import parse_json

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors reference reader


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Entry of one tensor in a safetensors header.

    Attributes:
        name: the key in the header.
        dtype: safetensors dtype name.
        shape: extents.
        begin_byte, end_byte: half-open byte range, relative to the end of the header.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin_byte: int
    end_byte: int


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header: the slots in file order, the free-form metadata and the length of the header."""

    slots: tuple[TensorSlot, ...]
    metadata: dict[str, str]
    header_bytes: int  # length prefix plus JSON; the data begins here


def build_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    metadata: Mapping[str, str],
    *,
    alignment: int = 8,
    least_bytes: int = 0,
) -> tuple[bytes, Header]:
    """Lay out tensors back to back and encode the header.

    Args:
        tensors: ``(name, dtype, shape)`` in file order.
        metadata: strings for ``__metadata__``.
        alignment: the data begins at a multiple of this number of bytes.
        least_bytes: the data begins at this byte or after it.

    Returns:
        The bytes of the header (padded with spaces) and its parsed form.

    Raises:
        FormatError: two tensors have the same name, or the header is too large.
    """
    slots: list[TensorSlot] = []
    at = 0
    for name, dtype, shape in tensors:
        end = at + math.prod(shape) * itemsize_bytes(dtype)
        slots.append(TensorSlot(name, dtype, shape, at, end))
        at = end
    body: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for slot in slots:
        if slot.name in body:
            raise FormatError(f"two tensors named {slot.name!r} in one safetensors file")
        body[slot.name] = {
            "dtype": slot.dtype,
            "shape": list(slot.shape),
            "data_offsets": [slot.begin_byte, slot.end_byte],
        }
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "backslashreplace")
    text += b" " * max(least_bytes - 8 - len(text), 0)
    text += b" " * (-(8 + len(text)) % alignment)
    if len(text) > MAX_HEADER_BYTES:
        raise FormatError(f"the safetensors header has {len(text)} bytes, the limit of the format is {MAX_HEADER_BYTES}")
    return len(text).to_bytes(8, "little") + text, Header(tuple(slots), dict(metadata), 8 + len(text))


def header_bytes_of(prefix: bytes, *, file_bytes: int, where: str) -> int:
    """Return the size of prefix and header from the first 8 bytes of a file. Raises FormatError if the file is smaller."""
    if len(prefix) < 8:
        raise FormatError(f"{where}: {len(prefix)} bytes are too few for a safetensors file")
    length = int.from_bytes(prefix[:8], "little")
    if length > MAX_HEADER_BYTES or 8 + length > file_bytes:
        raise FormatError(f"{where}: header claims {length} bytes in a file of {file_bytes}")
    return 8 + length


def parse_header(data: bytes, *, file_bytes: int, where: str) -> Header:
    """Parse and validate a header, without allocations of a size that the header claims.

    Args:
        data: the first bytes of the file, at least the whole header.
        file_bytes: size of the file.
        where: name of the file in messages.

    Raises:
        FormatError: the header is not JSON of the specified form, an offset is outside the file, a size
            contradicts dtype and shape, or tensors overlap or leave a hole.
    """
    end = header_bytes_of(data, file_bytes=file_bytes, where=where)
    body = parse_json(data[8:end], where=f"{where}: header")
    if not isinstance(body, dict):
        raise FormatError(f"{where}: header is a {type(body).__name__}, expected an object")
    metadata = body.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(f"{where}: __metadata__ must map strings to strings")
    slots = sorted((_parse_slot(name, entry, where) for name, entry in body.items()), key=lambda s: (s.begin_byte, s.end_byte))
    at = 0
    for slot in slots:
        if slot.begin_byte != at:
            raise FormatError(f"{where}: tensor {slot.name!r} begins at byte {slot.begin_byte}, expected {at}")
        at = slot.end_byte
    if end + at != file_bytes:
        raise FormatError(f"{where}: header describes {end + at} bytes, the file has {file_bytes}")
    return Header(tuple(slots), metadata, end)


def _parse_slot(name: str, entry: Any, where: str) -> TensorSlot:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{where}: tensor {name!r} needs exactly dtype, shape and data_offsets")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2:
        raise FormatError(f"{where}: tensor {name!r} has shape {shape!r} and offsets {offsets!r}")
    expected = math.prod(shape) * itemsize_bytes(entry["dtype"])
    if offsets[1] - offsets[0] != expected:
        raise FormatError(
            f"{where}: tensor {name!r} of {entry['dtype']} {shape} needs {expected} bytes, "
            f"its offsets {offsets} give {offsets[1] - offsets[0]}"
        )
    return TensorSlot(name, entry["dtype"], tuple(shape), offsets[0], offsets[1])


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value) and len(value) <= 64
