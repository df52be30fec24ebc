"""The blocks of fragments that a read needs.

A fragment that is needed in part is read in part: the blocks with the elements that are needed. The table at the end of the
file has the checksums that these blocks must have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from unickpt.checkpoint.format.block_table import BlockTable
from unickpt.checkpoint.format.boxes import flat_range, stretches
from unickpt.checkpoint.format.checksums import block_count, block_range
from unickpt.checkpoint.format.dtype_names import itemsize_bytes
from unickpt.checkpoint.format.manifest import Manifest
from unickpt.checkpoint.load.fragments import Fragment, Use
from unickpt.checkpoint.storage.base import Reader, may_be_cached

_NEAR_BYTES = 1 << 20  # of a store with latency, what lies between two parts is read with them


@dataclass
class BlockTables:
    """The tables of the data files of a checkpoint. Each is read when it is needed first.

    Attributes:
        places: begin and size in bytes of the table of every file that has one.
    """

    places: Mapping[str, tuple[int, int]]
    _tables: dict[str, BlockTable] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, manifest: Manifest) -> BlockTables:
        """Return the tables of the files of a manifest."""
        return cls(
            {file.path: (file.size_bytes - file.table_bytes, file.table_bytes) for file in manifest.files if file.table_bytes}
        )

    def table(self, name: str, reader: Reader) -> BlockTable | None:
        """Return the table of a file, or None if it has none. ``reader``: the open file.

        Raises:
            StorageError: the table cannot be read.
        """
        if name not in self.places:
            return None
        if name not in self._tables:
            begin, size = self.places[name]
            data = bytearray(size)
            reader.read_into([memoryview(data)], begin)
            self._tables[name] = BlockTable(bytes(data))
        return self._tables[name]


def in_parts(
    fragments: Sequence[Fragment], name: str, reader: Reader, tables: BlockTables, block_bytes: int
) -> Iterator[Fragment]:
    """Yield the fragments of a file, or in their place the parts of whole blocks that are needed of them.

    Args:
        fragments: whole fragments, in file order.
        name: name of the file.
        reader: the open file.
        tables: tables of the checkpoint.
        block_bytes: as in the index.

    Raises:
        StorageError: the table cannot be read.
    """
    near = 0 if may_be_cached(reader) else _NEAR_BYTES
    for fragment in fragments:
        count = block_count(fragment.size_bytes, block_bytes)
        needed = _needed(fragment, count, block_bytes, near) if count > 1 else []
        if count == 1 or needed == [(0, count)]:
            yield fragment
            continue
        table = tables.table(name, reader)
        checksums = None if table is None else table.checksums(fragment.offset, count, fragment.checksum)
        if checksums is None:  # a whole fragment can be checked without the table
            yield fragment
            continue
        item = itemsize_bytes(fragment.info.dtype)
        spans = [_span(use, fragment, item) for use in fragment.uses]
        for first, last in needed:
            lo, hi = block_range(first, last, fragment.size_bytes, block_bytes)
            uses = [use for use, (begin, end) in zip(fragment.uses, spans, strict=True) if begin < hi and lo < end]
            yield replace(fragment, uses=uses, lo=lo, hi=hi, expected=checksums[first:last])


def _needed(fragment: Fragment, count: int, block_bytes: int, near_bytes: int) -> list[tuple[int, int]]:
    """Return the ranges of blocks ``(first, last + 1)`` that the uses of a fragment need, ascending."""
    if any(use.region == fragment.box for use in fragment.uses):
        return [(0, count)]
    item, shape = itemsize_bytes(fragment.info.dtype), fragment.box.shape
    ranges: list[tuple[int, int]] = []
    for use in fragment.uses:
        region = use.region.within(fragment.box)
        flat = flat_range(region, shape)
        if flat is None:
            begins, ends = stretches(region, shape, max(block_bytes - 1, near_bytes) // item)
            ranges += zip(begins.tolist(), ends.tolist(), strict=True)
        else:
            ranges.append(flat)
    last = count - 1
    blocks = [(min(lo * item // block_bytes, last), min((hi * item - 1) // block_bytes, last) + 1) for lo, hi in ranges]
    found: list[tuple[int, int]] = []
    for begin, end in sorted(blocks):
        if found and (begin - found[-1][1]) * block_bytes <= near_bytes:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _span(use: Use, fragment: Fragment, item: int) -> tuple[int, int]:
    """Return the first byte of a fragment that a use needs, and the end of the last one."""
    begins, ends = stretches(use.region.within(fragment.box), fragment.box.shape, fragment.box.numel)
    return int(begins[0]) * item, int(ends[-1]) * item
