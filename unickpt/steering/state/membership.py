"""Membership of a job whose hosts come and go, as values: the state, the events that change it, and questions about it.

``transitions.transition`` applies an event to a state.

One agent, the leader, applies the events. All other agents hold a copy of the state, so that one of them can take over.

A round is one start of the workers on a set of hosts. It passes through the phases of ``JobPhase``: hosts arrive, members are
chosen, rank 0's host opens stores that no earlier round has used, the members connect to them, and workers run. The round
ends when a member leaves, arrives again because its workers failed, or is parked, or when more hosts can be used.

All times are seconds on the leader's monotonic clock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from unickpt.steering.state.kinds import Ending as Ending
from unickpt.steering.state.kinds import JobPhase as JobPhase
from unickpt.steering.state.kinds import Standing as Standing
from unickpt.steering.state.limits import Limits
from unickpt.steering.state.scores import Score

NEVER_S = float("inf")
TOLD_TO_END = 143  # exit code of a program that was told to end by SIGTERM, as a shell shows it
PERSON = "PERSON"  # cause of an order that a person has given


@dataclass(frozen=True, slots=True)
class Host:
    """A host whose agent is in contact with the leader.

    Attributes:
        name: unique name; stays the same when the agent is started again.
        incarnation: identifier of this process of the agent.
        address: where the agent listens for other agents, ``host:port``.
        arrived_s: time at which the agent asked for the next round; None if it has not since the last one.
        workers: number of its workers; 0 if unknown.
    """

    name: str
    incarnation: str
    address: str
    arrived_s: float | None = None
    workers: int = 0


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
        hub: address of the diagnosis agent that collects the snapshots of the round; '' for none.
    """

    epoch: tuple[int, int]
    members: tuple[tuple[str, str], ...]
    since_s: float
    store: str = ""
    master: str = ""
    ready: frozenset[str] = frozenset()
    hub: str = ""

    def rank(self, name: str, incarnation: str) -> int:
        """Return the rank of a host; -1 if it is not a member."""
        member = (name, incarnation)
        return self.members.index(member) if member in self.members else -1


@dataclass(frozen=True, slots=True)
class GivenOrder:
    """An order that was given, for the log of every host.

    Attributes:
        number: unique number, increasing.
        identifier: of the order; an order is given once.
        epoch: round that ran at that time.
        ranks: ranks of workers at fault in this round. Their host kills them, because they may not react to SIGTERM.
        text: the order, its reason and its evidence.
        action: kind of the order; '' if it is not executed.
        cause: row of the policy that made it, or ``PERSON``.
    """

    number: int
    identifier: str
    epoch: tuple[int, int]
    ranks: tuple[int, ...]
    text: str
    action: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Membership:
    """State of a job.

    Attributes:
        limits: rules of the job.
        leader: name of the host whose agent applies the events.
        instance: random text of the first leader. Rounds of one instance have an order.
        term: number of leaders so far.
        version: increases with every change except ``heard``.
        phase: phase of the job.
        hosts: hosts in contact, by name.
        heard: time of the last sign of life of each of them.
        parked: orders that keep hosts out, by name of the host.
        seats: places of the members of the last round. They give the order of ranks: a host keeps its seat, a newcomer takes
            the lowest vacant one.
        losses: how often each host has left without having finished.
        evictions: how often each host was parked for a time.
        orders: newest orders.
        furthest: step that the job had reached in all rounds before this one; -1 before the first.
        reached: step that it has reached in this round, as far as known.
        fruitless: rounds in a row that have ended without progress. See ``fruitful``.
        stillborn: faults of the program before a first step: in how many rounds in a row, and the number of the last one.
        pause_s: longest time that ranks have waited for one another and then gone on.
        commits: checkpoints that the round has committed, as far as known; -1 while the job has not said that it saves.
        committed_s: time at which the newest of them was known; None before.
        suspects: hosts that must pass a self-check before they are admitted, with the number of the check.
        checks: number of the last self-check.
        scores: what each host has measured when it was sound.
        round: last round; None before the first.
        ended: ranks of the last round whose processes are known to have ended. Others do not wait for their part of a save.
        electorate: members of the last round that has run, without those known to have ended. See ``quorum.quorum``.
        gathering_s: time at which the current gathering began.
        enough_s: time since when enough hosts for a first round have arrived; None if there are not enough.
        reason: why the last round ended, in words.
        ending: why it ended.
        closed: why there will be no more rounds; '' while there will.
        finished: whether ``closed`` is because the program ended with success.
    """

    limits: Limits
    leader: str
    instance: str = ""
    term: int = 1
    version: int = 0
    phase: JobPhase = JobPhase.GATHERING
    hosts: Mapping[str, Host] = field(default_factory=dict)
    heard: Mapping[str, float] = field(default_factory=dict)
    parked: Mapping[str, Parking] = field(default_factory=dict)
    seats: Mapping[str, int] = field(default_factory=dict)
    losses: Mapping[str, int] = field(default_factory=dict)
    evictions: Mapping[str, int] = field(default_factory=dict)
    orders: tuple[GivenOrder, ...] = ()
    furthest: int = -1
    reached: int = 0
    fruitless: int = 0
    stillborn: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    pause_s: float = 0.0
    commits: int = -1
    committed_s: float | None = None
    suspects: Mapping[str, int] = field(default_factory=dict)
    checks: int = 0
    scores: Mapping[str, Score] = field(default_factory=dict)
    round: Round | None = None
    ended: frozenset[int] = frozenset()
    electorate: tuple[tuple[str, str], ...] = ()
    gathering_s: float = 0.0
    enough_s: float | None = None
    reason: str = ""
    ending: Ending = Ending.NONE
    closed: str = ""
    finished: bool = False


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Joined:
    """An agent has made contact. Ignored while another process has the name (``holds_name``)."""

    name: str
    incarnation: str
    address: str
    workers: int = 0


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
    hub: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """A member is connected to the store of a round."""

    name: str
    incarnation: str
    epoch: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Committed:
    """The workers of a round save, and have committed ``count`` checkpoints so far."""

    name: str
    incarnation: str
    epoch: tuple[int, int]
    count: int


@dataclass(frozen=True, slots=True)
class WorkersEnded:
    """Processes of workers of a round have ended, for any reason. ``ranks`` are their ranks in the job."""

    name: str
    incarnation: str
    epoch: tuple[int, int]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker of a round has ended by itself: before its first step, or by an exception against which no restart helps.

    Attributes:
        signature: the same for the same fault.
        text: rank and error.
        remedy: what helps, a value of ``failure_kinds.Remedy``.
    """

    name: str
    incarnation: str
    epoch: tuple[int, int]
    signature: str
    text: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Measured:
    """A host has measured itself. ``check`` is the number of the self-check, 0 for the first measurement of a process.

    ``confirmed``: beside the others, the first one is not good enough, and repeats were not, either.
    """

    name: str
    incarnation: str
    check: int
    score: Score
    confirmed: bool = False


@dataclass(frozen=True, slots=True)
class Leaving:
    """An agent is told to end, and its workers have time to save. The others stop theirs, so that they can save together."""

    name: str
    incarnation: str
    signal: str


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
class Ordered:
    """An order is given, with its evidence. Other events execute it. See ``GivenOrder``."""

    identifier: str
    text: str
    ranks: tuple[int, ...] = ()
    action: str = ""
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Reached:
    """The job has reached a step in a round, and has recovered from a pause."""

    epoch: tuple[int, int]
    step: int
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Paused:
    """The leader itself did not run for a while, so that silence in that time proves nothing."""


@dataclass(frozen=True, slots=True)
class TookOver:
    """A new leader begins.

    Attributes:
        leader, term: of the new one.
        ended: hosts whose agents are proven to have ended.
        silent_s: time for which the new leader has not heard the lost one. It counts towards ``expiry_s``.
    """

    leader: str
    term: int
    ended: frozenset[str] = frozenset()
    silent_s: float = 0.0


Event = (
    Joined | Heard | Arrived | Opened | Ready | Committed | WorkersEnded | WorkerFailed | Measured | Leaving | Left | Lost
    | Park | Admit | Restart | Close | Ordered | Reached | Tick | Paused | TookOver
)  # fmt: skip


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
    if state.round is None or state.phase is JobPhase.GATHERING:
        return -1
    return state.round.rank(name, incarnation)


def available(state: Membership) -> list[Host]:
    """Return the hosts that ask for a round and may take part in it."""
    out = {*state.parked, *state.suspects}
    return [host for host in state.hosts.values() if host.arrived_s is not None and host.name not in out]


def ranks_of(state: Membership, name: str) -> range:
    """Return the ranks of the workers of a host in the round that is being opened or runs; empty if they are unknown."""
    return range(0) if state.phase is JobPhase.GATHERING else last_ranks_of(state, name)


def last_ranks_of(state: Membership, name: str) -> range:
    """Return the ranks of the workers of a host in the last round, which may be over; empty if they are unknown.

    torchrun numbers the workers of rank 0's host first, then those of rank 1's host, and so on.
    """
    first = 0
    for member, incarnation in state.round.members if state.round is not None else ():
        host = state.hosts.get(member)
        if host is None or host.incarnation != incarnation or not host.workers:
            break
        if member == name:
            return range(first, first + host.workers)
        first += host.workers
    return range(0)


def must_stop(state: Membership, epoch: tuple[int, int]) -> bool:
    """Return whether the workers of a round must be stopped because the round is over.

    A program that ended with success on one host may still be ending on others, so it is not stopped.
    """
    if state.finished or state.round is None:
        return False
    if state.closed:
        return True
    return state.round.epoch != epoch or state.phase is not JobPhase.RUNNING


def exit_code(state: Membership, epoch: tuple[int, int], *, told: bool) -> int:
    """Return the exit code of an agent that comes to a closed job.

    Args:
        state: the job.
        epoch: last round of the agent.
        told: whether its workers were told to end, and have ended by themselves.
    """
    if told:
        return TOLD_TO_END
    return 0 if state.finished and (state.round is None or epoch != state.round.epoch) else 1


def leaves_no_boundary(state: Membership, orders: Iterable[GivenOrder]) -> str:
    """Return why the workers of a round that is over cannot save together at a step boundary; '' if they can.

    They can if all of them work: a host is told to end, is parked by a person, or more hosts join.
    """
    blamed = next((order.text for order in orders if order.ranks), "")
    sound = state.ending in (Ending.LEAVING, Ending.JOINED, Ending.PARKED)
    return blamed or state.closed or ("" if sound else state.reason)


def fruitful(state: Membership, now_s: float) -> bool:
    """Return whether the last round has brought the job further than it was before.

    The step is unknown without timing, and the counter of a program may begin again in every process. A long round is therefore
    progress, too.
    """
    lasted_s = 0.0 if state.round is None else now_s - state.round.since_s
    return state.reached > state.furthest or lasted_s >= state.limits.fruitful_s


def standing(state: Membership, name: str) -> Standing:
    """Return what a host does."""
    host = state.hosts.get(name)
    if name in state.parked:
        return Standing.PARKED
    if host is None:
        return Standing.GONE
    if rank_in_round(state, name, host.incarnation) >= 0:
        return Standing.RUNNING if state.phase is JobPhase.RUNNING else Standing.ARRIVED
    if host.arrived_s is None:
        return Standing.STOPPING
    return Standing.SPARE if state.phase is not JobPhase.GATHERING else Standing.ARRIVED


def successors(state: Membership) -> list[str]:
    """Return the hosts that may take over, the first one first: members by rank, then the others by name."""
    members = [name for name, incarnation in state.round.members if holds_name(state, name, incarnation)] if state.round else []
    return [*members, *sorted((name for name in state.hosts if name not in members), key=natural)]
