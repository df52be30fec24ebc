"""Checksums: xxh3 of the ``xxhash`` package.

xxh3 runs at memory speed (measured: 26 GB/s) and releases the GIL, so verifying every byte of every load costs
a few per cent of a disk read. It detects damage, not manipulation: a checkpoint is data and is never executed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

PREFIX = "xxh3_128:"


def fragment_checksum(data: Buffer) -> int:
    """Return the xxh3_64 of the bytes of a fragment, as stored in the index."""
    return xxhash.xxh3_64_intdigest(data)


def digest(data: Buffer) -> str:
    """Return the xxh3_128 of the bytes of a file, as stored in the manifest: ``xxh3_128:<hex>``."""
    return PREFIX + xxhash.xxh3_128_hexdigest(data)


class RunningChecksum:
    """Incremental ``fragment_checksum``."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def update(self, data: Buffer) -> None:
        self._state.update(data)

    def value(self) -> int:
        return self._state.intdigest()


class RunningDigest:
    """Incremental ``digest``."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: Buffer) -> None:
        self._state.update(data)

    def value(self) -> str:
        return PREFIX + self._state.hexdigest()
