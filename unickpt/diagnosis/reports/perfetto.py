"""Chrome trace of all records, for Perfetto (ui.perfetto.dev) and chrome://tracing.

The format is "Trace Event Format" (the JSON that Chromium's tracing writes): ``traceEvents`` with metadata (``M``), complete
events (``X``: ``ts`` and ``dur`` in microseconds) and flows (``s`` to ``f``). A rank is a process of the trace; its steps,
phases, moments and groups are threads. Complete events of one thread must be nested or disjoint, so overlapping calls
are on several threads of their group.

Ranks are written one after the other. Memory holds the records and the lines of one rank.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from unickpt.base.arrays import Ints
from unickpt.base.errors import StorageError
from unickpt.diagnosis.recording.records import DTYPES, Flag, Op, Phase, bytes_in, bytes_out
from unickpt.diagnosis.reports.job_records import OP_NAMES, JobRecords, RankRecords, unended
from unickpt.diagnosis.reports.transfer_delays import pairs

# Thread numbers; viewers treat 0 as the idle thread. Groups follow, with several threads where calls overlap.
_STEPS, _PHASES, _MOMENTS, _GROUPS = 1, 2, 3, 10
_LANES = 1000  # largest number of threads of a group
_COLUMNS = ("call_ns", "wait_ns", "end_ns", "seq", "op", "dtype", "flags", "phase", "peer", "step")
_DTYPES = ("none", *DTYPES)
_PHASE_NAMES = {int(phase): phase.name.lower() for phase in Phase if phase is not Phase.UNKNOWN}
_ASYNC, _FAILED = int(Flag.ASYNC), int(Flag.FAILED)
_GOES_ON = "has not ended when the job was read"

Event = dict[str, Any]


def write_trace(job: JobRecords, path: Path) -> int:
    """Write all records of a job, compressed if the name ends in ``.gz``; return the number of events.

    Raises:
        StorageError: the trace cannot be written. An existing file is unchanged.
    """
    fresh = path.with_name(f"{path.name}.part")
    try:
        with fresh.open("wb") as raw, contextlib.ExitStack() as stack:
            binary = stack.enter_context(gzip.open(raw, "wb", compresslevel=3)) if path.suffix == ".gz" else raw
            written = _write(job, stack.enter_context(io.TextIOWrapper(binary, "ascii", newline="\n")))
        fresh.replace(path)
    except OSError as err:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise StorageError(f"{path}: the trace cannot be written ({err})") from err
    return written


def _write(job: JobRecords, out: TextIO) -> int:
    base_ns, count = _base(job), 0
    about = {"job": job.name, "ranks": job.world, "ts_0_is_wall_ns": base_ns, "read_at_wall_ns": job.read_ns}
    out.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n')
    encoded = json.JSONEncoder(separators=(",", ":")).encode
    for event in events(job, base_ns):
        out.write((",\n" if count else "") + encoded(event))
        count += 1
    out.write("\n]}\n")
    return count


def _base(job: JobRecords) -> int:
    """Return the earliest known time. Microseconds relative to it are exact to nanoseconds as floats."""
    first = (int(rank.records["call_ns"].min()) + rank.to_clock_ns for rank in job.ranks.values() if len(rank.records))
    return min(first, default=job.read_ns)


def events(job: JobRecords, base_ns: int) -> Iterator[Event]:
    """Return all events by rank and time; the longer of two that begin together first. Times are relative to ``base_ns``."""
    flows = pairs(job)
    for number, rank in job.ranks.items():
        names: dict[int, str] = {}
        found = [*_moments(rank, base_ns), *_phases(rank, base_ns)]
        found += _calls(job, rank, base_ns, names)
        found += _flows(job, rank, flows, base_ns, found)
        found.sort(key=lambda event: (event["tid"], event["ts"], -event.get("dur", 0.0), event["ph"]))
        yield _named("process_name", number, 0, name=f"rank {number} ({rank.place})")
        yield _named("process_sort_index", number, 0, sort_index=number)
        fixed = {_STEPS: "steps", _PHASES: "phases, as far as calls show them", _MOMENTS: "data, garbage, checkpoints"}
        for tid, name in {**fixed, **names}.items():
            yield _named("thread_name", number, tid, name=name)
            yield _named("thread_sort_index", number, tid, sort_index=tid)
        for event in found:
            event.pop("at", None)
            yield event


def _named(what: str, rank: int, tid: int, **args: object) -> Event:
    return {"ph": "M", "name": what, "pid": _pid(rank), "tid": tid, "args": args}


def _pid(rank: int) -> int:
    """Return the process number of a rank. Viewers treat process 0 as idle."""
    return rank + 1


def _us(ns: int) -> float:
    """Return microseconds rounded to 1/8, which floats hold exactly, so adjacent events touch in any viewer."""
    return round(ns / 125) / 8


def _span(rank: RankRecords, tid: int, name: str, begin_ns: int, end_ns: int, category: str, args: Event) -> Event:
    """Return a complete event; ``begin_ns`` and ``end_ns`` are relative to time 0 of the trace."""
    event = {"ph": "X", "name": name, "cat": category, "pid": _pid(rank.number), "tid": tid, "ts": _us(begin_ns)}
    return {**event, "dur": max(_us(end_ns) - _us(begin_ns), 0.0), "args": args}


def _moments(rank: RankRecords, base_ns: int) -> Iterator[Event]:
    to_trace = rank.to_clock_ns - base_ns
    busy_until = {_STEPS: 0, _MOMENTS: 0}
    found = rank.records[rank.records["op"] > Op.RECEIVE]
    for record in found[np.argsort(found["call_ns"], kind="stable")]:
        op, begin, end, step = Op(record["op"]), int(record["call_ns"]), int(record["end_ns"]), int(record["step"])
        tid = _STEPS if op is Op.STEP else _MOMENTS
        end = max(end, begin)
        if begin >= busy_until[tid] or end <= busy_until[tid]:  # disjoint from the event before, or inside it
            name = f"step {step}" if op is Op.STEP else OP_NAMES[op]
            yield _span(rank, tid, name, begin + to_trace, end + to_trace, "moment", {"step": step})
            busy_until[tid] = max(busy_until[tid], end)


def _phases(rank: RankRecords, base_ns: int) -> Iterator[Event]:
    """Return phases, from the begin of their first call to the end of the last. Phases without calls are unknown."""
    calls = rank.records[(rank.records["op"] <= Op.RECEIVE) & (rank.records["phase"] <= max(Phase))]
    if not len(calls):
        return
    to_trace = rank.to_clock_ns - base_ns
    keys = np.stack([calls["phase"].astype(np.int64), calls["step"].astype(np.int64)])
    first = np.flatnonzero(np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0)))
    busy_until = 0
    for lo, hi in zip(first.tolist(), [*first[1:].tolist(), len(calls)], strict=True):
        part = calls[lo:hi]
        begin = max(int(part["call_ns"].min()), busy_until)
        end = max(int(part["end_ns"].max()), int(part["call_ns"].max()), begin)
        if hi < len(calls):
            end = max(min(end, int(calls["call_ns"][hi])), begin)
        busy_until = end
        phase = Phase(part["phase"][0])
        if phase is not Phase.UNKNOWN:
            args = {"step": int(part["step"][0])}
            yield _span(rank, _PHASES, phase.name.lower(), begin + to_trace, end + to_trace, "phase", args)


def _calls(job: JobRecords, rank: RankRecords, base_ns: int, names: dict[int, str]) -> Iterator[Event]:
    """Return calls on the threads of their groups; fills ``names`` with the names of these threads."""
    to_trace, records = rank.to_clock_ns - base_ns, rank.records
    known = np.array([group.ends_known for group in job.groups], bool)
    calls = np.flatnonzero(records["op"] <= Op.RECEIVE)
    calls = calls[np.argsort(records["call_ns"][calls], kind="stable")]
    listed = (records[calls][list(_COLUMNS)]).tolist()  # tuples of Python numbers: ten times as fast as records
    more = (calls, rank.group[calls], unended(rank, known)[calls], bytes_in(records)[calls], bytes_out(records)[calls])
    until = rank.until_ns - rank.to_clock_ns
    lanes: dict[int, list[int]] = {}  # per group: time at which each thread is free
    for row, at, number, going, sent, got in zip(listed, *(column.tolist() for column in more), strict=True):
        begin, wait, end, seq, op, dtype, flags, phase, peer, step = row
        group = job.groups[number]
        name, open_ended = OP_NAMES[op], end == 0
        if open_ended:
            end = until if going else begin
        end = max(end, begin)
        lane = _lane(lanes.setdefault(number, []), begin, end)
        tid = _GROUPS + number * _LANES + lane
        if tid not in names:
            names[tid] = f"{group.label} ({len(group.ranks)} ranks)" + (f", overlapping {lane + 1}" if lane else "")
        args: Event = {
            "op": name, "seq": seq, "step": step, "bytes_in": sent, "bytes_out": got, "dtype": _DTYPES[dtype],
            "group": group.label, "communicator": group.name, "ranks": len(group.ranks),
        }  # fmt: skip
        if peer >= 0:
            args["peer"] = peer
        if phase in _PHASE_NAMES:
            args["phase"] = _PHASE_NAMES[phase]
        if wait and not open_ended:
            args["waited_ms"] = max(end - wait, 0) / 1e6
        if flags & _ASYNC:
            args["asynchronous"] = True
        if open_ended and going:
            name, args["end"] = f"{name} ({_GOES_ON})", _GOES_ON
        elif open_ended:
            args["end"] = "failed" if flags & _FAILED else "not noted"
        yield {**_span(rank, tid, name, begin + to_trace, end + to_trace, "call", args), "at": at}


def _lane(free_at: list[int], begin: int, end: int) -> int:
    """Return the first free thread of a group and mark it busy until ``end``."""
    lane = next((lane for lane, free in enumerate(free_at) if free <= begin), len(free_at))
    if lane == len(free_at) and lane < _LANES:
        free_at.append(end)
    lane = min(lane, _LANES - 1)
    free_at[lane] = max(free_at[lane], end)
    return lane


def _flows(job: JobRecords, rank: RankRecords, flows: Ints, base_ns: int, spans: list[Event]) -> list[Event]:
    """Return this rank's side of the arrows from the begin of a send to the end of its receive."""
    to_tid = {event["at"]: event for event in spans if "at" in event}
    found = []
    for rank_column, record_column, phase in ((0, 1, "s"), (2, 3, "f")):
        for flow in np.flatnonzero(flows[:, rank_column] == rank.number).tolist():
            span = to_tid[int(flows[flow, record_column])]
            sender = job.ranks[int(flows[flow, 0])]
            begun = int(sender.records["call_ns"][int(flows[flow, 1])]) + sender.to_clock_ns - base_ns
            ts = span["ts"] if phase == "s" else max(span["ts"], span["ts"] + span["dur"] - 0.125, _us(begun))
            event: Event = {"ph": phase, "name": "transfer", "cat": "transfer", "id": flow, "pid": _pid(rank.number)}
            event.update({"tid": span["tid"], "ts": ts})
            if phase == "f":
                event["bp"] = "e"  # bind to the enclosing event, not to the next one
            found.append(event)
    return found
