"""A job at one moment, as tables for a terminal: verdicts, hosts, who waits for whom, ranks. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unickpt.base.memory_status import MemoryStatus
from unickpt.base.witness_notes import WitnessNote
from unickpt.diagnosis.detectors.verdicts import Verdict
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.recording.records import Phase
from unickpt.diagnosis.reports.hardware_text import timed_text
from unickpt.diagnosis.reports.verdict_line import RankList
from unickpt.diagnosis.reports.verdict_text import VerdictText, pending, render_waits
from unickpt.diagnosis.reports.wording import clock_time
from unickpt.diagnosis.snapshot.snapshot import RankSnapshot, Snapshot

MOST_ROWS = 24  # of ranks that have a row
MOST_NOTES = 4  # of the witness
_NEWEST = 8  # steps of each rank from which the speed comes
_USUAL = (State.RUNNING, State.SLEEPING)


@dataclass(frozen=True, slots=True)
class TopView:
    """What is shown.

    Attributes:
        head: one line on the job.
        verdicts: lines on what is wrong; empty if nothing is.
        hosts: rows of host, ranks, steps, states, and what its hardware has told.
        waits: lines on calls in which ranks wait, and on ranks that have not begun.
        ranks: rows of rank, host, step, phase, state and last call, of ranks that are not as the others.
        folded: line on the ranks that have no row; '' if all have.
        memory: line on checkpoints in memory; '' without any.
    """

    head: str
    verdicts: tuple[str, ...]
    hosts: tuple[tuple[object, ...], ...]
    waits: tuple[str, ...]
    ranks: tuple[tuple[object, ...], ...]
    folded: str
    memory: str


def top_view(
    snapshot: Snapshot, verdicts: Sequence[Verdict], texts: Sequence[VerdictText], memory: MemoryStatus | None = None,
    notes: Sequence[WitnessNote] = (),
) -> TopView:  # fmt: skip
    """Return what is shown of a job. ``notes``: of its witness, the newest last."""
    witness = [line for each in notes[-MOST_NOTES:] for line in (f"witness: {each.text}", f"next: {each.next}")]
    hosts = defaultdict(list)
    for rank, one in sorted(snapshot.ranks.items()):
        hosts[one.host].append((rank, one))
    told = {rank for verdict in verdicts for rank in verdict.ranks}
    told |= {rank for call in pending(snapshot) for rank in call.missing}
    shown = [rank for rank, one in sorted(snapshot.ranks.items()) if rank in told or one.state not in _USUAL or one.failed]
    shown = shown[:MOST_ROWS]
    left = [one for rank, one in snapshot.ranks.items() if rank not in shown]
    return TopView(
        _head(snapshot, len(hosts)),
        (*witness, *(line for text in texts for line in (text.sentence, *([f"next: {text.next}"] if text.next else [])))),
        tuple(_host(host, ranks, snapshot) for host, ranks in hosts.items()),
        tuple(render_waits(snapshot)),
        tuple(_rank(rank, snapshot.ranks[rank]) for rank in shown),
        f"{_many(len(left), 'rank')} as usual, in step {_range([one.step for one in left])}" if left else "",
        _memory(memory),
    )


def _head(snapshot: Snapshot, hosts: int) -> str:
    steps = snapshot.steps
    newest = steps[steps["number"] + _NEWEST > steps["number"].max(initial=0)] if len(steps) else steps
    length_s = float(np.median(newest["end_ns"] - newest["begin_ns"])) / 1e9 if len(newest) else 0.0
    speed = f", {1 / length_s:.2f} steps per second" if length_s > 0 else ""
    step = _range([one.step for one in snapshot.ranks.values()])
    return f"{_many(len(snapshot.ranks), 'rank')} on {_many(hosts, 'host')}, step {step}{speed}, {clock_time(snapshot.now_ns)}"


def _host(host: str, ranks: Sequence[tuple[int, RankSnapshot]], snapshot: Snapshot) -> tuple[object, ...]:
    states: dict[str, int] = defaultdict(int)
    for _, one in ranks:
        states[one.state.value] += 1
    hardware = snapshot.hardware.get(host)
    return (
        host, str(RankList.of([rank for rank, _ in ranks])), _range([one.step for _, one in ranks]),
        ", ".join(f"{count} {state}" for state, count in sorted(states.items())),
        timed_text(hardware.events[-1]) if hardware is not None and hardware.events else "",
    )  # fmt: skip


def _rank(rank: int, one: RankSnapshot) -> tuple[object, ...]:
    phase = Phase(one.phase).name.lower() if one.phase in set(Phase) else ""
    last = f"{one.last.op.name.lower()} #{one.last.seq} of {one.last.label}" if one.last is not None else ""
    return rank, one.host, one.step, phase, one.state.value, last


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _range(steps: Sequence[int]) -> str:
    if not steps:
        return "-"
    return str(min(steps)) if min(steps) == max(steps) else f"{min(steps)} to {max(steps)}"


def _memory(status: MemoryStatus | None) -> str:
    if status is None or not status.generation:
        return ""
    return f"checkpoints in memory: step {status.step}, confirmed after {status.confirm_s:.1f} s; {status.failed} have failed"
