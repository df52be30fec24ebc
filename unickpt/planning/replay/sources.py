"""Traces of a job from the ring files of its hosts, or from its agent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from unickpt.base.errors import FormatError
from unickpt.diagnosis.agent.launch import ADDRESS, read_address
from unickpt.diagnosis.agent.server import fetch
from unickpt.diagnosis.recording.records import Flag, Op, Records
from unickpt.diagnosis.reports.host_folders import read_hosts
from unickpt.diagnosis.reports.job_records import JobRecords, RankRecords, coordinates, gather_records
from unickpt.diagnosis.snapshot.snapshot import Calls, Snapshot, calls_of
from unickpt.diagnosis.snapshot.steps import StepRows, steps_of
from unickpt.planning.replay.graph import ROOTED
from unickpt.planning.replay.trace import CALL, MARK, PAUSE, CallTable, Trace, TraceGroup

_PAUSES = (int(Op.DATA), int(Op.GARBAGE), int(Op.CHECKPOINT))


def read_trace(places: Sequence[str]) -> Trace:
    """Read a job from folders with its ring files, one per host, or from the agent at an address.

    Args:
        places: folders; or one address ``http://...`` or the file ``DIR/agent`` with it.

    Raises:
        NotACheckpointError: a folder has no ring files.
        FormatError: no agent answers, or it has too few calls of each rank.
    """
    place = places[0]
    if "://" not in place and Path(place).name == ADDRESS and Path(place).is_file():
        place = read_address(Path(place).parent)
    if "://" in place:
        try:
            return trace_of_snapshot(fetch(place))
        except OSError as err:
            raise FormatError(f"{place}: no agent answers there ({err}); pass the folders with the ring files") from err
    hosts = read_hosts([Path(each) for each in places])
    return trace_of_records(gather_records(hosts.jobs, hosts.clock_offsets_ns), clock_error_ns=hosts.clock_error_ns)


def trace_of_records(job: JobRecords, *, clock_error_ns: int = 0) -> Trace:
    """Return the trace of a job's records."""
    calls, marks, pauses = [np.zeros(0, CALL)], [np.zeros(0, MARK)], [np.zeros(0, PAUSE)]
    for at, rank in enumerate(job.ranks.values()):
        calls.append(_calls(at, rank))
        marks.append(_marks(at, steps_of(rank.number, rank.records, offset_ns=rank.to_clock_ns)))
        pauses.append(_pauses(at, rank))
    return Trace(
        np.array(list(job.ranks), np.int64), tuple(rank.ring.identity.host for rank in job.ranks.values()),
        tuple(coordinates(rank.ring) for rank in job.ranks.values()),
        [TraceGroup(group.label, tuple(group.ranks.tolist())) for group in job.groups],
        _with_ends(np.concatenate(calls)), np.concatenate(marks), np.concatenate(pauses), clock_error_ns,
    )  # fmt: skip


def trace_of_snapshot(snapshot: Snapshot) -> Trace:
    """Return the trace of an agent's snapshot. It has the newest calls of each rank only, no roots, and no pauses.

    Raises:
        FormatError: the snapshot has no whole step of some rank.
    """
    ranks = np.array(sorted(snapshot.ranks), np.int64)
    calls = _of_snapshot(snapshot.calls)
    calls["rank"], calls["root"] = np.searchsorted(ranks, snapshot.calls["rank"]), -1
    oldest = np.full(len(ranks), np.int64(1) << 62)
    np.minimum.at(oldest, calls["rank"], calls["call_ns"])
    at = np.searchsorted(ranks, snapshot.steps["rank"])
    known = snapshot.steps["begin_ns"] >= oldest[at]
    if len(np.unique(at[known])) < len(ranks):
        raise FormatError("the agent knows only the newest calls of each rank, less than a step; pass the folders of the rings")
    marks = _marks(0, snapshot.steps[known])
    marks["rank"] = at[known]
    return Trace(
        ranks, tuple(snapshot.ranks[rank].host for rank in ranks.tolist()),
        tuple(dict(snapshot.ranks[rank].coordinates) for rank in ranks.tolist()),
        [TraceGroup(group.label, tuple(group.members().tolist())) for group in snapshot.groups],
        _with_ends(calls), marks, np.zeros(0, PAUSE),
    )  # fmt: skip


def _calls(at: int, rank: RankRecords) -> CallTable:
    chosen = rank.records["op"] <= Op.RECEIVE
    records = rank.records[chosen]
    out = _of_snapshot(calls_of(rank.number, records, rank.group[chosen], rank.to_clock_ns))
    out["rank"], out["root"] = at, np.where(np.isin(records["op"], ROOTED), records["peer"], -1)
    return out


def _of_snapshot(calls: Calls) -> CallTable:
    """Return the calls without places of ranks, and without roots."""
    out = np.zeros(len(calls), CALL)
    for name in ("comm", "source", "destination", "op", "seq", "bytes", "call_ns", "wait_ns", "end_ns"):
        out[name] = calls[name]
    return out


def _marks(at: int, steps: StepRows) -> CallTable:
    out = np.zeros(len(steps), MARK)
    out["rank"] = at
    for name in ("number", "begin_ns", "end_ns"):
        out[name] = steps[name]
    return out


def _pauses(at: int, rank: RankRecords) -> CallTable:
    """Return waits for data, garbage collections and phases of checkpoints that training waited for."""
    records: Records = rank.records[rank.records["op"] >= Op.GARBAGE]
    waited = (records["flags"] & int(Flag.ASYNC)) == 0
    records = records[waited & (records["end_ns"] > 0)]
    out = np.zeros(len(records), PAUSE)
    out["rank"] = at
    out["op"] = np.where(np.isin(records["op"], _PAUSES), records["op"], int(Op.CHECKPOINT))
    out["begin_ns"], out["end_ns"] = records["call_ns"] + rank.to_clock_ns, records["end_ns"] + rank.to_clock_ns
    return out


def _with_ends(calls: CallTable) -> CallTable:
    """Return the calls.

    Raises:
        FormatError: no end of any call is known.
    """
    if len(calls) and not (calls["end_ns"] > 0).any():
        raise FormatError("the records have no ends of calls: on a device they need the option timing.device")
    return calls
