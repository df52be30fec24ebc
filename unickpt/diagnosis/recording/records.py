"""Record of one collective, point-to-point call or event of training: 96 bytes.

``FORMAT`` describes it for the rank that writes one record, ``RECORD`` for readers of arrays of records.
"""

from __future__ import annotations

import enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from unickpt.checkpoint.format.dtype_names import itemsize_bytes, names

Records = npt.NDArray[Any]  # of dtype ``RECORD``


class Op(enum.IntEnum):
    """Operation: a collective up to ``NEW_GROUP``, a call up to ``RECEIVE``, an event without communicator from ``STEP`` on."""

    ALL_REDUCE = 1
    BROADCAST = 2
    REDUCE = 3
    ALL_GATHER = 4
    REDUCE_SCATTER = 5
    ALL_TO_ALL = 6
    GATHER = 7
    SCATTER = 8
    BARRIER = 9
    NEW_GROUP = 10  # creation of a process group, which its members wait for
    SEND = 16
    RECEIVE = 17
    STEP = 32
    GARBAGE = 33
    DATA = 34
    CHECKPOINT = 35
    SAVE_STAGE = 36  # as ``unickpt.base.io_times.IoPhase``
    SAVE_WRITE = 37
    SAVE_COMMIT = 38
    LOAD_READ = 39
    LOAD_GATHER = 40
    LOAD_SET = 41

    @property
    def checkpoint_io(self) -> bool:
        return self >= Op.SAVE_STAGE

    @property
    def point_to_point(self) -> bool:
        return self in (Op.SEND, Op.RECEIVE)

    @property
    def collective(self) -> bool:
        return self <= Op.BARRIER


class Phase(enum.IntEnum):
    """Phase of training."""

    UNKNOWN = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    CHECKPOINT = 4
    EVALUATION = 5
    DATA = 6  # waits for its next batch


class Flag(enum.IntFlag):
    """Properties of a call."""

    ASYNC = 1  # the caller did not wait at once
    COALESCED = 2  # one of several that were issued as one
    FROM_NATIVE = 4  # by torch's own C++: the DDP reducer, functional collectives
    FAILED = 8  # the call raised, or the work ended with an error
    DEVICE_TIMES = 16  # start, wait and end are of the device, not of the host; of a step, all times
    TIMED_ON_DEVICE = 32  # DEVICE_TIMES follow when the times are known


_FIELDS = [
    ("begun", "u8"),  # number of the record, from 1; written first
    ("call_ns", "i8"),  # on the monotonic clock
    ("start_ns", "i8"),  # on a device; 0 if unknown
    ("wait_ns", "i8"),  # begin of the wait; the call itself if it is synchronous; 0 without a wait
    ("end_ns", "i8"),  # 0 until it has ended
    ("seq", "u8"),  # number in the communicator; for point-to-point calls in the pair of ranks and direction
    ("elements_in", "u8"),  # sent by this rank
    ("elements_out", "u8"),  # received by this rank
    ("comm", "u2"),  # position in the table of communicators
    ("op", "u1"),
    ("dtype", "u1"),  # position in ``DTYPES``, from 1; 0 for none
    ("flags", "u2"),
    ("phase", "u1"),
    ("unused", "u1"),
    ("peer", "i4"),  # global rank: source, destination or root; -1 for none
    ("tag", "i4"),
    ("step", "u4"),
    ("shape", "u4"),  # hash of the shape
    ("written", "u8"),  # the number again; written last
]
RECORD = np.dtype(_FIELDS)
_CODES = {"u8": "Q", "i8": "q", "u4": "I", "i4": "i", "u2": "H", "u1": "B"}
FORMAT = "<" + "".join(_CODES[kind] for _, kind in _FIELDS)
CALL_OFFSET = RECORD.fields["call_ns"][1]  # type: ignore[index]
START_OFFSET = RECORD.fields["start_ns"][1]  # type: ignore[index]
END_OFFSET = RECORD.fields["end_ns"][1]  # type: ignore[index]
WAIT_OFFSET = RECORD.fields["wait_ns"][1]  # type: ignore[index]
FLAGS_OFFSET = RECORD.fields["flags"][1]  # type: ignore[index]

DTYPES = tuple(names())
ITEMSIZES = np.array([0, *map(itemsize_bytes, DTYPES)], np.int64)


class ByColumn(Protocol):
    """Records whose columns are asked for by name: an array of dtype ``RECORD``, or a dictionary of its columns."""

    def __getitem__(self, name: str, /) -> npt.NDArray[Any]: ...


def begins_ns(records: ByColumn) -> npt.NDArray[np.int64]:
    """Return int64 ``[n]``: arrival of the rank at each call, on the device where that is known, otherwise on the host."""
    found: npt.NDArray[np.int64] = np.where(records["flags"] & int(Flag.DEVICE_TIMES), records["start_ns"], records["call_ns"])
    return found


def bytes_in(records: ByColumn) -> npt.NDArray[np.int64]:
    """Return int64 ``[n]``: bytes that the rank sent."""
    return _bytes(records, "elements_in")


def bytes_out(records: ByColumn) -> npt.NDArray[np.int64]:
    """Return int64 ``[n]``: bytes that the rank received."""
    return _bytes(records, "elements_out")


def ends_of(rank: int | npt.NDArray[Any], records: ByColumn) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return ``[n]`` each: source and destination of calls from the rank that made them, and the peer; -1 for collectives."""
    sends, receives = records["op"] == Op.SEND, records["op"] == Op.RECEIVE
    source = np.where(sends, rank, np.where(receives, records["peer"], -1))
    return source, np.where(receives, rank, np.where(sends, records["peer"], -1))


def _bytes(records: ByColumn, column: str) -> npt.NDArray[np.int64]:
    sizes: npt.NDArray[np.int64] = ITEMSIZES[records["dtype"]]
    return sizes * records[column].astype(np.int64)
