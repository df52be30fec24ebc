"""Reader for the zip archive of ``torch.save``: a pickle, and every storage as an uncompressed entry.

Other zip features are refused: compression, comments, leading bytes, entries that share a name or bytes. Sizes come from the
central directory and are checked against the file.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from unickpt.base.errors import FormatError
from unickpt.transform.convert.pickles.lazy_tensor import OpenFiles

MAX_PICKLE_BYTES = 1 << 30
MAX_DIRECTORY_BYTES = 64 << 20  # about 600,000 storages
_END, _END_64, _LOCATOR = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
_ENTRY, _LOCAL = struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s5H3L2H")
_ENCRYPTED = 1
_LARGE = 0xFFFFFFFF  # means that the 64-bit value is in the extra field
_OLD = "not a zip file of torch.save (torch 1.6 or newer); load older files in torch and save them again"


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """Entry of the central directory.

    Attributes:
        name: path in the archive.
        method: compression method; 0 for none.
        flags: zip flags.
        crc: CRC-32 of the data.
        size_bytes, stored_bytes: size of the data, and its compressed size.
        header_byte: offset of the local header in the archive.
    """

    name: str
    method: int
    flags: int
    crc: int
    size_bytes: int
    stored_bytes: int
    header_byte: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Byte range of a file."""

    begin_byte: int
    size_bytes: int


class Archive:
    """An archive in a file: ``size`` bytes from ``begin`` on.

    Attributes:
        path: path of the file.
        size_bytes: size of the archive.
    """

    def __init__(self, files: OpenFiles, path: Path, begin: int, size: int) -> None:
        """Read the central directory.

        Raises:
            FormatError: the file is not such an archive, or is damaged.
            OSError: the file cannot be read.
        """
        self.path, self.size_bytes = path, size
        self._files, self._begin = files, begin
        count, at, length = self._directory()
        self._end_byte = at
        self._entries = self._listed(count, self._read(at, length))
        self._headers = sorted(entry.header_byte for entry in self._entries.values())
        pickles = [name for name in self._entries if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise FormatError(f"{path}: has {len(pickles)} pickles, expected one")
        self._folder = pickles[0].removesuffix("data.pkl")
        if f"{self._folder}byteorder" in self._entries and self._whole("byteorder", 64) != b"little":
            raise FormatError(f"{path}: written on a big-endian machine; only little-endian files are supported")

    def pickle(self) -> bytes:
        """Return the bytes of the pickle. Raises FormatError."""
        return self._whole("data.pkl", MAX_PICKLE_BYTES)

    def storage(self, key: str) -> Extent:
        """Return the byte range of a storage in the file. Raises FormatError."""
        entry = self._entries.get(f"{self._folder}data/{key}")
        if entry is None:
            raise FormatError(f"{self.path}: storage {key[:80]} is missing")
        return self._extent(entry)

    # ---------------------------------------------------------------- parts of the file

    def _read(self, at: int, size: int) -> bytes:
        if at < 0 or size < 0 or at + size > self.size_bytes:
            raise FormatError(f"{self.path}: {_OLD} (its central directory is outside the file)")
        return self._files.read(self.path, self._begin + at, size)

    def _directory(self) -> tuple[int, int, int]:
        """Return number of entries, first byte and length of the central directory, which the end record follows."""
        end = self.size_bytes - _END.size
        tag, _disk, _disks, _here, count, length, at, comment = _END.unpack(self._read(end, _END.size))
        if tag != b"PK\5\6" or comment:
            raise FormatError(f"{self.path}: {_OLD}")
        locator = self._read(end - _LOCATOR.size, _LOCATOR.size) if end >= _LOCATOR.size else b""
        if locator[:4] == b"PK\6\7":
            end = _LOCATOR.unpack(locator)[2]
            record = _END_64.unpack(self._read(end, _END_64.size))
            if record[0] != b"PK\6\6":
                raise FormatError(f"{self.path}: {_OLD} (the end record has a wrong offset)")
            count, length, at = record[7:]
        if at + length != end or length > MAX_DIRECTORY_BYTES:
            raise FormatError(f"{self.path}: {_OLD} (a central directory of {length:,} bytes at byte {at:,} of {end:,})")
        return count, at, length

    def _listed(self, count: int, data: bytes) -> dict[str, ZipEntry]:
        found: dict[str, ZipEntry] = {}
        at = 0
        while at < len(data):
            entry, at = self._entry(data, at)
            if entry.name in found:
                raise FormatError(f"{self.path}: has two entries {entry.name[:80]}")
            found[entry.name] = entry
        if len(found) != count:
            raise FormatError(f"{self.path}: has {len(found)} entries, the end record says {count}")
        return found

    def _entry(self, data: bytes, at: int) -> tuple[ZipEntry, int]:
        if at + _ENTRY.size > len(data):
            raise FormatError(f"{self.path}: the central directory ends within an entry")
        (tag, _made, _needs, flags, method, _time, _date, crc, stored, size, names, extras, comment, _disk, _inner, _outer,
         header) = _ENTRY.unpack_from(data, at)  # fmt: skip
        begin = at + _ENTRY.size
        end = begin + names + extras + comment
        if tag != b"PK\1\2" or end > len(data):
            raise FormatError(f"{self.path}: the central directory is damaged at byte {at:,}")
        name = _decoded(data[begin : begin + names])
        if name is None:
            raise FormatError(f"{self.path}: has an entry {data[begin : begin + names][:80]!r}, which torch.save never writes")
        size, stored, header = _widened(data[begin + names : begin + names + extras], (size, stored, header))
        return ZipEntry(name, method, flags, crc, size, stored, header), end

    def _extent(self, entry: ZipEntry) -> Extent:
        """Return the byte range of the data of an entry, which ends before the next local header."""
        if entry.method or entry.flags & _ENCRYPTED or entry.size_bytes != entry.stored_bytes:
            raise FormatError(f"{self.path}: {entry.name[:80]} is compressed or encrypted, which torch.save never does")
        head = self._read(entry.header_byte, _LOCAL.size)
        tag, *_, names, extras = _LOCAL.unpack(head)
        begin = entry.header_byte + _LOCAL.size + names + extras
        if tag != b"PK\3\4" or _decoded(self._read(entry.header_byte + _LOCAL.size, names)) != entry.name:
            raise FormatError(f"{self.path}: {entry.name[:80]} is not at the offset in the central directory")
        after = bisect_right(self._headers, entry.header_byte)
        limit = self._headers[after] if after < len(self._headers) else self._end_byte
        shared = after > 1 and self._headers[after - 2] == entry.header_byte
        if begin + entry.size_bytes > limit or shared:
            raise FormatError(f"{self.path}: {entry.name[:80]} overlaps the next entry")
        return Extent(self._begin + begin, entry.size_bytes)

    def _whole(self, name: str, limit: int) -> bytes:
        entry = self._entries[f"{self._folder}{name}"]
        if entry.size_bytes > limit:
            raise FormatError(f"{self.path}: {name} has {entry.size_bytes:,} bytes, the limit is {limit:,}")
        found = self._extent(entry)
        data = self._files.read(self.path, found.begin_byte, found.size_bytes)
        if zlib.crc32(data) != entry.crc:
            raise FormatError(f"{self.path}: {name} is damaged: its CRC differs from the central directory")
        return data


def _decoded(data: bytes) -> str | None:
    """Return the name of an entry, or None if it is not a plain relative path."""
    try:
        name = data.decode()  # torch.save writes ASCII names, or marks them as UTF-8
    except UnicodeDecodeError:
        return None
    parts = name.split("/")
    return None if not name or parts[0] == "" or "\\" in name or "\0" in name or {".", ".."} & set(parts) else name


def _widened(extra: bytes, numbers: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return size, stored size and header offset. Values of more than 32 bits are in the extra field."""
    wide: list[int] = []
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            part = extra[at + 4 : at + 4 + length]
            wide = [int.from_bytes(part[n : n + 8], "little") for n in range(0, len(part) - 7, 8)]
        at += 4 + length
    found = [wide.pop(0) if number == _LARGE and wide else number for number in numbers]
    return found[0], found[1], found[2]
