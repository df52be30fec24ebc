"""From the rings of a job to verdicts, and from verdicts to what a person reads."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from unickpt.diagnosis.deadlines import deadline_s
from unickpt.diagnosis.hangs import hangs
from unickpt.diagnosis.steps import STEP, steps_of
from unickpt.diagnosis.stragglers import stragglers
from unickpt.diagnosis.summaries import SUMMARY, memberships, numbered, summary
from unickpt.diagnosis.verdicts import Syndrome, Verdict
from unickpt.timing.folder import Job
from unickpt.timing.processes import State
from unickpt.timing.ranks import members
from unickpt.timing.records import Op, Phase
from unickpt.timing.ring import Snapshot


@dataclass(frozen=True, slots=True)
class Examination:
    """Attributes: verdicts, a line for a person to each, and the seconds that a call was allowed to take."""

    verdicts: list[Verdict]
    lines: list[str]
    deadline_s: float


def examine(job: Job, *, after_s: float | None = None, slow: bool = True) -> Examination:
    """What is wrong with a job at the moment that it was read.

    Args:
        job: the rings of its ranks, and their processes.
        after_s: how long a call may take; by what the job's own calls and steps have taken, if not given.
        slow: look for ranks that drag, too, where nothing hangs.
    """
    own = [steps_of(rank, ring.records, offset_ns=_to_wall_clock(ring)) for rank, ring in job.ranks.items()]
    steps = np.concatenate([np.zeros(0, STEP), *own])
    limit_s = deadline_s(steps, [_longest_wait(ring) for ring in job.ranks.values()]) if after_s is None else after_s
    verdicts = _hangs(job, limit_s) or (stragglers(steps) if slow else [])
    return Examination(verdicts, [told(verdict, job) for verdict in verdicts], limit_s)


def _longest_wait(ring: Snapshot) -> float:
    records = ring.records
    over = records[(records["op"] <= Op.RECEIVE) & (records["end_ns"] > 0) & (records["wait_ns"] > 0)]
    return float((over["end_ns"] - over["wait_ns"]).max(initial=0))


def _hangs(job: Job, limit_s: float) -> list[Verdict]:
    known: dict[str, int] = {}
    tables = {rank: _spelled_out(snapshot) for rank, snapshot in job.ranks.items()}
    rows = [
        summary(rank, ring.records, numbered([e["name"] for e in tables[rank]], known), offset_ns=_to_wall_clock(ring))
        for rank, ring in job.ranks.items()
    ]
    names = {number: _name(name, tables) for name, number in known.items()}
    gone = frozenset(rank for rank, state in job.states.items() if state is State.DEAD)
    if len(gone) == len(job.ranks):  # after the end of the job: that all are dead tells nothing
        gone = frozenset()
    everything = np.concatenate([np.zeros(0, SUMMARY), *rows])
    found = hangs(everything, memberships(tables, known), names, before_ns=job.now_ns - int(limit_s * 1e9), gone=gone)
    # a rank whose ring is on another host may be in any call: of it nothing can be told here
    return [verdict for verdict in found if all(rank in job.ranks for rank in verdict.ranks)]


def _spelled_out(ring: Snapshot) -> list[dict[str, Any]]:
    return [
        {**entry, "name": str(entry.get("name", f"?{at}")), "ranks": members(entry.get("ranks", []))}
        for at, entry in enumerate(ring.communicators)
    ]


def _to_wall_clock(ring: Snapshot) -> int:
    return ring.identity.wall_ns - ring.identity.monotonic_ns


def _name(name: str, tables: Mapping[int, list[dict[str, Any]]]) -> str:
    for table in tables.values():
        for entry in table:
            if entry["name"] == name:
                ranks = entry["ranks"]
                of = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 2 else f"ranks {', '.join(map(str, ranks))}"
                return f"the {entry.get('label') or name} group of {of}"
    return name


def told(verdict: Verdict, job: Job) -> str:
    """One line for the log."""
    since = datetime.datetime.fromtimestamp(verdict.since_ns / 1e9).strftime("%H:%M:%S")
    waiting = f"{verdict.victims} rank{'s' if verdict.victims != 1 else ''} wait{'s' if verdict.victims == 1 else ''}"
    first = verdict.evidence[0] if verdict.evidence else ""
    if verdict.syndrome is Syndrome.NON_COMMUNICATION_SLOW:
        return f"{first} since {since}; {_doing(verdict.ranks[0], job)}"
    if verdict.syndrome is Syndrome.NON_COMMUNICATION_HANG:
        rank = verdict.ranks[0]
        return f"{first} since {since}, {waiting} in all; {_doing(rank, job)}"
    return f"{verdict.syndrome.value}: {first} since {since}, {waiting}" + "".join(f"; {more}" for more in verdict.evidence[1:])


def _doing(rank: int, job: Job) -> str:
    """What the rank itself is seen to do."""
    ring, state = job.ranks.get(rank), job.states.get(rank, State.UNKNOWN)
    if ring is None:
        return f"nothing is known of rank {rank}: it has no ring on this host"
    who = f"process {ring.identity.pid} on {ring.identity.host} is {state.value}"
    calls = ring.records[ring.records["op"] <= Op.RECEIVE]
    done = calls[calls["end_ns"] > 0]
    if not len(done):
        return f"{who}; no call of it has ended"
    last = done[np.argmax(done["end_ns"])]
    table = ring.communicators
    label = table[last["comm"]].get("label", "") if last["comm"] < len(table) else ""
    ago = (job.now_ns - int(last["end_ns"]) - _to_wall_clock(ring)) / 1e9
    return (
        f"{who}, in step {ring.step} ({Phase(ring.phase).name.lower()}); last ended: {Op(last['op']).name.lower()} "
        f"#{last['seq']} of its {label} group, {ago:.1f} s ago"
    )
