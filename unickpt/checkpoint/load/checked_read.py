"""Read adjacent ranges of a file into tensors, with their checksums, and cast them into second tensors on the way.

The extension ``_checked_read`` (``_checked_read.c``) does this in one call, without the interpreter's lock. Without it, such as
after an installation without a compiler or on another processor than x86, Python does the same block by block. The extension
also reads fragments of which parts are needed (``read_pieces``); ``reader.py`` has that in Python.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from unickpt.base.errors import StorageError
from unickpt.base.extensions import READING, Built
from unickpt.checkpoint.format.casts import Comparison, comparison, is_dense
from unickpt.checkpoint.format.checksums import LONG_BYTES, RunningBlocks, block_checksums, block_count
from unickpt.checkpoint.format.dtypes import byte_view
from unickpt.checkpoint.load.file_blocks import read_blocks
from unickpt.checkpoint.storage.base import DescriptorReader, Reader, has_descriptor

try:
    from unickpt.checkpoint.load import _checked_read
except ImportError:
    _checked_read = None  # type: ignore[assignment]

_LEAST_STEP_BYTES = 4096


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of a file and where it goes.

    Attributes:
        target: 1-D CPU tensor that the range fills byte for byte. Dense, with at least one element.
        second: tensor that receives the elements as by ``copy_``, 1-D with as many elements; None for none.
    """

    target: torch.Tensor
    second: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class NeededPart:
    """A part of a fragment that is needed.

    Attributes:
        begin_bytes: position in what is read of the fragment.
        size_bytes: size in the file.
        target: 1-D CPU tensor that receives the elements as by ``copy_``. Dense.
    """

    begin_bytes: int
    size_bytes: int
    target: torch.Tensor


@dataclass(frozen=True, slots=True)
class NeededParts:
    """Blocks of a fragment that are read, and the parts of them that are needed. Their elements are of ``dtype``."""

    offset_bytes: int
    size_bytes: int
    dtype: torch.dtype
    pieces: Sequence[NeededPart]

    def are_castable(self) -> bool:
        """Whether ``read_pieces`` can fill the targets."""
        kinds = all(comparison(self.dtype, piece.target.dtype) is not None and is_dense(piece.target) for piece in self.pieces)
        return self.size_bytes >= LONG_BYTES and kinds


def can_read_pieces(reader: Reader) -> bool:
    """Whether ``read_pieces`` can read from this file."""
    return has_descriptor(reader) and available()


def read_pieces(
    reader: Reader, fragments: Sequence[NeededParts], block_bytes: int, *, checks: bool = True
) -> list[array[int]] | None:
    """Read fragments through a buffer that stays in the cache of the core, and copy what is needed.

    Args:
        reader: the open file.
        fragments: castable fragments (``are_castable``), in file order.
        block_bytes: size of the blocks that have a checksum (``checksums.block_count``).
        checks: compute checksums.

    Returns:
        Checksums of the blocks of each fragment; zeros without ``checks``. None if the extension cannot read this file.

    Raises:
        StorageError: the file cannot be read.
    """
    if not has_descriptor(reader) or not available():
        return None
    table, pieces = array("Q"), array("Q")
    for each in fragments:
        table.extend((each.offset_bytes, each.size_bytes, len(each.pieces)))
        for piece in each.pieces:
            kind = comparison(each.dtype, piece.target.dtype)
            assert kind is not None  # ``are_castable``
            pieces.extend((piece.begin_bytes, piece.size_bytes, piece.target.data_ptr(), kind))
    step = max(reader.block_bytes, _LEAST_STEP_BYTES) // 16 * 16
    with _errors(reader.path, [each.offset_bytes + each.size_bytes for each in fragments]):
        found = _checked_read.read_pieces(reader.descriptor, table.tobytes(), pieces.tobytes(), step, checks, block_bytes)
    reader.note(sum(each.size_bytes for each in fragments))
    return _per_range(array("Q", found), [each.size_bytes for each in fragments], block_bytes)


def _per_range(checksums: array[int], sizes_bytes: Sequence[int], block_bytes: int) -> list[array[int]]:
    """Divide the checksums of all blocks among ranges of these sizes."""
    found, at = [], 0
    for size in sizes_bytes:
        count = block_count(size, block_bytes)
        found.append(checksums[at : at + count])
        at += count
    return found


@contextlib.contextmanager
def _errors(path: str, ends: Sequence[int]) -> Iterator[None]:
    """Raise the errors of the extension as ``StorageError``. ``ends``: of what is read, ascending."""
    try:
        yield
    except EOFError as err:
        at: int = err.args[0]
        more = next((end for end in ends if end > at), at) - at
        raise StorageError(f"{path}: ends at byte {at}, expected {more} more bytes") from None
    except OSError as err:
        raise StorageError(f"{path}: cannot be read ({err.strerror or err})") from err


def available() -> bool:
    """Return whether the extension is installed and this processor has its instructions."""
    return READING.built is Built.READY


def read_checked(
    reader: Reader,
    offset_bytes: int,
    parts: Sequence[FileRange],
    block_bytes: int,
    *,
    checks: bool = True,
    extension: bool = True,
) -> list[array[int]]:
    """Read adjacent ranges of a file.

    Args:
        reader: the open file.
        offset_bytes: position of the first range.
        parts: the ranges, in file order.
        block_bytes: size of the blocks that have a checksum (``checksums.block_count``).
        checks: compute checksums.
        extension: use the extension if it is there.

    Returns:
        Checksums of the blocks of each range; zeros without ``checks``.

    Raises:
        StorageError: the file cannot be read.
    """
    if extension and has_descriptor(reader) and available():
        return _by_extension(reader, offset_bytes, parts, block_bytes, checks=checks)
    return _by_python(reader, offset_bytes, parts, block_bytes, checks=checks)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return memoryview(byte_view(tensor).numpy().data)


def _by_extension(
    reader: DescriptorReader, offset_bytes: int, parts: Sequence[FileRange], block_bytes: int, *, checks: bool
) -> list[array[int]]:
    table, later = array("Q"), list[FileRange]()
    for part in parts:
        second, kind = part.second, Comparison.NOTHING
        if second is not None:
            kind = comparison(part.target.dtype, second.dtype) or Comparison.NOTHING if is_dense(second) else Comparison.NOTHING
            if kind is Comparison.NOTHING:
                later.append(part)
        place = 0 if second is None else second.data_ptr()
        table.extend((part.target.data_ptr(), part.target.nbytes, place, kind))
    sizes = [part.target.nbytes for part in parts]
    with _errors(reader.path, [offset_bytes + sum(sizes)]):
        found = _checked_read.read_parts(
            reader.descriptor, offset_bytes, table.tobytes(), reader.block_bytes, checks, block_bytes
        )
    reader.note(sum(sizes))
    for part in later:
        assert part.second is not None
        part.second.copy_(part.target)
    sums = _per_range(array("Q", found), sizes, block_bytes)
    for at, part in enumerate(parts) if checks else ():
        if sizes[at] < LONG_BYTES:
            sums[at] = block_checksums(bytes_of(part.target), block_bytes)
    return sums


def _by_python(
    reader: Reader, offset_bytes: int, parts: Sequence[FileRange], block_bytes: int, *, checks: bool
) -> list[array[int]]:
    running = [RunningBlocks(part.target.nbytes, block_bytes) for part in parts]
    views = [(at, bytes_of(part.target)) for at, part in enumerate(parts)]
    for block in read_blocks(reader, offset_bytes, views, reader.block_bytes):
        for at, view, last in block:
            if checks:
                running[at].update(view)
            second = parts[at].second
            if last and second is not None:
                second.copy_(parts[at].target)
    none = [array("Q", bytes(8 * block_count(part.target.nbytes, block_bytes))) for part in parts]
    return [each.value() for each in running] if checks else none
