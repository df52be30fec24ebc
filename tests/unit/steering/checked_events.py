"""Events that are applied to a membership one by one, and what must hold after each of them."""

from __future__ import annotations

from dataclasses import replace

from unickpt.steering.state.limits import Limits
from unickpt.steering.state.membership import (
    Arrived,
    Event,
    Heard,
    JobPhase,
    Joined,
    Membership,
    Opened,
    Paused,
    Ready,
    Tick,
    holds_name,
    rank_in_round,
)
from unickpt.steering.state.transitions import transition

AT_ONCE = {
    "join_s": 0.0, "settle_s": 0.0, "arrive_s": 20.0, "expiry_s": 10.0, "boundary_s": 5.0, "out_s": 2.0, "longest_out_s": 8.0,
    "self_check": False,
}  # fmt: skip


def checked(before: Membership, event: Event, now_s: float) -> Membership:
    """Apply an event and check what must hold after every event."""
    after = transition(before, event, now_s)
    assert (after.term, after.version) >= (before.term, before.version)
    assert transition(after, Tick(), now_s) is after, "a state is settled"
    if not isinstance(event, Paused | Heard):
        assert replace(transition(after, event, now_s), version=after.version) == after, "a repeated event changes nothing"
    assert set(after.heard) == set(after.hosts)
    round_ = after.round
    if round_ is None:
        assert after.phase is JobPhase.GATHERING
        return after
    names = [name for name, _ in round_.members]
    assert len(set(names)) == len(names), "no host twice"
    assert after.limits.size(len(names)) == len(names), "the size is allowed"
    assert [rank_in_round(after, *member) for member in round_.members] == (
        [-1] * len(names) if after.phase is JobPhase.GATHERING else list(range(len(names)))
    )
    assert (after.phase is JobPhase.RUNNING) <= (round_.ready == set(names) and bool(round_.store))
    assert before.round is None or before.round.epoch <= round_.epoch
    if before.round is None or before.round.epoch != round_.epoch:
        assert not before.closed, "a closed job has no new round"
        assert not set(names) & set(after.parked)
        assert after.phase is JobPhase.OPENING
        assert all(holds_name(after, *member) for member in round_.members)
        old = [name for name in sorted(before.seats, key=before.seats.__getitem__) if name in names]
        assert [name for name in names if name in old] == old, "a host keeps its place"
    return after


def run(state: Membership, *events: Event, now_s: float = 0.0) -> Membership:
    for event in events:
        state = checked(state, event, now_s)
    return state


def arrive(state: Membership, *names: str, now_s: float = 0.0) -> Membership:
    after = state.round.epoch if state.round else (0, 0)
    for name in names:
        host = state.hosts.get(name)
        state = run(state, Joined(name, host.incarnation if host else "1", f"{name}:1"), now_s=now_s)
        state = run(state, Arrived(name, state.hosts[name].incarnation, after), now_s=now_s)
    return state


def connect(state: Membership, now_s: float = 0.0) -> Membership:
    """Let all members of an opened round connect."""
    assert state.phase is JobPhase.OPENING
    assert state.round is not None
    epoch, members = state.round.epoch, state.round.members
    state = run(state, Opened(*members[0], epoch, "store:1", "master:2"), now_s=now_s)
    state = run(state, *(Ready(name, incarnation, epoch) for name, incarnation in members[1:]), now_s=now_s)
    assert state.phase is JobPhase.RUNNING
    return state


def started(count: int, low: int, high: int, **limits: object) -> Membership:
    """Return a job whose first round runs on hosts h1, h2, ..."""
    first = {**AT_ONCE, "join_s": 30.0, "order": limits.get("order", ())}
    state = Membership(Limits(low, high, **first), "h1", gathering_s=-30.0)  # type: ignore[arg-type]
    state = connect(arrive(state, *(f"h{i}" for i in range(1, count + 1))))
    return replace(state, limits=Limits(low, high, **{**AT_ONCE, **limits}))  # type: ignore[arg-type]


def members(state: Membership) -> list[str]:
    assert state.round is not None
    return [name for name, _ in state.round.members]
