"""Find the ranks that a hanging job waits for.

A rank waits in a call. A collective waits for the members that have not entered it, a receive for its sender, a send for
its receiver. The chain of waits ends at one of three places:

- A rank that others wait for and that waits in no call. It is stuck in a computation, a loop, or a stopped or dead process
  (C4's non-communication hang; MegaScale, arXiv 2402.15627, section 4.2: "the culprit logs nothing").
- A call that all members have entered and that does not end: the network or a member's network stack (communication hang).
- Ranks that wait for each other: groups entered in different orders, or a skipped call (deadlock).

Mismatched calls are checked first: members of one call with another operation, element type or shape.

A call hangs once it exceeds a deadline, from the durations of this job's calls and steps so far. Collectives of training
are periodic and similar (C4, arXiv 2406.04594, section 4): a call that took a second in each of a hundred steps does not
take a minute in the next one. The first steps are slow because they allocate and compile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.detectors.medians import grouped_quantiles
from unickpt.diagnosis.detectors.mismatches import mismatches
from unickpt.diagnosis.detectors.observations import CircularWait, NotEntered, Unfinished
from unickpt.diagnosis.detectors.verdicts import Syndrome, Verdict
from unickpt.diagnosis.detectors.waits import Groups, Members, PendingCall, calls_waited_in, group_of
from unickpt.diagnosis.snapshot.progress import ProgressTable
from unickpt.diagnosis.snapshot.steps import StepRows

SHORTEST_S, BEFORE_S, LONGEST_S = 5.0, 120.0, 1800.0
ENOUGH_STEPS = 5
TIMES_LONGEST = 3.0  # deadline, in units of the longest known step or call
FOLLOWED = 32  # verdicts whose indirect victims are counted; for the others only direct ones are


def deadline_s(steps: StepRows, waits_ns: npt.ArrayLike) -> float:
    """Return the number of seconds that a call may take.

    Args:
        steps: known steps of every rank.
        waits_ns: ``[ranks]``, longest wait of each rank in nanoseconds, including ranks without a step.
    """
    waits = np.asarray(waits_ns, np.float64)
    _, (middle,), counts = grouped_quantiles(steps["rank"], steps["end_ns"] - steps["begin_ns"])
    if not len(waits) or (counts >= ENOUGH_STEPS).sum() < len(waits):
        return BEFORE_S
    longest = float(max(middle.max(), waits.max()))
    return min(max(SHORTEST_S, TIMES_LONGEST * longest / 1e9), LONGEST_S)


def hangs(
    rows: ProgressTable,
    members: Members,
    groups: Groups,
    *,
    before_ns: int,
    gone: frozenset[int] = frozenset(),
    passed: ProgressTable | None = None,
) -> list[Verdict]:
    """Return verdicts on calls entered before a deadline that have not ended, the one with most victims first.

    Args:
        rows: progress of all known ranks. A rank without rows has entered nothing.
        members: global ranks of every communicator, by its number in the job.
        groups: communicators by number. Groups with the same label are of one kind.
        before_ns: deadline. Calls whose last waiter entered later are not reported.
        gone: ranks whose process has ended.
        passed: rows of ranks that got through a call in which others wait. This happens when shapes differ.
    """
    all_rows = rows if passed is None else np.concatenate([rows, passed])
    out_of_step = [verdict for verdict in mismatches(all_rows, groups) if verdict.since_ns < before_ns]
    if out_of_step:  # other hangs are a consequence
        return sorted(out_of_step, key=lambda verdict: -verdict.victims)
    calls = calls_waited_in(rows, members, gone)
    waits = {rank for call in calls for rank in call.waiters}  # including those that wait since a moment ago
    calls = [call for call in calls if call.since_ns < before_ns]
    found = _stuck_ranks(calls, waits, groups) + _unfinished_calls(calls, groups) or _deadlocks(calls, groups, rows)
    return sorted(found, key=lambda verdict: -verdict.victims)


def _stuck_ranks(calls: list[PendingCall], waits: set[int], groups: Groups) -> list[Verdict]:
    """Return verdicts on ranks that others wait for and that wait in no call."""
    waited_for: dict[int, list[PendingCall]] = defaultdict(list)
    for call in sorted(calls, key=lambda call: call.since_ns):
        for rank in call.missing:
            if rank not in waits:
                waited_for[rank].append(call)
    found = []
    victims = _victims(list(waited_for.values()), calls)
    for (rank, held_up), count in zip(waited_for.items(), victims, strict=True):
        evidence = tuple(NotEntered(rank, call.ref(groups), len(call.waiters)) for call in held_up[:4])
        first = held_up[0]
        found.append(
            Verdict(
                Syndrome.NON_COMMUNICATION_HANG, (rank,), first.since_ns, group_of(first.comm, groups), first.op, first.seq,
                first.bytes, first.pair, victims=count, evidence=evidence,
            )
        )  # fmt: skip
    return found


def _unfinished_calls(calls: list[PendingCall], groups: Groups) -> list[Verdict]:
    """Return verdicts on calls that all members have entered and that do not end."""
    entered = {(call.comm, call.seq, call.pair): call for call in reversed(calls) if not call.missing}
    found = []
    for call, count in zip(entered.values(), _victims([[call] for call in entered.values()], calls), strict=True):
        ranks = tuple(sorted(set(call.pair))) if call.pair is not None else call.waiters
        found.append(
            Verdict(
                Syndrome.COMMUNICATION_HANG, ranks, call.since_ns, group_of(call.comm, groups), call.op, call.seq, call.bytes,
                call.pair, victims=count, confidence=1.0 if call.pair is not None else 0.8,
                evidence=(Unfinished(call.ref(groups), call.waiters),),
            )
        )  # fmt: skip
    return found


def _victims(roots: Sequence[Sequence[PendingCall]], calls: list[PendingCall]) -> list[int]:
    """Return, for each set of calls, how many ranks wait in it or, directly or indirectly, for a rank that does."""
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


def _deadlocks(calls: list[PendingCall], groups: Groups, rows: ProgressTable) -> list[Verdict]:
    """Return a verdict on ranks that wait for each other in two calls; without such ranks, on a longer circle.

    The smaller side has skipped a call or entered it in another order. If both sides are equal, the ranks that wait with one
    of them decide: if they have made one more call of the other kind, a call was skipped; otherwise the larger call is right.
    """
    waits_in = {rank: at for at, call in enumerate(calls) for rank in call.waiters}
    held_by: list[dict[int, list[int]]] = [{} for _ in calls]  # call -> other call -> ranks missing here that wait there
    for at, call in enumerate(calls):
        for rank in call.missing:
            if rank in waits_in:
                held_by[at].setdefault(waits_in[rank], []).append(rank)
    fewer: list[tuple[int, set[int], list[int]]] = []  # call, ranks in it that others wait for, calls of the others
    equal: list[tuple[int, set[int], list[int]]] = []
    for at, others in enumerate(held_by):
        opposed = [other for other in others if at in held_by[other]]
        here = {rank for other in opposed for rank in held_by[other][at]}
        there = sum(len(others[other]) for other in opposed)
        if here and len(here) <= there:
            (fewer if len(here) < there else equal).append((at, here, opposed))
    sides = fewer or equal
    if not sides:
        return _circles(calls, held_by, groups)
    odd = {rank for _, here, _ in sides for rank in here}
    if not fewer:
        odd = (
            _not_like_others(calls, [(at, other) for at, _, opposed in equal for other in opposed], held_by, groups, rows)
            or odd
        )
    evidence = [
        CircularWait(calls[at].ref(groups), tuple(sorted(here)), tuple(sorted(held_by[at][other])), calls[other].ref(groups))
        for at, here, opposed in sides[:4]
        for other in opposed[:2]
    ]
    since = max(calls[each].since_ns for at, _, opposed in sides for each in (at, *opposed))
    victims = len(waits_in) - len(odd)
    ops = {op for item in evidence for op in (item.call.op, item.opposite.op if item.opposite else item.call.op)}
    (op,) = ops if len(ops) == 1 else (None,)
    return [Verdict(Syndrome.DEADLOCK, tuple(sorted(odd)), since, op=op, victims=victims, evidence=tuple(evidence[:4]))]


def _not_like_others(
    calls: Sequence[PendingCall],
    opposed: Sequence[tuple[int, int]],
    held_by: Sequence[Mapping[int, list[int]]],
    groups: Groups,
    rows: ProgressTable,
) -> set[int]:
    """Return the ranks that have skipped one of two calls that wait for each other; empty if both have as many waiters.

    Args:
        calls: all pending calls.
        opposed: pairs of positions in ``calls``.
        held_by: call -> other call -> ranks that the first waits for and that wait in the second.
        groups: communicators by number.
        rows: progress of all ranks.
    """
    found: set[int] = set()
    for at, other in opposed:
        here, there = calls[at], calls[other]
        if len(here.waiters) >= len(there.waiters):
            continue
        asked = held_by[at][other]  # wait in the larger call, missing in the smaller one
        made = _calls_like(here, groups, rows, [rank for rank in there.waiters if rank not in asked])
        counts = _calls_like(here, groups, rows, asked)
        like, one_more = set(made.values()), {count - 1 for count in made.values()}
        left_out = counts and not like & set(counts.values()) and one_more & set(counts.values())
        found.update(asked if left_out else held_by[other][at])
    return found


def _calls_like(call: PendingCall, groups: Groups, rows: ProgressTable, ranks: Sequence[int]) -> dict[int, int]:
    """Return how many calls of the same kind each rank has made, on the side that is missing in ``call``: rank -> count."""
    label = group_of(call.comm, groups).label
    comms = [comm for comm, group in groups.items() if group.label == label]
    part = rows[np.isin(rows["rank"], ranks) & np.isin(rows["comm"], comms)]
    if call.pair is None:
        part = part[part["source"] < 0]
    else:
        sends = call.missing[0] == call.pair[0] if call.missing else True
        part = part[part["source" if sends else "destination"] == part["rank"]]
    return {rank: int(part["entered"][part["rank"] == rank].sum()) for rank in np.unique(part["rank"]).tolist()}


def _circles(calls: list[PendingCall], held_by: Sequence[Mapping[int, list[int]]], groups: Groups) -> list[Verdict]:
    """Return a verdict on a circle of calls. Where many ranks wait for few, the few have skipped a call."""
    circle = _circle(held_by)
    if not circle:
        return []
    after = dict(zip(circle, [*circle[1:], circle[0]], strict=True))
    alone = [at for at in circle if len(calls[at].missing) < len(calls[at].waiters)]
    least = min((len(calls[at].missing) for at in alone), default=0)
    sure = [at for at in alone if len(calls[at].missing) == least] or circle
    ranks = {rank for at in sure for rank in held_by[at][after[at]]}
    evidence = [
        CircularWait(calls[at].ref(groups), calls[at].waiters, tuple(sorted(held_by[at][after[at]]))) for at in circle[:8]
    ]
    since = max(calls[at].since_ns for at in circle)
    victims = sum(len(call.waiters) for call in calls) - len(ranks)
    return [Verdict(Syndrome.DEADLOCK, tuple(sorted(ranks)), since, victims=victims, evidence=tuple(evidence))]


def _circle(held_by: Sequence[Mapping[int, list[int]]]) -> list[int]:
    """Return the shortest circle through a call of a circle: each call waits for ranks in the next one. Empty without one."""
    ended: set[int] = set()  # calls that lead to no circle
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
    """Return the shortest circle through a call of at most ``longest`` calls; empty without one."""
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
