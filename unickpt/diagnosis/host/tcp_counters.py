"""The kernel's counters of the TCP connections of processes: the transport of gloo, and of NCCL over sockets.

Linux only, through ``sock_diag(7)``. Fields are those of ``struct tcp_info`` in ``linux/tcp.h``. Works for stopped processes,
too.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

CONNECTION = np.dtype(
    [
        ("rank", "i4"),
        ("here", "u8"),  # this end: hash of both addresses, its own first
        ("there", "u8"),  # the other end, hashed from its side
        ("acked", "u8"),  # bytes acknowledged by the other end
        ("received", "u8"),  # bytes that came from the other end
        ("busy_us", "u8"),  # time with data in flight, without time limited by the receiver
        ("rtt_us", "u4"),  # round trip, smoothed
        ("unacked", "u4"),  # segments in flight
        ("unsent", "u4"),  # bytes in the send buffer
        ("retransmits", "u4"),
        ("backoff", "u1"),  # retransmission time-outs in a row
    ]
)
Connections = npt.NDArray[Any]  # of dtype ``CONNECTION``

_DIAG, _BY_FAMILY, _DUMP, _DONE, _ERROR = 4, 20, 0x301, 3, 2
_INFO = 2  # INET_DIAG_INFO
_ESTABLISHED_AND_CLOSING = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8
_HEADER, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=HH")
_MESSAGE = struct.Struct("=BBBB2s2s16s16sI8sIIIII")  # inet_diag_msg: family, state, timer, retransmits, ports, addresses, ...
_BACKOFF, _UNACKED, _RTT, _RETRANSMITS, _ACKED, _RECEIVED, _UNSENT, _BUSY, _FULL = 4, 24, 68, 100, 120, 128, 144, 168, 176


def connections_of(pids: Mapping[int, int], sockets: Sockets | None = None) -> Connections:
    """Return the connections of ranks on this host; empty if the system gives no access.

    Args:
        pids: process number of each rank.
        sockets: sockets that a caller who looks again keeps.
    """
    owner = (sockets or Sockets()).owners(pids)
    rows: list[tuple[int, ...]] = []
    if owner:
        with contextlib.suppress(OSError):
            _ask(owner, rows)
    return np.array(rows, CONNECTION)


class Sockets:
    """Sockets of processes. A process with many open files is costly to look at, so each look renews a part of them.

    Args:
        every: looks after which the sockets of a process are renewed. The first as many looks renew all.
    """

    def __init__(self, every: int = 5) -> None:
        self._every, self._looks = every, 0
        self._known: dict[int, tuple[int, list[int]]] = {}  # by rank: process number, inodes

    def owners(self, pids: Mapping[int, int]) -> dict[int, int]:
        """Return the rank of each socket, by its inode, at one look."""
        known, self._known = self._known, {}
        for at, (rank, pid) in enumerate(pids.items()):
            before = known.get(rank)
            due = self._looks < self._every or (self._looks + at) % self._every == 0
            self._known[rank] = before if before is not None and before[0] == pid and not due else (pid, _sockets_of(pid))
        self._looks += 1
        return {inode: rank for rank, (_, inodes) in self._known.items() for inode in inodes}


def _sockets_of(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(folder := f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"{folder}/{name}")
                if target.startswith("socket:["):
                    found.append(int(target[8:-1]))
    return found


def _ask(owner: Mapping[int, int], rows: list[tuple[int, ...]]) -> None:
    """Query the connections in the network namespace of this process."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _DIAG) as kernel:
            kernel.settimeout(1.0)
            wanted = struct.pack("=BBBBI48x", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _ESTABLISHED_AND_CLOSING)
            kernel.send(_HEADER.pack(_HEADER.size + len(wanted), _BY_FAMILY, _DUMP, 1, 0) + wanted)
            over = False
            while not over:
                over = _read(kernel.recv(1 << 18), owner, rows)


def _read(data: bytes, owner: Mapping[int, int], rows: list[tuple[int, ...]]) -> bool:
    """Read one answer of the kernel; return whether it was the last."""
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, *_ = _HEADER.unpack_from(data, at)
        if kind in (_DONE, _ERROR) or length < _HEADER.size:
            return True
        body = data[at + _HEADER.size : at + length]
        inode = _MESSAGE.unpack_from(body)[-1]
        if inode in owner:
            info = _attribute(body[_MESSAGE.size :], _INFO)
            if len(info) >= _UNSENT + 4:
                rows.append(_row(owner[inode], body, info))
        at += length + 3 & ~3
    return False


def _attribute(data: bytes, wanted: int) -> bytes:
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if kind == wanted:
            return data[at + _ATTRIBUTE.size : at + length]
        at += max(length + 3 & ~3, _ATTRIBUTE.size)
    return b""


def _row(rank: int, body: bytes, info: bytes) -> tuple[int, ...]:
    _, _, _, _, port, other_port, address, other_address, *_ = _MESSAGE.unpack_from(body)
    size = 4 if body[0] == socket.AF_INET else 16
    own, other = address[:size] + port, other_address[:size] + other_port

    def number(at: int, code: str) -> int:
        value: int = struct.unpack_from(code, info, at)[0] if at + struct.calcsize(code) <= len(info) else 0
        return value

    busy = max(number(_BUSY, "=Q") - number(_FULL, "=Q"), 0)
    return (
        rank, _hash(own, other), _hash(other, own), number(_ACKED, "=Q"), number(_RECEIVED, "=Q"), busy, number(_RTT, "=I"),
        number(_UNACKED, "=I"), number(_UNSENT, "=I"), number(_RETRANSMITS, "=I"), info[_BACKOFF],
    )  # fmt: skip


def _hash(first: bytes, second: bytes) -> int:
    return zlib.crc32(first + second) << 32 | zlib.crc32(second + b"/" + first)
