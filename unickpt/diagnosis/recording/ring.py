"""A fixed number of records in a file in shared memory: one writer, any readers, no locks.

The ring outlives its process, and can be read while the process hangs, holds the interpreter's lock or is stopped.

    header (one page)   identity of the writer, clocks, and a few values that change
    table               communicators, one line of JSON each, append only
    records             ``capacity`` records; number ``n`` is in slot ``(n - 1) % capacity``

A record begins and ends with its number. The writer writes from front to back; a reader reads the last field first and the
first field last. A record that changes meanwhile has two different numbers and is left out. This needs stores to become visible
in order, as on x86; on other processors a reader may rarely see a partly old record.
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
import numpy.typing as npt

from unickpt.base.errors import ConfigError, FormatError
from unickpt.base.private_files import free_bytes, make_named_folder, more_room, open_regular, replacing
from unickpt.base.process_identity import boot_id
from unickpt.diagnosis.recording.rank_ranges import MOST_RANKS
from unickpt.diagnosis.recording.records import (
    CALL_OFFSET,
    DTYPES,
    END_OFFSET,
    FLAGS_OFFSET,
    FORMAT,
    RECORD,
    START_OFFSET,
    WAIT_OFFSET,
    Flag,
    Op,
    Records,
)

_MOST_PIDS = 1 << 31
MAGIC = b"UNICKRNG"
VERSION = 2
SUFFIX = ".ring"
HEADER_BYTES = 4096
TABLE_BYTES = 256 << 10
_FIXED = struct.Struct("<8sIIQQIIQqq64s64s40s")  # magic, version, record size, capacity, table, rank, world, pid, clocks, names
_CHANGING = struct.Struct("<QqqQII")  # bytes of the table, heartbeat, step, newest record, phase, state
MOST_RECORDS = 1 << 24  # 1.6 GB
_AHEAD = 256  # slots in which newer records than the header knows are looked for at a time
_CHANGING_OFFSET = 512
_LOOKED_AT = 1 << 16  # slots read at a time, to bound memory
_KNOWN_OPS = np.isin(np.arange(256), [int(op) for op in Op])
_WORD, _SIGNED, _SHORT = struct.Struct("<Q"), struct.Struct("<q"), struct.Struct("<H")

RUNNING, CLOSED, RAISED = 1, 2, 3  # RAISED: an exception ends the process


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of the writer of a ring.

    Attributes:
        rank: global rank.
        world: number of ranks of the job.
        pid: process number.
        host: host name.
        job: name of the job, equal in all its rings.
        monotonic_ns: monotonic clock when the ring was created.
        wall_ns: wall clock at the same instant.
        boot: boot identifier of the host, within which the monotonic clock and process numbers are valid.
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


def ring_bytes(capacity: int) -> int:
    """Return the size of a ring in bytes."""
    return HEADER_BYTES + TABLE_BYTES + capacity * RECORD.itemsize


class RingWriter:
    """Writer of one rank's ring. After construction it neither allocates memory nor calls the system.

    Args:
        path: path of the file. An existing file is replaced. The folder is created with mode 0700, or checked.
        identity: identity of the writer.
        capacity: number of records, at most ``MOST_RECORDS``.

    Attributes:
        map: mapped file.
        pack: packs a record into ``map``.
        first_byte: offset of the first record.

    Raises:
        ConfigError: ``capacity`` is out of range.
        OSError: the file cannot be created, there is no room for it, or its folder is open to other users.
    """

    def __init__(self, path: Path, identity: Identity, *, capacity: int) -> None:
        self.path, self.identity, self.capacity = path, identity, capacity
        if not 0 < capacity <= MOST_RECORDS:
            raise ConfigError(f"a ring of {capacity} records: 1 to {MOST_RECORDS} are possible")
        size = ring_bytes(capacity)
        make_named_folder(path.parent)
        self._table_bytes = 0
        with replacing(path) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)  # fail now if the file system is full, not by SIGBUS later
            except OSError as err:
                raise OSError(
                    err.errno,
                    f"{err.strerror}: the ring of rank {identity.rank} needs {size:,} bytes in {path.parent}, which has "
                    f"{free_bytes(path.parent):,} free. {more_room(path.parent)}, or set the option timing.records or "
                    "timing.folder",
                ) from err
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
        """Write record ``number``. ``fields`` are the fields between the two numbers."""
        self.pack(self.map, self._place(number), number, *fields, number)

    def _place(self, number: int) -> int:
        return self.first_byte + (number - 1) % self.capacity * RECORD.itemsize

    def end(self, number: int, end_ns: int) -> None:
        """Write the end of a record. The caller makes sure that its slot was not reused."""
        _SIGNED.pack_into(self.map, self._place(number) + END_OFFSET, end_ns)

    def ended(self, number: int) -> bool:
        """Return whether the end of a record is written. Same condition as ``end``."""
        return bool(_SIGNED.unpack_from(self.map, self._place(number) + END_OFFSET)[0])

    def wait(self, number: int, wait_ns: int) -> None:
        """Write the begin of a wait for a record. Same condition as ``end``."""
        _SIGNED.pack_into(self.map, self._place(number) + WAIT_OFFSET, wait_ns)

    def flag(self, number: int, flags: int) -> None:
        """Replace the flags of a record."""
        _SHORT.pack_into(self.map, self._place(number) + FLAGS_OFFSET, flags)

    def device_call(self, number: int, start_ns: int, wait_ns: int, end_ns: int) -> None:
        """Write the times of a call on its device. Same condition as ``end``."""
        self._device_times(number, START_OFFSET, start_ns, wait_ns, end_ns)

    def device_step(self, number: int, begin_ns: int, end_ns: int) -> None:
        """Replace the times of a step by those of the device. Same condition as ``end``."""
        self._device_times(number, CALL_OFFSET, begin_ns, begin_ns, begin_ns, end_ns)

    def _device_times(self, number: int, offset: int, *times_ns: int) -> None:
        """Write times that end with ``end_ns``, then the flag."""
        at = self._place(number)
        struct.pack_into(f"<{len(times_ns)}q", self.map, at + offset, *times_ns)
        (flags,) = _SHORT.unpack_from(self.map, at + FLAGS_OFFSET)
        _SHORT.pack_into(self.map, at + FLAGS_OFFSET, flags | int(Flag.DEVICE_TIMES))

    def list_communicator(self, entry: dict[str, Any]) -> bool:
        """Append to the table; return False if it is full."""
        line = json.dumps(entry).encode() + b"\n"
        begin = HEADER_BYTES + self._table_bytes
        if self._table_bytes + len(line) > TABLE_BYTES:
            return False
        self.map[begin : begin + len(line)] = line
        self._table_bytes += len(line)
        _WORD.pack_into(self.map, _CHANGING_OFFSET, self._table_bytes)
        return True

    def state(self, *, heartbeat_ns: int, step: int, newest: int, phase: int, state: int = RUNNING) -> None:
        """Update the header. ``newest`` is the number of the last record."""
        _CHANGING.pack_into(self.map, _CHANGING_OFFSET, self._table_bytes, heartbeat_ns, step, newest, phase, state)


@dataclass(frozen=True, slots=True)
class RingContents:
    """Contents of a ring at one time.

    Attributes:
        identity: identity of the writer.
        communicators: entries of the table, by number.
        records: ``RECORD`` array by number, the oldest first, without records that changed while they were read.
        step: training step.
        phase: training phase.
        heartbeat_ns: last update of the header, on the monotonic clock.
        closed: whether the process has ended recording: in order, or because of an exception.
        raised: whether it was an exception.
    """

    identity: Identity
    communicators: list[dict[str, Any]]
    records: Records
    step: int
    phase: int
    heartbeat_ns: int
    closed: bool
    raised: bool = False


class RingReader:
    """Reader of a ring that may be written at the same time.

    Raises:
        FormatError: the file is not a ring, has another version, or its header is inconsistent.
        OSError: the file cannot be opened, is a link or not a regular file, or belongs to another user than its folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(path) as file:
            self._file = _file_of(os.fstat(file.fileno()))
            size = self._file[-1]
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
        self._table: tuple[int, list[dict[str, Any]]] = 0, []  # bytes that were read, and what they list

    def is_current(self) -> bool:
        """Return whether the file at the path is still the one that is read."""
        try:
            return _file_of(os.lstat(self.path)) == self._file
        except OSError:
            return False

    def read(self, *, last: int | None = None) -> RingContents:
        """Read the contents. ``last`` limits them to that many newest records and makes reading faster."""
        length, heartbeat, step, newest, phase, state = _CHANGING.unpack_from(self.map, _CHANGING_OFFSET)
        if last is None or last >= self.capacity:
            found = self._part(0, self.capacity)
            found = found[np.argsort(found["begun"])]
        else:
            found = self._around(newest, last)
        if last is not None:
            found = found[len(found) - min(last, len(found)) :]
        communicators, closed = self._listed(min(length, TABLE_BYTES)), state in (CLOSED, RAISED)
        return RingContents(self.identity, communicators, found, step, phase, heartbeat, closed, state == RAISED)

    def _around(self, newest: int, last: int) -> Records:
        """Return the records from ``last`` before ``newest`` to those that were written since, the oldest first."""
        end = self._head(newest)
        first = max(newest - last, end - self.capacity, 0)
        slot, length = first % self.capacity, end - first
        numbers = np.arange(first + 1, end + 1, dtype=np.uint64)  # others are about to be replaced, or not yet written
        until_end = min(length, self.capacity - slot)
        parts = [self._part(slot, slot + until_end, numbers[:until_end])]
        if until_end < length:
            parts.append(self._part(0, length - until_end, numbers[until_end:]))
        return np.concatenate(parts) if len(parts) > 1 else parts[0]

    def _listed(self, length: int) -> list[dict[str, Any]]:
        """Return the communicators in the first ``length`` bytes of the table, which only grows."""
        if length != self._table[0]:
            lines = self.map[HEADER_BYTES : HEADER_BYTES + length].splitlines()
            self._table = length, [_line(line) for line in lines]
        return self._table[1]

    def _head(self, newest: int) -> int:
        """Return the number of the newest record. The header has one that was so some milliseconds ago."""
        written = np.frombuffer(self.map, RECORD, self.capacity, HEADER_BYTES + TABLE_BYTES)["written"]
        for _ in range(0, self.capacity, _AHEAD):
            numbers = np.arange(newest + 1, newest + 1 + _AHEAD, dtype=np.uint64)
            newer = np.flatnonzero(written[(numbers - np.uint64(1)) % np.uint64(self.capacity)] >= numbers)
            if not len(newer):
                break
            newest += int(newer[-1]) + 1
        return newest

    def _part(self, lo: int, hi: int, numbers: npt.NDArray[np.uint64] | None = None) -> Records:
        """Return the records in slots ``lo`` to ``hi`` without changing and invalid ones. ``numbers``: that they must have."""
        if hi - lo > _LOOKED_AT:
            parts = [(at, min(at + _LOOKED_AT, hi)) for at in range(lo, hi, _LOOKED_AT)]
            return np.concatenate([self._part(a, b, None if numbers is None else numbers[a - lo : b - lo]) for a, b in parts])
        slots = np.frombuffer(self.map, RECORD, self.capacity, HEADER_BYTES + TABLE_BYTES)[lo:hi]
        written = slots["written"].copy()
        found = slots.copy()
        begun = slots["begun"].copy()
        sound = (written == found["begun"]) & (written == begun)
        if numbers is None:
            place = np.arange(lo, hi, dtype=np.uint64)
            sound &= (written > 0) & ((written - np.uint64(1)) % np.uint64(self.capacity) == place)
        else:
            sound &= written == numbers
        sound &= _KNOWN_OPS[found["op"]] & (found["dtype"] <= len(DTYPES))
        part: Records = found if sound.all() else found[sound]
        return part


def _file_of(about: os.stat_result) -> tuple[int, int, int]:
    return about.st_dev, about.st_ino, about.st_size


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


def _line(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {}
