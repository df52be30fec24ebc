"""A fixed number of records in a file in shared memory: one writer, any readers, no locks.

It outlives its process, and whoever can read the file can read it while the process hangs, holds
the interpreter's lock or is stopped.

    header (one page)   who writes, clocks, and a few values that change
    table               communicators, one line of JSON each, only ever appended to
    records             ``capacity`` of them; number ``n`` is in slot ``(n - 1) % capacity``

A record begins and ends with its number. The writer writes from front to back; a reader looks at the last field
first and at the first one last, so that a record that changes meanwhile has two numbers and is left out. (That
rests on stores being seen in their order, as on x86; elsewhere a reader may rarely see a record half old.)
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unickpt.errors import ConfigError, FormatError
from unickpt.private_files import make_named_folder, open_regular, replacing
from unickpt.timing.ranks import MOST_RANKS
from unickpt.timing.records import DTYPES, END_OFFSET, FLAGS_OFFSET, FORMAT, RECORD, WAIT_OFFSET, Op, Records

_MOST_PIDS = 1 << 31
MAGIC = b"UNICKRNG"
VERSION = 2
SUFFIX = ".ring"
HEADER_BYTES = 4096
TABLE_BYTES = 256 << 10
_FIXED = struct.Struct("<8sIIQQIIQqq64s64s40s")  # magic, version, record size, capacity, table, rank, world, pid, clocks, names
_CHANGING = struct.Struct("<QqqQII")  # bytes of the table, heartbeat, step, newest record, phase, state
MOST_RECORDS = 1 << 24  # 1.6 GB
_SLACK = 8192  # records that may have been written since the newest was told
_CHANGING_OFFSET = 512
_LOOKED_AT = 1 << 16  # slots at a time: what is empty, or says nothing, costs no memory
_KNOWN_OPS = np.isin(np.arange(256), [int(op) for op in Op])
_WORD, _SIGNED, _SHORT = struct.Struct("<Q"), struct.Struct("<q"), struct.Struct("<H")

RUNNING, CLOSED = 1, 2


@dataclass(frozen=True, slots=True)
class Identity:
    """Who writes a ring.

    Attributes:
        rank, world: of the job.
        pid: of the process.
        host: its name.
        job: names the job; the rings of one job bear the same.
        monotonic_ns, wall_ns: both clocks of the host at one instant.
        boot: of the host: its monotonic clock and its process numbers mean nothing beyond that.
    """

    rank: int
    world: int
    pid: int
    host: str
    job: str
    monotonic_ns: int
    wall_ns: int
    boot: str = ""

    @classmethod
    def here(cls, rank: int, world: int, job: str) -> Identity:
        return cls(rank, world, os.getpid(), socket.gethostname(), job, time.monotonic_ns(), time.time_ns(), boot_id())

    @property
    def is_here(self) -> bool:
        """The writer runs, or ran, on this host since it was started."""
        return self.host == socket.gethostname() and self.boot == boot_id()


def boot_id() -> str:
    """Of this host (``random(4)``); '' if the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class RingWriter:
    """One rank's ring. Nothing here allocates or calls the system once it is made.

    Args:
        path: of the file; one that is there is replaced. Its folder is created with mode 0700, or checked.
        identity: who writes.
        capacity: records that it holds, at most ``MOST_RECORDS``.

    Attributes:
        map, pack, first_byte: for a caller that writes a record in one call, without one of ours between.

    Raises:
        ConfigError: ``capacity`` is out of range.
        OSError: the file cannot be made, there is no room for it, or its folder is open to other users.
    """

    def __init__(self, path: Path, identity: Identity, *, capacity: int) -> None:
        self.path, self.identity, self.capacity = path, identity, capacity
        if not 0 < capacity <= MOST_RECORDS:
            raise ConfigError(f"a ring of {capacity} records: 1 to {MOST_RECORDS} are possible")
        size = HEADER_BYTES + TABLE_BYTES + capacity * RECORD.itemsize
        make_named_folder(path.parent)
        self._table_bytes = 0
        with replacing(path) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a full file system says so now, and not by a signal later
            self.map = mmap.mmap(file.fileno(), size)
            who = identity
            _FIXED.pack_into(
                self.map, 0, MAGIC, VERSION, RECORD.itemsize, capacity, TABLE_BYTES, who.rank, who.world, who.pid,
                who.monotonic_ns, who.wall_ns, who.host.encode()[:64], who.job.encode()[:64],
                who.boot.encode()[:40],
            )  # fmt: skip
            _CHANGING.pack_into(self.map, _CHANGING_OFFSET, 0, 0, 0, 0, 0, RUNNING)
        self.first_byte = HEADER_BYTES + TABLE_BYTES
        self.pack = struct.Struct(FORMAT).pack_into

    def put(self, number: int, *fields: int) -> None:
        """Write record ``number``; ``fields`` are all between the two numbers."""
        at = self.first_byte + (number - 1) % self.capacity * RECORD.itemsize
        self.pack(self.map, at, number, *fields, number)

    def end(self, number: int, end_ns: int) -> None:
        """Note when a record has ended. The caller knows that its slot has not been taken by another one."""
        _SIGNED.pack_into(self.map, self.first_byte + (number - 1) % self.capacity * RECORD.itemsize + END_OFFSET, end_ns)

    def ended(self, number: int) -> bool:
        """Whether that was noted, in the same way."""
        at = self.first_byte + (number - 1) % self.capacity * RECORD.itemsize + END_OFFSET
        return bool(_SIGNED.unpack_from(self.map, at)[0])

    def wait(self, number: int, wait_ns: int) -> None:
        """Note since when somebody waits for it, in the same way."""
        _SIGNED.pack_into(self.map, self.first_byte + (number - 1) % self.capacity * RECORD.itemsize + WAIT_OFFSET, wait_ns)

    def flag(self, number: int, flags: int) -> None:
        """Replace the flags of a record."""
        _SHORT.pack_into(self.map, self.first_byte + (number - 1) % self.capacity * RECORD.itemsize + FLAGS_OFFSET, flags)

    def list_communicator(self, entry: dict[str, Any]) -> bool:
        """Append to the table; False if it is full."""
        line = json.dumps(entry).encode() + b"\n"
        begin = HEADER_BYTES + self._table_bytes
        if self._table_bytes + len(line) > TABLE_BYTES:
            return False
        self.map[begin : begin + len(line)] = line
        self._table_bytes += len(line)
        _WORD.pack_into(self.map, _CHANGING_OFFSET, self._table_bytes)
        return True

    def state(self, *, heartbeat_ns: int, step: int, newest: int, phase: int, state: int = RUNNING) -> None:
        """What changes now and then; ``newest`` is the number of the last record."""
        _CHANGING.pack_into(self.map, _CHANGING_OFFSET, self._table_bytes, heartbeat_ns, step, newest, phase, state)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A ring at one moment.

    Attributes:
        identity: who writes it.
        communicators: the table, in the order of their numbers.
        records: ``RECORD`` array, by number, the oldest first; those that changed meanwhile are not in it.
        step, phase, heartbeat_ns: as the rank last told.
        closed: the process ended in order.
    """

    identity: Identity
    communicators: list[dict[str, Any]]
    records: Records
    step: int
    phase: int
    heartbeat_ns: int
    closed: bool


class RingReader:
    """Reads a ring, whatever its writer does.

    Raises:
        FormatError: it is not one, one of another version, or its header contradicts itself or the size of the file.
        OSError: it cannot be opened, is a link or no regular file, or belongs to another user than its folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < HEADER_BYTES + TABLE_BYTES:
                raise FormatError(f"{path}: {size} bytes, too short for a ring of records")
            self.map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        magic, version, record, capacity, table, rank, world, pid, monotonic, wall, host, job, boot = _FIXED.unpack_from(
            self.map, 0
        )
        if magic != MAGIC:
            raise FormatError(f"{path}: not a ring of records")
        if version != VERSION or record != RECORD.itemsize or table != TABLE_BYTES:
            raise FormatError(f"{path}: ring version {version} with records of {record} bytes; this release reads {VERSION}")
        if not 0 < capacity <= MOST_RECORDS or size != HEADER_BYTES + TABLE_BYTES + capacity * record:
            raise FormatError(f"{path}: {size} bytes, which is not what {capacity} records take")
        if not rank < world <= MOST_RANKS:
            raise FormatError(f"{path}: rank {rank} of {world}; a job has at most {MOST_RANKS} ranks")
        if not 0 < pid <= _MOST_PIDS or min(monotonic, wall) < 0:
            raise FormatError(f"{path}: no process has the number {pid} and the clocks {monotonic} and {wall}")
        self.identity = Identity(rank, world, pid, _text(host), _text(job), monotonic, wall, _text(boot))
        self.capacity = capacity

    def snapshot(self, *, last: int | None = None) -> Snapshot:
        """What is in it now; ``last`` limits it to as many of the newest records, and is the faster for it."""
        length, heartbeat, step, newest, phase, state = _CHANGING.unpack_from(self.map, _CHANGING_OFFSET)
        lines = self.map[HEADER_BYTES : HEADER_BYTES + min(length, TABLE_BYTES)].splitlines()
        communicators = [_line(line) for line in lines]
        whole = last is None or last + _SLACK >= self.capacity
        found = self._part(0, self.capacity) if whole else self._around(newest, last or 0)
        found = found[np.argsort(found["begun"])]
        if last is not None:
            found = found[len(found) - min(last, len(found)) :]
        return Snapshot(self.identity, communicators, found, step, phase, heartbeat, state == CLOSED)

    def _around(self, newest: int, last: int) -> Records:
        """The records from ``last`` before the newest one that was told to those that may have come since."""
        first, end = max(newest - last, 0), max(newest - last, 0) + last + _SLACK
        slot = first % self.capacity
        length = end - first
        parts = [self._part(slot, min(slot + length, self.capacity))]
        if slot + length > self.capacity:
            parts.append(self._part(0, slot + length - self.capacity))
        return np.concatenate(parts)

    def _part(self, lo: int, hi: int) -> Records:
        """The records in some slots, but those that change meanwhile, or say what does not exist."""
        if hi - lo > _LOOKED_AT:
            return np.concatenate([self._part(at, min(at + _LOOKED_AT, hi)) for at in range(lo, hi, _LOOKED_AT)])
        slots = np.frombuffer(self.map, RECORD, self.capacity, HEADER_BYTES + TABLE_BYTES)[lo:hi]
        written = slots["written"].copy()
        found = slots.copy()
        begun = slots["begun"].copy()
        place = np.arange(lo, hi, dtype=np.uint64)
        sound = (written > 0) & (written == found["begun"]) & (written == begun)
        sound &= (written - np.uint64(1)) % np.uint64(self.capacity) == place
        sound &= _KNOWN_OPS[found["op"]] & (found["dtype"] <= len(DTYPES))
        part: Records = found[sound]
        return part


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


def _line(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {}
