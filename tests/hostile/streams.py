"""Pickle streams written opcode by opcode, and files that carry them."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path

FLOATS = b"ctorch\nFloatStorage\n"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
ORDERED = b"ccollections\nOrderedDict\n"


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def many(values: Sequence[bytes]) -> bytes:
    """A tuple."""
    return b"(" + b"".join(values) + b"t"


def mapping(entries: dict[str, bytes]) -> bytes:
    return b"}(" + b"".join(text(key) + value for key, value in entries.items()) + b"u"


def storage(elements: int, key: str = "0") -> bytes:
    """A storage of 32-bit floats, by a persistent id."""
    return many([text("storage"), FLOATS, text(key), text("cpu"), number(elements)]) + b"Q"


def tensor(elements: int, shape: Sequence[int], strides: Sequence[int], offset: int = 0, *, after: bytes = b"") -> bytes:
    """A view. ``after`` are opcodes that follow its storage."""
    extents, steps = (many([number(each) for each in values]) for values in (shape, strides))
    members = [storage(elements) + after, number(offset), extents, steps, b"\x89", ORDERED + b")R"]
    return REBUILD + many(members) + b"R"


def stream(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


def archive(path: Path, pickle: bytes, storages: Sequence[bytes] = (bytes(32),), method: int = zipfile.ZIP_STORED) -> Path:
    """A file of ``torch.save`` around a pickle."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", pickle, method)
        for at, data in enumerate(storages):
            file.writestr(f"x/data/{at}", data)
    return path
