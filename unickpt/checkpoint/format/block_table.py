"""The table at the end of a data file: the checksums of the blocks of its fragments.

It has the fragments of several blocks. A reader that needs a part of a fragment takes from it what the blocks of this part must
have. ``docs/reference/format.md`` (section 6) is the normative description.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from unickpt.checkpoint.format.checksums import BLOCK_BYTES, block_count, combined

TABLE_KEY = "block_checksums"  # in the header of the data file; fragments have a colon in their key
_WORD_BYTES = 8


def table_bytes(sizes_bytes: Iterable[int], block_bytes: int = BLOCK_BYTES) -> int:
    """Return the size of the table of fragments of these sizes. 0: none has several blocks, and there is no table."""
    counts = [count for count in (block_count(size, block_bytes) for size in sizes_bytes) if count > 1]
    return _WORD_BYTES * (1 + 2 * len(counts) + sum(counts)) if counts else 0


def room_bytes(size_bytes: int) -> int:
    """Return a bound of the size of the table of fragments that have ``size_bytes`` together."""
    return _WORD_BYTES * (1 + 2 * (size_bytes // BLOCK_BYTES))


def to_bytes(fragments: Sequence[tuple[int, array[int]]]) -> bytes:
    """Serialise the table.

    Args:
        fragments: position in the file and checksums of the blocks of every fragment of several blocks, in file order.
    """
    words, at = array("Q", [len(fragments)]), 1 + 2 * len(fragments)
    for offset, checksums in fragments:
        words.extend((offset, at))
        at += len(checksums)
    for _, checksums in fragments:
        words.extend(checksums)
    return words.tobytes()


class BlockTable:
    """The table of a data file. Damage of it is no error: the checksum of a fragment in the index tells whether it is right.

    Args:
        data: bytes of the table.
    """

    def __init__(self, data: bytes) -> None:
        words = array("Q", data[: len(data) // _WORD_BYTES * _WORD_BYTES])
        count = min(words[0], (len(words) - 1) // 2) if words else 0
        self._words = words
        self._place = dict(zip(words[1 : 1 + 2 * count : 2], words[2 : 2 + 2 * count : 2], strict=False))

    def checksums(self, offset_bytes: int, count: int, checksum: int) -> array[int] | None:
        """Return the checksums of the blocks of a fragment, or None if the table has none that are right.

        Args:
            offset_bytes: position of the fragment in the file.
            count: number of its blocks.
            checksum: of the fragment, from the index.
        """
        at = self._place.get(offset_bytes)
        if at is None or at + count > len(self._words):
            return None
        found = self._words[at : at + count]
        return found if combined(found) == checksum else None
