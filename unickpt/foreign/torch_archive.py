"""The zip file that ``torch.save`` writes: a pickle, and every storage uncompressed beside it.

Only that form is read: no compression, no comment, no bytes in front, no two entries that share a name or bytes. Sizes come
from the file's directory and are checked against the file.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from unickpt.errors import FormatError
from unickpt.foreign.located import Files

MAX_PICKLE_BYTES = 1 << 30
MAX_DIRECTORY_BYTES = 64 << 20  # some 600,000 storages
_END, _END_64, _LOCATOR = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
_ENTRY, _LOCAL = struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s5H3L2H")
_ENCRYPTED = 1
_LARGE = 0xFFFFFFFF  # stands where the size is in the extra field
_OLD = "not a file that torch.save writes since torch 1.6; an older one has to be saved anew"


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the directory. Attributes: name, method of compression, flags, CRC, bytes, where its local header begins."""

    name: str
    method: int
    flags: int
    crc: int
    size_bytes: int
    stored_bytes: int
    header_byte: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of a file."""

    begin_byte: int
    size_bytes: int


class Archive:
    """An archive that is ``size`` bytes of a file from ``begin`` on.

    Attributes:
        path: of the file.
        size_bytes: of the archive.
    """

    def __init__(self, files: Files, path: Path, begin: int, size: int) -> None:
        """Read the directory.

        Raises:
            FormatError: not such an archive, or damaged.
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
            raise FormatError(f"{path}: holds {len(pickles)} pickles where torch.save writes one")
        self._folder = pickles[0].removesuffix("data.pkl")
        if f"{self._folder}byteorder" in self._entries and self._whole("byteorder", 64) != b"little":
            raise FormatError(f"{path}: written on a machine of the other byte order")

    def pickle(self) -> bytes:
        """The pickle. Raises FormatError."""
        return self._whole("data.pkl", MAX_PICKLE_BYTES)

    def storage(self, key: str) -> Extent:
        """Where the storage of a key lies in the file. Raises FormatError."""
        entry = self._entries.get(f"{self._folder}data/{key}")
        if entry is None:
            raise FormatError(f"{self.path}: storage {key[:80]} is not there")
        return self._extent(entry)

    # ---------------------------------------------------------------- parts of the file

    def _read(self, at: int, size: int) -> bytes:
        if at < 0 or size < 0 or at + size > self.size_bytes:
            raise FormatError(f"{self.path}: {_OLD} (its directory leaves the file)")
        return self._files.read(self.path, self._begin + at, size)

    def _directory(self) -> tuple[int, int, int]:
        """Entries, first byte and length of the directory, which ends where the record of the end begins."""
        end = self.size_bytes - _END.size
        tag, _disk, _disks, _here, count, length, at, comment = _END.unpack(self._read(end, _END.size))
        if tag != b"PK\5\6" or comment:
            raise FormatError(f"{self.path}: {_OLD}")
        locator = self._read(end - _LOCATOR.size, _LOCATOR.size) if end >= _LOCATOR.size else b""
        if locator[:4] == b"PK\6\7":
            end = _LOCATOR.unpack(locator)[2]
            record = _END_64.unpack(self._read(end, _END_64.size))
            if record[0] != b"PK\6\6":
                raise FormatError(f"{self.path}: {_OLD} (its directory is not where its end says)")
            count, length, at = record[7:]
        if at + length != end or length > MAX_DIRECTORY_BYTES:
            raise FormatError(f"{self.path}: {_OLD} (a directory of {length:,} bytes at byte {at:,} of {end:,})")
        return count, at, length

    def _listed(self, count: int, data: bytes) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        at = 0
        while at < len(data):
            entry, at = self._entry(data, at)
            if entry.name in found:
                raise FormatError(f"{self.path}: has two entries {entry.name[:80]}")
            found[entry.name] = entry
        if len(found) != count:
            raise FormatError(f"{self.path}: has {len(found)} entries, its end says {count}")
        return found

    def _entry(self, data: bytes, at: int) -> tuple[Entry, int]:
        if at + _ENTRY.size > len(data):
            raise FormatError(f"{self.path}: its directory ends within an entry")
        (tag, _made, _needs, flags, method, _time, _date, crc, stored, size, names, extras, comment, _disk, _inner, _outer,
         header) = _ENTRY.unpack_from(data, at)  # fmt: skip
        begin = at + _ENTRY.size
        end = begin + names + extras + comment
        if tag != b"PK\1\2" or end > len(data):
            raise FormatError(f"{self.path}: its directory is damaged at byte {at:,}")
        name = _decoded(data[begin : begin + names])
        if name is None:
            raise FormatError(f"{self.path}: has an entry {data[begin : begin + names][:80]!r}, which torch.save never writes")
        size, stored, header = _widened(data[begin + names : begin + names + extras], (size, stored, header))
        return Entry(name, method, flags, crc, size, stored, header), end

    def _extent(self, entry: Entry) -> Extent:
        """Where an entry's bytes are: between its own header and the next one."""
        if entry.method or entry.flags & _ENCRYPTED or entry.size_bytes != entry.stored_bytes:
            raise FormatError(f"{self.path}: {entry.name[:80]} is compressed or encrypted, which torch.save never does")
        head = self._read(entry.header_byte, _LOCAL.size)
        tag, *_, names, extras = _LOCAL.unpack(head)
        begin = entry.header_byte + _LOCAL.size + names + extras
        if tag != b"PK\3\4" or _decoded(self._read(entry.header_byte + _LOCAL.size, names)) != entry.name:
            raise FormatError(f"{self.path}: {entry.name[:80]} is not where the file's directory says")
        after = bisect_right(self._headers, entry.header_byte)
        limit = self._headers[after] if after < len(self._headers) else self._end_byte
        shared = after > 1 and self._headers[after - 2] == entry.header_byte
        if begin + entry.size_bytes > limit or shared:
            raise FormatError(f"{self.path}: {entry.name[:80]} shares bytes with what follows it")
        return Extent(self._begin + begin, entry.size_bytes)

    def _whole(self, name: str, limit: int) -> bytes:
        entry = self._entries[f"{self._folder}{name}"]
        if entry.size_bytes > limit:
            raise FormatError(f"{self.path}: its {name} has {entry.size_bytes:,} bytes; {limit:,} are read")
        found = self._extent(entry)
        data = self._files.read(self.path, found.begin_byte, found.size_bytes)
        if zlib.crc32(data) != entry.crc:
            raise FormatError(f"{self.path}: its {name} is damaged: it does not have the checksum that its directory says")
        return data


def _decoded(data: bytes) -> str | None:
    """A name of an entry; None if it is no plain relative path."""
    try:
        name = data.decode()  # the names of torch.save are ASCII or marked as UTF-8
    except UnicodeDecodeError:
        return None
    parts = name.split("/")
    return None if not name or parts[0] == "" or "\\" in name or "\0" in name or {".", ".."} & set(parts) else name


def _widened(extra: bytes, numbers: tuple[int, int, int]) -> tuple[int, int, int]:
    """Bytes, stored bytes and header position, where those of more than 32 bits are in the extra field."""
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
