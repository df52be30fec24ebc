"""Who waits for whom, and who in the end waits for nobody.

A rank waits in a call. A collective waits for the members that have not entered it; a receive for its sender, a send for
its receiver. Followed to the end, that leads to

- ranks that others wait for and that wait in no call: they are stuck elsewhere, in a computation, a loop, a stopped or dead
  process (C4's non-communication hang; "the culprit logs nothing": MegaScale, arXiv 2402.15627, section 4.2);
- a call that all members have entered and that does not end: the network, or a member's side of it (communication hang);
- ranks that wait for each other: groups that are entered in different orders, or a call that was left out (deadlock).

Before that, members that are in one and the same call with another operation, type or shape are out of step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from unickpt.diagnosis.mismatches import mismatches
from unickpt.diagnosis.summaries import Summaries
from unickpt.diagnosis.verdicts import Syndrome, Verdict, counted
from unickpt.diagnosis.waiting import Call, Members, calls_waited_in

FOLLOWED = 32  # verdicts whose victims are counted to the end; of others only those that wait at once


def hangs(
    rows: Summaries, members: Members, names: Mapping[int, str], *, before_ns: int, gone: frozenset[int] = frozenset(),
    passed: Summaries | None = None,
) -> list[Verdict]:  # fmt: skip
    """Verdicts on calls that were entered before a deadline and have not ended; the one with most victims first.

    Args:
        rows: of all ranks that are known; one without rows has entered nothing.
        members: of every communicator, by its number in the job.
        names: of the communicators, as ``Group.told`` makes them: those of one kind begin alike, up to " group of ".
        before_ns: calls whose last waiter came later than this are not told of.
        gone: ranks whose process has ended.
        passed: rows of calls that others wait in and these ranks have got through: with another shape, that is possible.
    """
    all_rows = rows if passed is None else np.concatenate([rows, passed])
    out_of_step = [verdict for verdict in mismatches(all_rows, names) if verdict.since_ns < before_ns]
    if out_of_step:  # what else hangs, hangs for it
        return sorted(out_of_step, key=lambda verdict: -verdict.victims)
    calls = calls_waited_in(rows, members, gone)
    waits = {rank for call in calls for rank in call.waiters}  # for somebody else, and be it since a moment ago
    calls = [call for call in calls if call.since_ns < before_ns]
    found = _stuck(calls, waits, names) + _in_the_network(calls, names) or _deadlocks(calls, names, rows)
    return sorted(found, key=lambda verdict: -verdict.victims)


def _stuck(calls: list[Call], waits: set[int], names: Mapping[int, str]) -> list[Verdict]:
    """Ranks that others wait for and that wait in no call themselves."""
    waited_for: dict[int, list[Call]] = defaultdict(list)
    for call in sorted(calls, key=lambda call: call.since_ns):
        for rank in call.missing:
            if rank not in waits:
                waited_for[rank].append(call)
    found = []
    victims = _victims(list(waited_for.values()), calls)
    for (rank, held_up), count in zip(waited_for.items(), victims, strict=True):
        told = tuple(f"rank {rank} has not entered {call.named(names)}; {len(call.waiters)} wait there" for call in held_up[:4])
        first = held_up[0]
        found.append(
            Verdict(
                Syndrome.NON_COMMUNICATION_HANG, (rank,), first.since_ns, names.get(first.comm, ""), first.seq, first.pair,
                victims=count, evidence=told,
            )
        )  # fmt: skip
    return found


def _in_the_network(calls: list[Call], names: Mapping[int, str]) -> list[Verdict]:
    """Calls that everybody has entered and that do not end."""
    entered = {(call.comm, call.seq, call.pair): call for call in reversed(calls) if not call.missing}
    found = []
    for call, count in zip(entered.values(), _victims([[call] for call in entered.values()], calls), strict=True):
        ranks = tuple(sorted(set(call.pair))) if call.pair is not None else call.waiters
        told = f"all have entered {call.named(names)}, and it does not end on {counted(call.waiters)}"
        found.append(
            Verdict(
                Syndrome.COMMUNICATION_HANG, ranks, call.since_ns, names.get(call.comm, ""), call.seq, call.pair,
                victims=count, confidence=1.0 if call.pair is not None else 0.8, evidence=(told,),
            )
        )  # fmt: skip
    return found


def _victims(roots: Sequence[Sequence[Call]], calls: list[Call]) -> list[int]:
    """How many ranks wait in some calls, or for a rank that does; for each of many sets of calls."""
    waiting_for: dict[int, list[int]] = defaultdict(list)
    for at, call in enumerate(calls):
        for rank in call.missing:
            waiting_for[rank].append(at)
    places = {id(call): at for at, call in enumerate(calls)}
    found = []
    for number, root in enumerate(roots):
        todo = [places[id(call)] for call in root]
        seen, victims = set(todo), {rank for call in root for rank in call.waiters}
        while todo and number < FOLLOWED:
            for rank in calls[todo.pop()].waiters:
                victims.add(rank)
                behind = [at for at in waiting_for.get(rank, ()) if at not in seen]
                seen.update(behind)
                todo += behind
        found.append(len(victims))
    return found


def _deadlocks(calls: list[Call], names: Mapping[int, str], rows: Summaries) -> list[Verdict]:
    """Ranks that wait in a call for others that wait for them in other calls; and if there are none, a larger circle.

    If they are fewer than those others, they have left out a call or entered it in another order. If both are as many, it is
    told by whoever else waits with one of them: if those have made one call more of the other kind, it was left out; if not,
    they are right who are more.
    """
    waits_in = {rank: at for at, call in enumerate(calls) for rank in call.waiters}
    held_by: list[dict[int, list[int]]] = [{} for _ in calls]  # call -> other call -> missing here, for they wait there
    for at, call in enumerate(calls):
        for rank in call.missing:
            if rank in waits_in:
                held_by[at].setdefault(waits_in[rank], []).append(rank)
    fewer: list[tuple[int, set[int], list[int]]] = []  # call, ranks in it that others wait for, these others' calls
    equal: list[tuple[int, set[int], list[int]]] = []
    for at, others in enumerate(held_by):
        opposed = [other for other in others if at in held_by[other]]
        here = {rank for other in opposed for rank in held_by[other][at]}
        there = sum(len(others[other]) for other in opposed)
        if here and len(here) <= there:
            (fewer if len(here) < there else equal).append((at, here, opposed))
    sides = fewer or equal
    if not sides:
        return _circles(calls, held_by, names)
    odd = {rank for _, here, _ in sides for rank in here}
    if not fewer:
        odd = (
            _not_like_others(calls, [(at, other) for at, _, opposed in equal for other in opposed], held_by, names, rows) or odd
        )
    told = [
        f"{counted(sorted(here), 'wait')} in {calls[at].named(names)} for {counted(held_by[at][other])}; the other way round: "
        f"{calls[other].named(names)}"
        for at, here, opposed in sides[:4]
        for other in opposed[:2]
    ]
    since = max(calls[each].since_ns for at, _, opposed in sides for each in (at, *opposed))
    victims = len(waits_in) - len(odd)
    return [Verdict(Syndrome.DEADLOCK, tuple(sorted(odd)), since, victims=victims, evidence=tuple(told[:4]))]


def _not_like_others(
    calls: Sequence[Call], opposed: Sequence[tuple[int, int]], held_by: Sequence[Mapping[int, list[int]]],
    names: Mapping[int, str], rows: Summaries,
) -> set[int]:  # fmt: skip
    """Of two calls that wait for each other's ranks, those ranks that have left one out; empty if as many wait in both.

    Args:
        calls: all of them.
        opposed: pairs of calls.
        held_by: call -> other call -> ranks that it waits for and that wait there.
        names: of the communicators.
        rows: of all ranks.
    """
    found: set[int] = set()
    for at, other in opposed:
        here, there = calls[at], calls[other]
        if len(here.waiters) >= len(there.waiters):
            continue
        asked = held_by[at][other]  # they wait in the larger one, and are missing in the smaller one
        made = _calls_like(here, names, rows, [rank for rank in there.waiters if rank not in asked])
        counts = _calls_like(here, names, rows, asked)
        like, one_more = set(made.values()), {count - 1 for count in made.values()}
        left_out = counts and not like & set(counts.values()) and one_more & set(counts.values())
        found.update(asked if left_out else held_by[other][at])
    return found


def _calls_like(call: Call, names: Mapping[int, str], rows: Summaries, ranks: Sequence[int]) -> dict[int, int]:
    """How many calls of the kind of one some ranks have made, on the side that is missing there: rank -> number."""
    kind = names.get(call.comm, "").partition(" group of ")[0]
    comms = [comm for comm, name in names.items() if name.partition(" group of ")[0] == kind]
    part = rows[np.isin(rows["rank"], ranks) & np.isin(rows["comm"], comms)]
    if call.pair is None:
        part = part[part["source"] < 0]
    else:
        sends = call.missing[0] == call.pair[0] if call.missing else True
        part = part[part["source" if sends else "destination"] == part["rank"]]
    return {rank: int(part["entered"][part["rank"] == rank].sum()) for rank in np.unique(part["rank"]).tolist()}


def _circles(calls: list[Call], held_by: Sequence[Mapping[int, list[int]]], names: Mapping[int, str]) -> list[Verdict]:
    """Everyone waits for another one. Where many wait for few, these have left out a call."""
    circle = _circle(held_by)
    if not circle:
        return []
    after = dict(zip(circle, [*circle[1:], circle[0]], strict=True))
    alone = [at for at in circle if len(calls[at].missing) < len(calls[at].waiters)]
    least = min((len(calls[at].missing) for at in alone), default=0)
    sure = [at for at in alone if len(calls[at].missing) == least] or circle
    ranks = {rank for at in sure for rank in held_by[at][after[at]]}
    told = [
        f"{counted(calls[at].waiters, 'wait')} in {calls[at].named(names)} for {counted(held_by[at][after[at]])}"
        for at in circle[:8]
    ]
    since = max(calls[at].since_ns for at in circle)
    victims = sum(len(call.waiters) for call in calls) - len(ranks)
    return [Verdict(Syndrome.DEADLOCK, tuple(sorted(ranks)), since, victims=victims, evidence=tuple(told))]


def _circle(held_by: Sequence[Mapping[int, list[int]]]) -> list[int]:
    """Calls of which each waits for ranks that are in the next one; of the circles through those of one, the shortest."""
    ended: set[int] = set()  # leads to no circle
    for start in range(len(held_by)):
        path: dict[int, None] = {}
        at: int | None = start
        while at is not None and at not in path and at not in ended:
            path[at] = None
            at = next(iter(held_by[at]), None)
        if at is not None and at in path:
            found = list(path)[list(path).index(at) :]
            for each in tuple(found):
                found = _way_back(held_by, each, len(found) - 1) or found
            return found
        ended.update(path)
    return []


def _way_back(held_by: Sequence[Mapping[int, list[int]]], start: int, longest: int) -> list[int]:
    """The shortest circle through a call; empty, if there is none of at most so many calls."""
    came: dict[int, int] = {}
    layer = [start]
    for _ in range(longest):
        farther = []
        for at in layer:
            for other in held_by[at]:
                if other == start:
                    path = [at]
                    while path[-1] != start:
                        path.append(came[path[-1]])
                    return path[::-1]
                if other not in came:
                    came[other] = at
                    farther.append(other)
        layer = farther
    return []
