"""Membership of a job whose hosts come and go, as a pure state machine: ``transition(state, event)`` returns the next state.

One agent, the leader, applies the events. All other agents hold a copy of the state, so that one of them can take over.

A round is one start of the workers on a set of hosts. It passes through the phases of ``Phase``: hosts arrive, members are
chosen, rank 0's host opens stores that no earlier round has used, the members connect to them, and workers run. The round
ends when a member leaves, arrives again because its workers failed, or is parked, or when more hosts can be used.

All times are seconds on the leader's monotonic clock.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

NEVER_S = float("inf")
FOUNDING_S = 1.0  # before the first round of several hosts, a leader of the same job that has moved can object to a new one
_Value = TypeVar("_Value")


class Phase(enum.Enum):
    """Phase of the job."""

    GATHERING = "gathering"  # hosts arrive; no workers run, or those of the last round are being stopped
    OPENING = "opening"  # members are chosen and connect to the stores of the round
    RUNNING = "running"  # workers run


class Standing(enum.Enum):
    """What a host does."""

    RUNNING = "running"
    STOPPING = "stopping"  # the agent has not arrived yet: it stops the workers of the last round
    ARRIVED = "arrived"
    SPARE = "spare"
    PARKED = "parked"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Limits:
    """Rules of a job, equal on all hosts.

    Attributes:
        min_nodes, max_nodes: bounds of the number of hosts of a round.
        sizes: numbers of hosts that are allowed, for instance because the batch must be divisible; empty for all.
        join_s: time that the first round waits for more hosts when ``min_nodes`` hosts have arrived.
        arrive_s: time that a round waits for hosts of the previous round that have not stopped their workers, and for members
            that have not connected to its stores.
        expiry_s: time without a sign of life after which a host is out.
        settle_s: time that a running round waits for more hosts before it grows.
        grow: whether a running round grows when hosts arrive.
        lone: whether exactly half of the hosts, or fewer, may go on without a proof that the others have ended. See ``quorum``.
    """

    min_nodes: int
    max_nodes: int
    sizes: frozenset[int] = frozenset()
    join_s: float = 30.0
    arrive_s: float = 60.0
    expiry_s: float = 15.0
    settle_s: float = 1.0
    grow: bool = True
    lone: bool = False

    def size(self, available: int) -> int:
        """Return the number of hosts of a round when ``available`` hosts are there; 0 if they are not enough."""
        for count in range(min(available, self.max_nodes), self.min_nodes - 1, -1):
            if not self.sizes or count in self.sizes:
                return count
        return 0


@dataclass(frozen=True, slots=True)
class Host:
    """A host whose agent is in contact with the leader.

    Attributes:
        name: unique name; stays the same when the agent is started again.
        incarnation: identifier of this process of the agent.
        address: where the agent listens for other agents, ``host:port``.
        arrived_s: time at which the agent asked for the next round; None if it has not since the last one.
    """

    name: str
    incarnation: str
    address: str
    arrived_s: float | None = None


@dataclass(frozen=True, slots=True)
class Parking:
    """An order that keeps a host out. It survives the host's restart.

    Attributes:
        reason: why.
        since_s: time of the order.
        until_s: time at which it ends; ``NEVER_S``: until the host is admitted by an order.
    """

    reason: str
    since_s: float
    until_s: float = NEVER_S


@dataclass(frozen=True, slots=True)
class Round:
    """One start of the workers.

    Attributes:
        epoch: term of the leader and number of the round. No two rounds of a job have the same, and later ones are greater.
        members: name and incarnation of each host. The position is the host's rank.
        since_s: time at which the members were chosen.
        store: address of the agents' store, ``host:port``; '' until rank 0's host has opened it.
        master: address of the store that worker 0 will open.
        ready: names of members that are connected to the store.
    """

    epoch: tuple[int, int]
    members: tuple[tuple[str, str], ...]
    since_s: float
    store: str = ""
    master: str = ""
    ready: frozenset[str] = frozenset()

    def rank(self, name: str, incarnation: str) -> int:
        """Return the rank of a host; -1 if it is not a member."""
        member = (name, incarnation)
        return self.members.index(member) if member in self.members else -1


@dataclass(frozen=True, slots=True)
class Membership:
    """State of a job.

    Attributes:
        limits: rules of the job.
        leader: name of the host whose agent applies the events.
        term: number of leaders so far.
        version: increases with every change except ``heard``.
        phase: phase of the job.
        hosts: hosts in contact, by name.
        heard: time of the last sign of life of each of them.
        parked: orders that keep hosts out, by name of the host.
        seats: places of the members of the last round. They give the order of ranks: a host keeps its seat, a newcomer takes
            the lowest vacant one.
        losses: how often each host has left without having finished.
        round: last round; None before the first.
        electorate: members of the last round that has run, without those known to have ended. See ``quorum``.
        gathering_s: time at which the current gathering began.
        enough_s: time since when enough hosts for a first round have arrived; None if there are not enough.
        reason: why the last round ended.
        closed: why there will be no more rounds; '' while there will.
        finished: whether ``closed`` is because the program ended with success.
    """

    limits: Limits
    leader: str
    term: int = 1
    version: int = 0
    phase: Phase = Phase.GATHERING
    hosts: Mapping[str, Host] = field(default_factory=dict)
    heard: Mapping[str, float] = field(default_factory=dict)
    parked: Mapping[str, Parking] = field(default_factory=dict)
    seats: Mapping[str, int] = field(default_factory=dict)
    losses: Mapping[str, int] = field(default_factory=dict)
    round: Round | None = None
    electorate: tuple[tuple[str, str], ...] = ()
    gathering_s: float = 0.0
    enough_s: float | None = None
    reason: str = ""
    closed: str = ""
    finished: bool = False


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Joined:
    """An agent has made contact. Ignored while another process has the name: ``holds_name`` tells."""

    name: str
    incarnation: str
    address: str


@dataclass(frozen=True, slots=True)
class Heard:
    """A sign of life."""

    name: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Arrived:
    """An agent has no workers and asks for the next round. ``after`` is the epoch of its last round, (0, 0) for none."""

    name: str
    incarnation: str
    after: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Opened:
    """Rank 0's host has opened the stores of a round."""

    name: str
    incarnation: str
    epoch: tuple[int, int]
    store: str
    master: str


@dataclass(frozen=True, slots=True)
class Ready:
    """A member is connected to the store of a round."""

    name: str
    incarnation: str
    epoch: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Left:
    """An agent ends. ``finished``: its workers ended with success. ``failed``: it has no restarts left."""

    name: str
    incarnation: str
    finished: bool = False
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Lost:
    """An agent's process has ended without a word, which is proven: its machine refuses connections to its address."""

    name: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Park:
    """Take a host out, for ``for_s`` seconds."""

    name: str
    reason: str
    for_s: float = NEVER_S


@dataclass(frozen=True, slots=True)
class Admit:
    """Let a parked host in again."""

    name: str


@dataclass(frozen=True, slots=True)
class Restart:
    """End the round. ``epoch`` is the round that is meant: a later one is not touched."""

    epoch: tuple[int, int]
    reason: str


@dataclass(frozen=True, slots=True)
class Close:
    """End the job on all hosts."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Paused:
    """The leader itself did not run for a while, so that silence in that time proves nothing."""


@dataclass(frozen=True, slots=True)
class TookOver:
    """A new leader begins. ``ended``: hosts whose agents are proven to have ended."""

    leader: str
    term: int
    ended: frozenset[str] = frozenset()


Event = Joined | Heard | Arrived | Opened | Ready | Left | Lost | Park | Admit | Restart | Close | Tick | Paused | TookOver


# ---------------------------------------------------------------- questions about a state


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key by which ``node2`` stands before ``node10``."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"([0-9]+)", name) if part)


def holds_name(state: Membership, name: str, incarnation: str) -> bool:
    """Return whether this process is the one that the job knows by the name."""
    host = state.hosts.get(name)
    return host is not None and host.incarnation == incarnation


def rank_in_round(state: Membership, name: str, incarnation: str) -> int:
    """Return the rank of a host in the round that is being opened or runs; -1 if it is not a member."""
    if state.round is None or state.phase is Phase.GATHERING:
        return -1
    return state.round.rank(name, incarnation)


def must_stop(state: Membership, epoch: tuple[int, int]) -> bool:
    """Return whether the workers of a round must be stopped because the round is over.

    A program that ended with success on one host may still be ending on others, so it is not stopped.
    """
    if state.finished or state.round is None:
        return False
    if state.closed:
        return True
    return state.round.epoch != epoch or state.phase is not Phase.RUNNING


def quorum(state: Membership) -> bool:
    """Return whether the hosts in contact may start a round without risk that others do so as well.

    After a network failure, two groups of hosts may each believe that the other is gone. Only one may go on, because both
    would write the same checkpoints. It is the group with more than half of the last round's members. Members that are known
    to have ended do not count. Of two halves, the one with the lowest rank goes on. ``Limits.lone`` disables the rule.
    """
    present = frozenset(name for name, incarnation in state.electorate if holds_name(state, name, incarnation))
    return state.limits.lone or not state.electorate or _majority([name for name, _ in state.electorate], present)


def may_lead(state: Membership, granted: frozenset[str], ended: frozenset[str]) -> bool:
    """Return whether a host may take over from a lost leader. The rule is that of ``quorum``.

    Args:
        state: newest copy of the state among the hosts that agree.
        granted: hosts that agree, and the one that asks.
        ended: hosts whose agents are proven to have ended.
    """
    asked = [name for name, _ in state.electorate] or sorted(state.hosts, key=natural)
    left = [name for name in asked if name not in ended]
    return state.limits.lone or not left or _majority(left, granted)


def _majority(names: Sequence[str], present: frozenset[str]) -> bool:
    count = sum(name in present for name in names)
    return 2 * count > len(names) or (2 * count == len(names) and names[0] in present)


def standing(state: Membership, name: str) -> Standing:
    """Return what a host does."""
    host = state.hosts.get(name)
    if name in state.parked:
        return Standing.PARKED
    if host is None:
        return Standing.GONE
    if rank_in_round(state, name, host.incarnation) >= 0:
        return Standing.RUNNING if state.phase is Phase.RUNNING else Standing.ARRIVED
    if host.arrived_s is None:
        return Standing.STOPPING
    return Standing.SPARE if state.phase is not Phase.GATHERING else Standing.ARRIVED


def successors(state: Membership) -> list[str]:
    """Return the hosts that may take over, the first one first: members by rank, then the others by name."""
    members = [name for name, incarnation in state.round.members if holds_name(state, name, incarnation)] if state.round else []
    return [*members, *sorted((name for name in state.hosts if name not in members), key=natural)]


# ---------------------------------------------------------------- transitions


def transition(state: Membership, event: Event, now_s: float) -> Membership:
    """Apply an event.

    Events of processes that do not hold their name, and of rounds that are over, change nothing, so a lost message can be
    sent again, and a message that arrives twice or late does no harm.

    Args:
        state: current state.
        event: what happened.
        now_s: time on the leader's monotonic clock.

    Returns:
        The next state; the same object if nothing changes.
    """
    after = _settled(_applied(state, event, now_s), now_s)
    if after is state or replace(after, heard=state.heard) == state:
        return after
    return replace(after, version=state.version + 1)


def _applied(state: Membership, event: Event, now_s: float) -> Membership:
    if isinstance(event, Joined):
        return _joined(state, event, now_s)
    if isinstance(event, TookOver):
        return _took_over(state, event, now_s)
    if isinstance(event, Park):
        until_s = now_s + event.for_s
        return replace(state, parked={**state.parked, event.name: Parking(event.reason, now_s, until_s)})
    if isinstance(event, Admit):
        return replace(state, parked=_without(state.parked, [event.name]))
    if isinstance(event, Restart):
        runs = state.round is not None and state.round.epoch == event.epoch and state.phase is Phase.RUNNING
        return _gather(state, event.reason, now_s) if runs else state
    if isinstance(event, Close):
        return state if state.closed else replace(state, closed=event.reason)
    if isinstance(event, Tick):
        return state
    if isinstance(event, Paused):
        return replace(state, heard=dict.fromkeys(state.hosts, now_s))
    if not holds_name(state, event.name, event.incarnation):
        return _proven(state, event)
    state = replace(state, heard={**state.heard, event.name: now_s})
    if isinstance(event, Arrived):
        return _arrived(state, event, now_s)
    if isinstance(event, Opened | Ready):
        return _connected(state, event)
    if isinstance(event, Left):
        return _left(state, event)
    if isinstance(event, Lost):
        return _proven(_gone(state, [event.name]), event)
    return state


def _joined(state: Membership, event: Joined, now_s: float) -> Membership:
    if event.name in state.hosts and not holds_name(state, event.name, event.incarnation):
        return state
    heard = {**state.heard, event.name: now_s}
    if event.name in state.hosts:
        host = replace(state.hosts[event.name], address=event.address)
        return replace(state, hosts={**state.hosts, event.name: host}, heard=heard)
    hosts = {**state.hosts, event.name: Host(event.name, event.incarnation, event.address)}
    return replace(state, hosts=hosts, heard=heard)


def _arrived(state: Membership, event: Arrived, now_s: float) -> Membership:
    host = state.hosts[event.name]
    rank = rank_in_round(state, event.name, event.incarnation)
    if rank >= 0 and state.round is not None:
        if event.after != state.round.epoch:
            return state  # sent before it heard that it is a member
        state = _gather(state, f"the workers of {event.name} have ended", now_s)
        host = state.hosts[event.name]
    if host.arrived_s is not None:
        return state
    return replace(state, hosts={**state.hosts, event.name: replace(host, arrived_s=now_s)})


def _connected(state: Membership, event: Opened | Ready) -> Membership:
    round_ = state.round
    if round_ is None or round_.epoch != event.epoch or state.phase is not Phase.OPENING:
        return state
    rank = round_.rank(event.name, event.incarnation)
    if isinstance(event, Opened):
        if rank != 0 or round_.store:
            return state
        round_ = replace(round_, store=event.store, master=event.master)
    elif rank < 0 or not round_.store:
        return state
    round_ = replace(round_, ready=round_.ready | {event.name})
    if len(round_.ready) < len(round_.members):
        return replace(state, round=round_)
    running = {name for name, _ in round_.members}
    hosts = {name: replace(host, arrived_s=None) if name in running else host for name, host in state.hosts.items()}
    return replace(state, round=round_, phase=Phase.RUNNING, hosts=hosts, electorate=round_.members)


def _left(state: Membership, event: Left) -> Membership:
    member = rank_in_round(state, event.name, event.incarnation) >= 0
    if event.finished and member and state.phase is Phase.RUNNING:
        state, hosts = _proven(state, event), _without(state.hosts, [event.name])
        closed = state.closed or f"the program has finished on {event.name}"
        return replace(state, hosts=hosts, heard=_without(state.heard, [event.name]), closed=closed, finished=True)
    state = _proven(_gone(state, [event.name]), event)
    usable = [name for name in state.hosts if name not in state.parked]
    why = f"{event.name} gave up ({event.failed})" if event.failed else f"the program has finished on {event.name}"
    if (event.failed or event.finished) and not state.closed and not state.limits.size(len(usable)):
        return replace(state, closed=f"{why}; {len(usable)} hosts are left, and {state.limits.min_nodes} are needed")
    return state


def _proven(state: Membership, event: Event) -> Membership:
    """Remove a process that is known to have ended from the electorate, also when it is out already."""
    if not isinstance(event, Lost | Left) or (event.name, event.incarnation) not in state.electorate:
        return state
    return replace(state, electorate=tuple(each for each in state.electorate if each != (event.name, event.incarnation)))


def _gone(state: Membership, names: Iterable[str]) -> Membership:
    """Remove hosts that did not finish. Their round ends in ``_settled``."""
    gone = [name for name in names if name in state.hosts]
    losses = {**state.losses, **{name: state.losses.get(name, 0) + 1 for name in gone}}
    return replace(state, hosts=_without(state.hosts, gone), heard=_without(state.heard, gone), losses=losses)


def _took_over(state: Membership, event: TookOver, now_s: float) -> Membership:
    if event.term <= state.term:
        return state
    members = dict(state.electorate)
    known = {**members, **{name: host.incarnation for name, host in state.hosts.items()}}
    electorate = tuple(each for each in state.electorate if not (each[0] in event.ended and known[each[0]] == each[1]))
    state = _gone(replace(state, electorate=electorate), sorted(event.ended))
    state = replace(state, leader=event.leader, term=event.term, heard=dict.fromkeys(state.hosts, now_s))
    return _gather(state, "the leader was lost", now_s) if state.phase is Phase.OPENING else state


def _gather(state: Membership, reason: str, now_s: float) -> Membership:
    """End the round. Members whose workers have not started stay arrived."""
    return replace(state, phase=Phase.GATHERING, gathering_s=now_s, reason=reason)


def _settled(state: Membership, now_s: float) -> Membership:
    """Return the state with all that follows from it at this time."""
    silent = [name for name, heard_s in state.heard.items() if now_s - heard_s > state.limits.expiry_s]
    if silent:
        state = _gone(state, silent)
    over = [name for name, parking in state.parked.items() if parking.until_s <= now_s]
    if over:
        state = replace(state, parked=_without(state.parked, over))
    if state.closed:
        return state
    if state.phase is not Phase.GATHERING and state.round is not None:
        reason = _end_of_round(state, state.round, now_s)
        if not reason:
            return state
        state = _gather(state, reason, now_s)
    return _formed(state, now_s)


def _end_of_round(state: Membership, round_: Round, now_s: float) -> str:
    """Return why the round is over; '' if it is not."""
    for name, incarnation in round_.members:
        if name in state.parked:
            return f"{name} is parked: {state.parked[name].reason}"
        if not holds_name(state, name, incarnation):
            ended = state.phase is Phase.OPENING or (name, incarnation) not in state.electorate
            if ended or _could_go_on(state):
                return f"{name} is gone"
    if state.phase is Phase.OPENING:
        late = [name for name, _ in round_.members if name not in round_.ready]
        return f"{', '.join(late)} did not connect in time" if now_s - round_.since_s > state.limits.arrive_s else ""
    waiting = [host for host in _available(state) if round_.rank(host.name, host.incarnation) < 0]
    if not (waiting and state.limits.grow):
        return ""
    settled = all(host.arrived_s is None or now_s - host.arrived_s >= state.limits.settle_s for host in waiting)
    more = state.limits.size(len(round_.members) + len(waiting)) > len(round_.members)
    return f"{', '.join(host.name for host in waiting)} can be used" if settled and more else ""


def _could_go_on(state: Membership) -> bool:
    """Whether the hosts in contact could start a round, if all of them arrived."""
    return quorum(state) and state.limits.size(sum(name not in state.parked for name in state.hosts)) > 0


def _available(state: Membership) -> list[Host]:
    return [host for host in state.hosts.values() if host.arrived_s is not None and host.name not in state.parked]


def _formed(state: Membership, now_s: float) -> Membership:
    """Choose the members of the next round, if it can begin."""
    limits, available = state.limits, _available(state)
    count = limits.size(len(available))
    if state.round is None:
        since_s = None if not count else now_s if state.enough_s is None else state.enough_s
        if since_s != state.enough_s:
            state = replace(state, enough_s=since_s)
        if since_s is None or (len(available) < limits.max_nodes and now_s - since_s < limits.join_s):
            return state
        if limits.max_nodes > 1 and now_s - state.gathering_s < min(FOUNDING_S, limits.join_s):
            return state
    stopping = [host for host in state.hosts.values() if host.arrived_s is None and host.name in state.seats]
    if not count or not quorum(state) or (stopping and now_s - state.gathering_s < limits.arrive_s):
        return state
    chosen = sorted(
        available, key=lambda host: (host.name not in state.seats, state.losses.get(host.name, 0), natural(host.name))
    )
    if len(chosen) > count:
        settled = [host for host in chosen if host.name in state.seats]
        chosen = sorted(settled, key=lambda host: state.seats[host.name]) + chosen[len(settled) :]
    seats = _seated(state, chosen[:count])
    members = tuple((name, state.hosts[name].incarnation) for name in sorted(seats, key=seats.__getitem__))
    number = state.round.epoch[1] + 1 if state.round is not None else 1
    return replace(
        state, phase=Phase.OPENING, round=Round((state.term, number), members, now_s), seats=seats, enough_s=None,
    )  # fmt: skip


def _seated(state: Membership, chosen: Iterable[Host]) -> dict[str, int]:
    """Return the seats of the chosen hosts: their own, and for newcomers the lowest that are vacant."""
    names = [host.name for host in chosen]
    seats = {name: state.seats[name] for name in names if name in state.seats}
    taken = set(seats.values())
    vacant = (seat for seat in range(len(names) + len(taken) + 1) if seat not in taken)
    newcomers = sorted((name for name in names if name not in seats), key=natural)
    return {**seats, **dict(zip(newcomers, vacant, strict=False))}


def _without(mapping: Mapping[str, _Value], names: Iterable[str]) -> dict[str, _Value]:
    out = set(names)
    return {key: value for key, value in mapping.items() if key not in out}
