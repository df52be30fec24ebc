"""A snapshot as bytes: a JSON header, then the tables as in memory. Decoding validates untrusted data."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.base.errors import FormatError
from unickpt.base.failure_kinds import FailureKind, Remedy
from unickpt.base.round_folder import Failed
from unickpt.diagnosis.hardware.kept import as_fields, from_fields
from unickpt.diagnosis.host.process_exits import ExitStatus
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.host.stack_dumps import DEEPEST, Frame
from unickpt.diagnosis.recording.launched import AbsentRank
from unickpt.diagnosis.recording.rank_ranges import AXES, MOST_RANKS, checked_progressions
from unickpt.diagnosis.recording.records import Op
from unickpt.diagnosis.snapshot.progress import PROGRESS
from unickpt.diagnosis.snapshot.snapshot import (
    CALL,
    FinishedCall,
    GroupInfo,
    LayerSample,
    RankSnapshot,
    Snapshot,
    limit_members,
)
from unickpt.diagnosis.snapshot.steps import STEP
from unickpt.diagnosis.snapshot.tcp_windows import WINDOW

VERSION = 13
_LONGEST = 4096  # characters of a text
_LATEST_NS = 1 << 62
_LONGEST_S = 1e9
_LENGTH = struct.Struct("<Q")
_TABLES = {"rows": PROGRESS, "steps": STEP, "calls": CALL, "windows": WINDOW}


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """Return the bytes of a snapshot: length of the header (8 bytes, little-endian), header, tables."""
    tables = {name: np.ascontiguousarray(getattr(snapshot, name)) for name in _TABLES}
    head = {
        "version": VERSION,
        "now_ns": snapshot.now_ns,
        "longest_wait_ns": snapshot.longest_wait_ns,
        "problems": list(snapshot.problems),
        "groups": [[group.name, group.label, group.ranks, group.on_device] for group in snapshot.groups],
        "ranks": {
            str(rank): [
                r.pid,
                r.host,
                r.state.value,
                r.closed,
                r.step,
                r.phase,
                r.heard_ns,
                list(r.coordinates),
                [int(r.last.op), r.last.seq, r.last.label, r.last.end_ns] if r.last is not None else None,
                _stack_fields(r.stack),
                [r.exit.signal, r.exit.code] if r.exit is not None else None,
                r.cpu_wait,
                r.still_s,
                r.same_place_s,
                r.failed,
                [r.layers.took_s, r.layers.expected_s, r.layers.error, r.layers.steps] if r.layers is not None else None,
                r.raised,
                _failure_fields(r.failure) if r.failure is not None else None,
            ]
            for rank, r in snapshot.ranks.items()
        },
        "absent": {
            str(rank): [one.pid, one.host, one.state.value, _stack_fields(one.stack)] for rank, one in snapshot.absent.items()
        },
        "hardware": {host: as_fields(found) for host, found in snapshot.hardware.items()},
        "tables": {name: len(table) for name, table in tables.items()},
    }
    text = json.dumps(head).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *(table.tobytes() for table in tables.values())])


def decode_snapshot(data: bytes) -> Snapshot:
    """Return the snapshot that ``encode_snapshot`` has written.

    Raises:
        FormatError: the data is not a snapshot, is inconsistent, or has another version.
    """
    try:
        (length,) = _LENGTH.unpack_from(data)
        head = json.loads(data[_LENGTH.size : _LENGTH.size + length])
        if not isinstance(head, dict) or head.get("version") != VERSION:
            raise FormatError(f"a snapshot of version {head.get('version') if isinstance(head, dict) else '?'}, not {VERSION}")
        groups = [
            GroupInfo(str(n), str(label), checked_progressions(ranks), bool(device))
            for n, label, ranks, device in head["groups"]
        ]
        ranks = {_number(int(rank), MOST_RANKS): _rank(*fields) for rank, fields in head["ranks"].items()}
        tables = _tables(data, _LENGTH.size + length, head["tables"])
        problems = [str(text) for text in head["problems"]]
        found = Snapshot(
            _time(head["now_ns"]),
            ranks,
            limit_members(groups),
            tables["rows"],
            tables["steps"],
            tables["calls"],
            tables["windows"],
            longest_wait_ns=_time(head["longest_wait_ns"]),
            problems=problems,
            absent={_number(int(rank), MOST_RANKS): _absent(*fields) for rank, fields in head["absent"].items()},
            hardware={_text(host): from_fields(*fields) for host, fields in head["hardware"].items()},
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, struct.error) as err:
        raise FormatError(f"not the bytes of a snapshot: {type(err).__name__}: {err}") from err
    _check(found)
    return found


def _tables(data: bytes, at: int, lengths: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    found = {}
    for name, dtype in _TABLES.items():
        rows = _number(lengths[name], 1 << 40)
        if at + rows * dtype.itemsize > len(data):
            raise ValueError(f"{rows} {name} do not fit into {len(data)} bytes")
        found[name] = np.frombuffer(data, dtype, rows, at)
        at += rows * dtype.itemsize
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes too many")
    return found


def _number(value: Any, end: int) -> int:
    if not isinstance(value, int) or not 0 <= value < end:
        raise ValueError(f"{value!r} is not a number from 0 to {end - 1}")
    return value


def _time(value: Any) -> int:
    if not isinstance(value, int) or not -_LATEST_NS < value < _LATEST_NS:
        raise ValueError(f"{value!r} is no time in nanoseconds")
    return value


def _duration(value: Any) -> float:
    if not isinstance(value, (int, float)) or not 0 <= value < _LONGEST_S:
        raise ValueError(f"{value!r} is no duration in seconds")
    return float(value)


def _rank(
    pid: Any, host: Any, state: Any, closed: Any, step: Any, phase: Any, heard_ns: Any, coordinates: Any, last: Any, stack: Any,
    status: Any, cpu_wait: Any, still_s: Any, same_place_s: Any, failed: Any, layers: Any,
    raised: Any, failure: Any,
) -> RankSnapshot:  # fmt: skip
    if len(coordinates) > len(AXES):
        raise ValueError("more coordinates than a rank has")
    return RankSnapshot(
        _number(pid, 1 << 31), _text(host), State(state), bool(closed), _time(step), _number(phase, 1 << 32), _time(heard_ns),
        tuple((_text(axis), _number(at, MOST_RANKS)) for axis, at in coordinates), _last(*last) if last is not None else None,
        _stack(stack),
        ExitStatus(*(_number(each, 256) for each in status)) if status is not None else None, float(cpu_wait),
        _duration(still_s), _duration(same_place_s), bool(failed),
        _layers(*layers) if layers is not None else None, bool(raised), _failure(*failure) if failure is not None else None,
    )  # fmt: skip


def _failure_fields(one: Failed) -> list[Any]:
    return [one.signature, one.text, one.excused, one.kind.value, one.remedy.value, one.error, one.at_ns]


def _failure(signature: Any, text: Any, excused: Any, kind: Any, remedy: Any, error: Any, at_ns: Any) -> Failed:
    return Failed(_text(signature), _text(text), bool(excused), FailureKind(kind), Remedy(remedy), _text(error), _time(at_ns))


def _absent(pid: Any, host: Any, state: Any, stack: Any) -> AbsentRank:
    return AbsentRank(_number(pid, 1 << 31), _text(host), State(state), _stack(stack))


def _stack_fields(stack: Sequence[Frame]) -> list[list[Any]]:
    return [[frame.function, frame.file, frame.line, frame.own] for frame in stack]


def _stack(frames: Any) -> tuple[Frame, ...]:
    if len(frames) > DEEPEST:
        raise ValueError("more frames than a rank has")
    return tuple(Frame(_text(name), _text(file), _number(line, 1 << 31), bool(own)) for name, file, line, own in frames)


def _layers(took_s: Any, expected_s: Any, error: Any, steps: Any) -> LayerSample:
    return LayerSample(_duration(took_s), _duration(expected_s), _duration(error), _number(steps, 1 << 32))


def _last(op: Any, seq: Any, label: Any, end_ns: Any) -> FinishedCall:
    return FinishedCall(Op(op), _number(seq, 1 << 64), _text(label), _time(end_ns))


def _text(value: Any) -> str:
    return str(value)[:_LONGEST]


def _check(snapshot: Snapshot) -> None:
    """Check what detectors rely on: ranks and communicators exist, operations are known."""
    known = np.array(sorted(snapshot.ranks), np.int64)
    for name in _TABLES:
        table = getattr(snapshot, name)
        if not np.isin(table["rank"], known).all():
            raise FormatError(f"{name} of ranks that the snapshot does not have")
    for name in ("rows", "calls"):
        table = getattr(snapshot, name)
        if len(table) and not ((table["comm"] >= 0) & (table["comm"] < len(snapshot.groups))).all():
            raise FormatError(f"{name} of communicators that the snapshot does not have")
        if not np.isin(table["op"], [int(op) for op in Op if op <= Op.RECEIVE]).all():
            raise FormatError(f"{name} of unknown operations")
