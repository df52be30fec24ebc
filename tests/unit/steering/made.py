"""Handmade states of jobs."""

from __future__ import annotations

from unickpt.steering.state.limits import Limits
from unickpt.steering.state.membership import Arrived, JobPhase, Joined, Membership, Opened, Ready
from unickpt.steering.state.transitions import transition


def running(count: int = 4, low: int = 2, spares: int = 0) -> Membership:
    """Return a job whose round runs on hosts h0, h1, ..., with spares s0, s1, ..."""
    state = Membership(Limits(low, count), "h0", gathering_s=-60.0)
    names = [*(f"h{i}" for i in range(count)), *(f"s{i}" for i in range(spares))]
    for name in names:
        state = transition(state, Joined(name, "1", f"{name}:1"), 0.0)
        state = transition(state, Arrived(name, "1"), 0.0)
    epoch = (1, 1)
    state = transition(state, Opened("h0", "1", epoch, "s:1", "m:1"), 0.0)
    for name in names[1:count]:
        state = transition(state, Ready(name, "1", epoch), 0.0)
    assert state.phase is JobPhase.RUNNING
    return state
