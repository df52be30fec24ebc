"""Waits that are no verdict yet, for a person who asks: the calls in which ranks wait, and the ranks that are missing there."""

from __future__ import annotations

from unickpt.diagnosis.detectors.waits import calls_waited_in
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.reports.wording import MOST_NAMED, call_text, counted
from unickpt.diagnosis.snapshot.snapshot import Snapshot

SHORTEST_S = 2.0  # shorter waits are usual


def render_waits(snapshot: Snapshot) -> list[str]:
    """Return a line for each call in which ranks have waited for some seconds, and one on ranks that have not begun."""
    groups = dict(enumerate(snapshot.groups))
    members = {number: group.members() for number, group in groups.items()}
    gone = frozenset(rank for rank, one in snapshot.ranks.items() if one.state is State.DEAD)
    lines = []
    for call in calls_waited_in(snapshot.rows, members, gone):
        waited_s = (snapshot.now_ns - call.since_ns) / 1e9
        if waited_s >= SHORTEST_S:
            missing = f" for {counted(call.missing)}" if call.missing else ""
            lines.append(f"{counted(call.waiters, 'wait')} in {call_text(call.ref(groups))}{missing}, so far {waited_s:.0f} s")
    for rank, absent in sorted(snapshot.absent.items()):
        process = f"process {absent.pid} on {absent.host} is {absent.state.value}" if absent.pid else f"on {absent.host}"
        lines.append(f"rank {rank} has not begun to record; {process}")
    return lines[:MOST_NAMED]
