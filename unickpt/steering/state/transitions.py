"""Transitions of a job's membership: ``transition(state, event)`` returns the next state. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from unickpt.base.failure_kinds import Remedy
from unickpt.steering.state.admission import growth
from unickpt.steering.state.membership import (
    NEVER_S,
    Admit,
    Arrived,
    Close,
    Committed,
    Ending,
    Event,
    GivenOrder,
    Host,
    JobPhase,
    Joined,
    Leaving,
    Left,
    Lost,
    Measured,
    Membership,
    Opened,
    Ordered,
    Park,
    Parking,
    Paused,
    Reached,
    Ready,
    Restart,
    Round,
    Tick,
    TookOver,
    WorkerFailed,
    WorkersEnded,
    available,
    fruitful,
    holds_name,
    last_ranks_of,
    natural,
    rank_in_round,
)
from unickpt.steering.state.quorum import quorum
from unickpt.steering.state.scores import described, failure

FOUNDING_S = 1.0  # before the first round of several hosts, a leader of the same job that has moved can object to a new one
START_CHECK_S, SEVERAL = 5.0, 2  # that a first round waits for measurements, if asked to; hosts that make a median
CHECK_S = 10.0  # that a round waits for the self-check of a host of the last one, rather than grow soon
ORDERS = 16  # that the state remembers
STILLBORN, FAULTS = 3, 16  # rounds in a row with one fault before a first step that end the job; faults that are remembered
_Value = TypeVar("_Value")


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
        return _parked(state, event, now_s)
    if isinstance(event, Admit):
        return _let_in(state, [event.name])
    if isinstance(event, Restart):
        runs = state.round is not None and state.round.epoch == event.epoch and state.phase is JobPhase.RUNNING
        return _gather(_judged(state, now_s), Ending.RESTART, event.reason, now_s) if runs else state
    if isinstance(event, Close):
        return state if state.closed else replace(state, closed=event.reason)
    if isinstance(event, Ordered):
        return _ordered(state, event)
    if isinstance(event, Reached):
        runs = state.round is not None and state.round.epoch == event.epoch and state.phase is JobPhase.RUNNING
        further = {"reached": max(state.reached, event.step), "pause_s": max(state.pause_s, event.pause_s)}
        return replace(state, **further) if runs else state  # type: ignore[arg-type]
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
    if isinstance(event, Committed):
        return _committed(state, event, now_s)
    if isinstance(event, WorkersEnded):
        of_round = state.round is not None and state.round.epoch == event.epoch
        return replace(state, ended=state.ended.union(event.ranks)) if of_round else state
    if isinstance(event, WorkerFailed):
        return _worker_failed(state, event, now_s)
    if isinstance(event, Measured):
        return _measured(state, event, now_s)
    if isinstance(event, Leaving):
        return _leaving(state, event, now_s)
    if isinstance(event, Left):
        return _left(state, event)
    if isinstance(event, Lost):
        return _proven(_gone(state, [event.name]), event)
    return state


def _parked(state: Membership, event: Park, now_s: float) -> Membership:
    evictions = state.evictions
    if event.for_s < NEVER_S and event.name not in state.parked:
        evictions = {**evictions, event.name: evictions.get(event.name, 0) + 1}
    parking = Parking(event.reason, now_s, now_s + event.for_s)
    return replace(state, parked={**state.parked, event.name: parking}, evictions=evictions)


def _ordered(state: Membership, event: Ordered) -> Membership:
    if any(order.identifier == event.identifier for order in state.orders):
        return state
    number = state.orders[-1].number + 1 if state.orders else 1
    epoch = state.round.epoch if state.round is not None else (0, 0)
    given = GivenOrder(number, event.identifier, epoch, event.ranks, event.text, event.action, event.cause)
    return replace(state, orders=(*state.orders, given)[-ORDERS:])


def _judged(state: Membership, now_s: float) -> Membership:
    """Count a round that ends because of a fault of the program."""
    return replace(state, fruitless=0 if fruitful(state, now_s) else state.fruitless + 1)


def _is_hopeless(state: Membership) -> bool:
    """Whether workers that fail end the job. Without timing no step is known, so torchrun's own limit of restarts counts."""
    known = max(state.reached, state.furthest) > 0
    return known and state.limits.retries is not None and state.fruitless > 0 and state.fruitless >= state.limits.retries


def _hopeless(state: Membership, name: str) -> str:
    step = max(state.reached, state.furthest)
    return (
        f"{state.fruitless} rounds in a row have failed without progress: the workers of {name} have ended again, and the job "
        f"has not passed step {step}. See the error of the workers, and 'retries' in the options of steering"
    )


def _worker_failed(state: Membership, event: WorkerFailed, now_s: float) -> Membership:
    """Do what helps: end the job, take the host out, or count the failures before a first step."""
    runs = state.round is not None and state.round.epoch == event.epoch
    if not runs or state.closed or state.limits.retries is None:
        return state
    if event.remedy == Remedy.STOP.value:
        said = (
            f"a restart meets the same error: on {event.name}: {event.text}. Its whole error is in the log of {event.name}. "
            "Mend it, and start the job again"
        )
        return replace(state, closed=said)
    if event.remedy == Remedy.EVICT.value:
        left = 0 if event.name in state.parked else sum(name not in state.parked for name in state.hosts if name != event.name)
        for_s = state.limits.out_for_s(state.evictions.get(event.name, 0))
        return _parked(state, Park(event.name, event.text, for_s), now_s) if state.limits.size(left) else state
    return _cannot_start(state, event)


def _cannot_start(state: Membership, event: WorkerFailed) -> Membership:
    """Count a fault of the program before its first step. A restart does not help against the same one again and again."""
    round_, retries = state.round, state.limits.retries
    made = state.reached > 0 or state.commits > 0
    if round_ is None or round_.epoch != event.epoch or made or state.closed or retries is None:
        return state
    count, last = state.stillborn.get(event.signature, (0, 0))
    number = round_.epoch[1]
    if last == number:
        return state
    count = count + 1 if last == number - 1 else 1
    recent = {fault: seen for fault, seen in state.stillborn.items() if seen[1] >= number - 1}
    stillborn = dict([*recent.items(), (event.signature, (count, number))][-FAULTS:])
    state = replace(state, stillborn=stillborn)
    if count < min(STILLBORN, retries + 1):
        return state
    said = (
        f"the program cannot start: {count} rounds in a row have ended with the same error before a first step, on "
        f"{event.name}: {event.text}. Its whole error is in the log of {event.name}. Mend the program, and start the job again"
    )
    return replace(state, closed=said)


def _joined(state: Membership, event: Joined, now_s: float) -> Membership:
    if event.name in state.hosts and not holds_name(state, event.name, event.incarnation):
        return state
    heard = {**state.heard, event.name: now_s}
    if event.name in state.hosts:
        host = replace(state.hosts[event.name], address=event.address, workers=event.workers)
        return replace(state, hosts={**state.hosts, event.name: host}, heard=heard)
    hosts = {**state.hosts, event.name: Host(event.name, event.incarnation, event.address, workers=event.workers)}
    left = event.name in state.losses or event.name in state.evictions
    returns = left and state.round is not None and rank_in_round(state, event.name, event.incarnation) < 0
    state = replace(state, hosts=hosts, heard=heard)
    return _suspected(state, [event.name]) if returns else state


def _arrived(state: Membership, event: Arrived, now_s: float) -> Membership:
    host = state.hosts[event.name]
    rank = rank_in_round(state, event.name, event.incarnation)
    if rank >= 0 and state.round is not None:
        if event.after != state.round.epoch:
            return state  # sent before it heard that it is a member
        if state.phase is JobPhase.RUNNING:
            state = _judged(state, now_s)
            if not state.closed and _is_hopeless(state):
                state = replace(state, closed=_hopeless(state, event.name))
        state = _gather(state, Ending.WORKERS, f"the workers of {event.name} have ended", now_s)
        host = state.hosts[event.name]
    if host.arrived_s is not None:
        return state
    return replace(state, hosts={**state.hosts, event.name: replace(host, arrived_s=now_s)})


def _connected(state: Membership, event: Opened | Ready) -> Membership:
    round_ = state.round
    if round_ is None or round_.epoch != event.epoch or state.phase is not JobPhase.OPENING:
        return state
    rank = round_.rank(event.name, event.incarnation)
    if isinstance(event, Opened):
        if rank != 0 or round_.store:
            return state
        round_ = replace(round_, store=event.store, master=event.master, hub=event.hub)
    elif rank < 0 or not round_.store:
        return state
    round_ = replace(round_, ready=round_.ready | {event.name})
    if len(round_.ready) < len(round_.members):
        return replace(state, round=round_)
    running = {name for name, _ in round_.members}
    hosts = {name: replace(host, arrived_s=None) if name in running else host for name, host in state.hosts.items()}
    return replace(state, round=round_, phase=JobPhase.RUNNING, hosts=hosts, electorate=round_.members)


def _committed(state: Membership, event: Committed, now_s: float) -> Membership:
    round_ = state.round
    runs = round_ is not None and round_.epoch == event.epoch and state.phase is JobPhase.RUNNING
    if not runs or event.count <= state.commits:
        return state
    return replace(state, commits=event.count, committed_s=now_s if event.count else state.committed_s)


def _suspected(state: Membership, names: Iterable[str]) -> Membership:
    """Let hosts measure themselves before they are admitted."""
    for name in names if state.limits.self_check else ():
        state = replace(state, suspects={**state.suspects, name: state.checks + 1}, checks=state.checks + 1)
    return state


def _let_in(state: Membership, names: Iterable[str]) -> Membership:
    """End the parking of hosts. Those that were out for a fault check themselves; the others were parked by a person."""
    out = {name: state.parked[name] for name in names if name in state.parked}
    faulty = [name for name, parking in out.items() if parking.until_s < NEVER_S and name in state.hosts]
    return _suspected(replace(state, parked=_without(state.parked, out)), faulty)


def _measured(state: Membership, event: Measured, now_s: float) -> Membership:
    name, score = event.name, event.score
    suspected = state.suspects.get(name, 0)
    if event.check != suspected:
        return state
    if not suspected:
        return _started(state, event, now_s)
    others = [each for other, each in state.scores.items() if other != name]
    why = failure(score, others, state.limits.check_share)
    state = replace(state, suspects=_without(state.suspects, [name]))
    usable = [each for each in state.hosts if each != name and each not in state.parked and each not in state.suspects]
    needed = not score.wrong and not state.limits.size(len(usable))
    if why and not needed:
        text = f"SELF_CHECK: {why}"
        for_s = state.limits.out_for_s(state.evictions.get(name, 0))
        state = _ordered(state, Ordered(f"self-check {suspected}", f"park {name} for {for_s:.0f} s: {text}"))
        return _parked(state, Park(name, text, for_s), now_s)
    result = f"has failed its self-check ({why}), and is needed" if why else "has passed its self-check"
    measured = described(score) or "nothing could be measured"
    state = _ordered(state, Ordered(f"self-check {suspected}", f"admit {name}, which {result}: {measured}"))
    return state if why else replace(state, scores={**state.scores, name: score})


def _started(state: Membership, event: Measured, now_s: float) -> Membership:
    """Compare the first measurement of a host. Its speed counts only if it is confirmed, and beside several others."""
    name, score, limits = event.name, event.score, state.limits
    others = [each for other, each in state.scores.items() if other != name]
    slow = failure(score, others, limits.check_share) if event.confirmed and len(others) >= SEVERAL else ""
    why, identifier = score.wrong or slow, f"start-check {name} {event.incarnation}"
    if not why:
        known = name in state.scores and not event.confirmed
        return state if known else replace(state, scores={**state.scores, name: score})
    if limits.start_check == "off" or any(order.identifier == identifier for order in state.orders):
        return state
    left = sum(each != name and each not in state.parked and each not in state.suspects for each in state.hosts)
    works = state.phase is JobPhase.RUNNING and rank_in_round(state, name, event.incarnation) >= 0
    late = works and (state.reached > 0 or state.commits > 0)  # a fault of a host that trains has verdicts
    state, text = replace(state, scores=_without(state.scores, [name])), f"START_CHECK: {why}"
    if limits.start_check == "refuse" and limits.size(left) and not late:
        for_s = limits.out_for_s(state.evictions.get(name, 0))
        state = _ordered(state, Ordered(identifier, f"park {name} for {for_s:.0f} s: {text}"))
        return _parked(state, Park(name, text, for_s), now_s)
    stays = "it works already" if late else "it is needed" if limits.start_check == "refuse" else "see start_check"
    return _ordered(state, Ordered(identifier, f"keep {name}, {stays}: {text}"))


def _leaving(state: Membership, event: Leaving, now_s: float) -> Membership:
    """End the round. The next one waits until this host has left: it has not arrived, and does not ask for a round again."""
    member = rank_in_round(state, event.name, event.incarnation) >= 0
    hosts = {**state.hosts, event.name: replace(state.hosts[event.name], arrived_s=None)}
    if not member or state.closed:
        return replace(state, hosts=hosts)
    return _gather(replace(state, hosts=hosts), Ending.LEAVING, f"{event.name} is told to end ({event.signal})", now_s)


def _left(state: Membership, event: Left) -> Membership:
    member = rank_in_round(state, event.name, event.incarnation) >= 0
    if event.finished and member and state.phase is JobPhase.RUNNING:
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
    ended = state.ended.union(*(last_ranks_of(state, name) for name in gone))
    state = replace(state, losses=losses, suspects=_without(state.suspects, gone), ended=ended)
    return replace(state, hosts=_without(state.hosts, gone), heard=_without(state.heard, gone))


def _took_over(state: Membership, event: TookOver, now_s: float) -> Membership:
    if event.term <= state.term:
        return state
    members = dict(state.electorate)
    known = {**members, **{name: host.incarnation for name, host in state.hosts.items()}}
    electorate = tuple(each for each in state.electorate if not (each[0] in event.ended and known[each[0]] == each[1]))
    state = _gone(replace(state, electorate=electorate), sorted(event.ended))
    heard, lost = dict.fromkeys(state.hosts, now_s), state.leader.rpartition(" (")[0]
    if lost in heard:
        heard[lost] = now_s - event.silent_s
    state = replace(state, leader=event.leader, term=event.term, heard=heard)
    return _gather(state, Ending.LEADER, "the leader was lost", now_s) if state.phase is JobPhase.OPENING else state


def _gather(state: Membership, ending: Ending, reason: str, now_s: float) -> Membership:
    """End the round. Members whose workers have not started stay arrived."""
    if state.round is not None and now_s - state.round.since_s >= state.limits.longest_out_s:
        state = replace(state, losses=_since_a_long_round(state, state.round))
    return replace(state, phase=JobPhase.GATHERING, gathering_s=now_s, reason=reason, ending=ending)


def _since_a_long_round(state: Membership, round_: Round) -> dict[str, int]:
    """Return how often hosts have left, without what members did before a long round: 1 for those that have left it."""
    here = {name for name, _ in round_.members}
    others = {name: count for name, count in state.losses.items() if name not in here}
    return others | {name: 1 for name in here if name in state.losses and name not in state.hosts}


def _settled(state: Membership, now_s: float) -> Membership:
    """Return the state with all that follows from it at this time."""
    silent = [name for name, heard_s in state.heard.items() if now_s - heard_s > state.limits.expiry_s]
    if silent:
        state = _gone(state, silent)
    over = [name for name, parking in state.parked.items() if parking.until_s <= now_s]
    if over:
        state = _let_in(state, over)
    if state.closed:
        return state
    if state.phase is not JobPhase.GATHERING and state.round is not None:
        ending, reason = _end_of_round(state, state.round, now_s)
        if ending is Ending.NONE:
            return state
        state = _gather(state, ending, reason, now_s)
    return _formed(state, now_s)


def _end_of_round(state: Membership, round_: Round, now_s: float) -> tuple[Ending, str]:
    """Return why the round is over; ``Ending.NONE`` if it is not."""
    goes_on = Ending.NONE, ""
    for name, incarnation in round_.members:
        if name in state.parked:
            return Ending.PARKED, f"{name} is parked: {state.parked[name].reason}"
        if not holds_name(state, name, incarnation):
            ended = state.phase is JobPhase.OPENING or (name, incarnation) not in state.electorate
            if ended or _could_go_on(state):
                return Ending.GONE, f"{name} is gone"
    if state.phase is JobPhase.OPENING:
        late = [name for name, _ in round_.members if name not in round_.ready]
        overdue = now_s - round_.since_s > state.limits.arrive_s
        return (Ending.LATE, f"{', '.join(late)} did not connect in time") if overdue else goes_on
    more = growth(state, round_, now_s)
    return (Ending.JOINED, more) if more else goes_on


def _could_go_on(state: Membership) -> bool:
    """Whether the hosts in contact could start a round, if all of them arrived."""
    return quorum(state) and state.limits.size(sum(name not in state.parked for name in state.hosts)) > 0


def _formed(state: Membership, now_s: float) -> Membership:
    """Choose the members of the next round, if it can begin."""
    limits, arrived = state.limits, available(state)
    count = limits.size(len(arrived))
    if state.round is None:
        since_s = None if not count else now_s if state.enough_s is None else state.enough_s
        if since_s != state.enough_s:
            state = replace(state, enough_s=since_s)
        if since_s is None or (len(arrived) < limits.max_nodes and now_s - since_s < limits.join_s):
            return state
        unknown = any(host.name not in state.scores for host in arrived)
        refuses = limits.self_check and limits.start_check == "refuse" and limits.max_nodes > 1
        if refuses and unknown and now_s - since_s < START_CHECK_S:
            return state
        if limits.max_nodes > 1 and now_s - state.gathering_s < min(FOUNDING_S, limits.join_s):
            return state
    stopping = [host for host in state.hosts.values() if host.arrived_s is None and host.name in state.seats]
    if not count or not quorum(state) or (stopping and now_s - state.gathering_s < limits.arrive_s):
        return state
    if now_s - state.gathering_s < CHECK_S and any(name in state.seats for name in state.suspects):
        return state
    chosen = sorted(
        arrived,
        key=lambda host: (
            host.name not in state.seats,
            state.losses.get(host.name, 0),
            limits.place(host.name),
            natural(host.name),
        ),
    )
    if len(chosen) > count:
        settled = [host for host in chosen if host.name in state.seats]
        chosen = sorted(settled, key=lambda host: state.seats[host.name]) + chosen[len(settled) :]
    seats = _seated(state, chosen[:count])
    members = tuple((name, state.hosts[name].incarnation) for name in sorted(seats, key=seats.__getitem__))
    number = state.round.epoch[1] + 1 if state.round is not None else 1
    return replace(
        state, phase=JobPhase.OPENING, round=Round((state.term, number), members, now_s), seats=seats, enough_s=None,
        furthest=state.furthest if state.round is None else max(state.furthest, state.reached), reached=0,
        commits=min(state.commits, 0), committed_s=None, ended=frozenset(),
    )  # fmt: skip


def _seated(state: Membership, chosen: Iterable[Host]) -> dict[str, int]:
    """Return the seats of the chosen hosts: their own; for newcomers the one in the given order, else the lowest vacant one."""
    names = [host.name for host in chosen]
    seats = {name: state.seats[name] for name in names if name in state.seats}
    for at, name in enumerate(state.limits.order):
        if name in names and name not in seats and at not in seats.values():
            seats[name] = at
    taken = set(seats.values())
    vacant = (seat for seat in range(len(names) + len(taken) + 1) if seat not in taken)
    newcomers = sorted((name for name in names if name not in seats), key=natural)
    return {**seats, **dict(zip(newcomers, vacant, strict=False))}


def _without(mapping: Mapping[str, _Value], names: Iterable[str]) -> dict[str, _Value]:
    out = set(names)
    return {key: value for key, value in mapping.items() if key not in out}
