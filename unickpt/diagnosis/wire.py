"""A view as bytes: JSON for what has names, tables as they are in memory. What arrives is not trusted."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.steps import STEP
from unickpt.diagnosis.summaries import SUMMARY
from unickpt.diagnosis.transport import WINDOW
from unickpt.diagnosis.view import CALL, Group, RankView, View, believed
from unickpt.errors import FormatError
from unickpt.timing.processes import State
from unickpt.timing.ranks import MOST_RANKS, believable
from unickpt.timing.records import Op

VERSION = 5
_LATEST_NS = 1 << 62
_LENGTH = struct.Struct("<Q")
_TABLES = {"rows": SUMMARY, "steps": STEP, "calls": CALL, "windows": WINDOW}


def packed(view: View) -> bytes:
    """The bytes of a view: length of the JSON (u8, little-endian), the JSON, the tables one after the other."""
    tables = {name: np.ascontiguousarray(getattr(view, name)) for name in _TABLES}
    head = {
        "version": VERSION,
        "now_ns": view.now_ns,
        "longest_wait_ns": view.longest_wait_ns,
        "problems": list(view.problems),
        "groups": [[group.name, group.label, group.ranks, group.on_device] for group in view.groups],
        "ranks": {
            str(rank): [
                r.pid,
                r.host,
                r.state.value,
                r.closed,
                r.step,
                r.phase,
                r.heard_ns,
                r.place,
                r.last,
                r.last_ns,
                r.stack,
                r.ended,
                r.crowded,
            ]
            for rank, r in view.ranks.items()
        },
        "tables": {name: len(table) for name, table in tables.items()},
    }
    text = json.dumps(head).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *(table.tobytes() for table in tables.values())])


def unpacked(data: bytes) -> View:
    """The view that was packed.

    Raises:
        FormatError: these are not the bytes of a view, or of another version.
    """
    try:
        (length,) = _LENGTH.unpack_from(data)
        head = json.loads(data[_LENGTH.size : _LENGTH.size + length])
        if not isinstance(head, dict) or head.get("version") != VERSION:
            raise FormatError(f"a view of version {head.get('version') if isinstance(head, dict) else '?'}, not {VERSION}")
        groups = [Group(str(n), str(label), believable(ranks), bool(device)) for n, label, ranks, device in head["groups"]]
        ranks = {_number(int(rank), MOST_RANKS): _rank(*fields) for rank, fields in head["ranks"].items()}
        tables = _tables(data, _LENGTH.size + length, head["tables"])
        problems = [str(text) for text in head["problems"]]
        found = View(
            _time(head["now_ns"]), ranks, believed(groups), **tables, longest_wait_ns=_time(head["longest_wait_ns"]),
            problems=problems,
        )  # fmt: skip
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, struct.error) as err:
        raise FormatError(f"not the bytes of a view: {type(err).__name__}: {err}") from err
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


def _rank(
    pid: Any, host: Any, state: Any, closed: Any, step: Any, phase: Any, heard_ns: Any, place: Any, last: Any, last_ns: Any,
    stack: Any, ended: Any, crowded: Any,
) -> RankView:  # fmt: skip
    return RankView(
        _number(pid, 1 << 31), str(host), State(state), bool(closed), _time(step), _number(phase, 1 << 32), _time(heard_ns),
        str(place), str(last), _time(last_ns), str(stack), str(ended), float(crowded),
    )  # fmt: skip


def _check(view: View) -> None:
    """What detectors rely on: ranks and communicators that exist, operations that are known."""
    known = np.array(sorted(view.ranks), np.int64)
    for name in _TABLES:
        table = getattr(view, name)
        if not np.isin(table["rank"], known).all():
            raise FormatError(f"{name} of ranks that the view does not have")
    for name in ("rows", "calls"):
        table = getattr(view, name)
        if len(table) and not ((table["comm"] >= 0) & (table["comm"] < len(view.groups))).all():
            raise FormatError(f"{name} of communicators that the view does not have")
        if not np.isin(table["op"], [int(op) for op in Op if op <= Op.RECEIVE]).all():
            raise FormatError(f"{name} of unknown operations")
