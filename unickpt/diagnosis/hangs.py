"""Who waits for whom, and who in the end waits for nobody.

A rank waits in a call. A collective waits for the members that have not entered it; a receive for its sender, a send for
its receiver. Followed to the end, that leads to

- ranks that others wait for and that wait in no call: they are stuck elsewhere, in a computation, a loop, a stopped or dead
  process (C4's non-communication hang; "the culprit logs nothing": MegaScale, arXiv 2402.15627, section 4.2);
- a call that all members have entered and that does not end: the network, or a member's side of it (communication hang);
- a circle: groups that are entered in different orders (deadlock).

Before that, members that are in one and the same call with another operation, type or shape are out of step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.summaries import Summaries
from unickpt.diagnosis.verdicts import Syndrome, Verdict
from unickpt.timing.records import Op

Members = Mapping[int, npt.NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Call:
    """A call that somebody waits in.

    Attributes:
        comm, seq: which one.
        pair: source and destination, if it is a point-to-point call.
        waiters: ranks that wait in it.
        missing: ranks that it waits for.
        since_ns: when the last of the waiters entered.
        op: what it is.
    """

    comm: int
    seq: int
    pair: tuple[int, int] | None
    waiters: tuple[int, ...]
    missing: tuple[int, ...]
    since_ns: int
    op: Op


def calls_waited_in(rows: Summaries, members: Members, gone: frozenset[int] = frozenset()) -> list[Call]:
    """Every call that a rank waits in, once.

    Args:
        rows: of all ranks.
        members: of every communicator.
        gone: ranks that are known to be dead: they enter nothing any more, whatever they have entered.
    """
    return [*_collectives(rows[rows["source"] < 0], members, gone), *_pairs(rows[rows["source"] >= 0], gone)]


def _collectives(rows: Summaries, members: Members, gone: frozenset[int]) -> list[Call]:
    found: list[Call] = []
    if not len(rows):
        return found
    rows = rows[np.argsort(rows["comm"], kind="stable")]
    comms, first = np.unique(rows["comm"], return_index=True)
    for comm, part in zip(comms.tolist(), np.split(rows, first[1:]), strict=True):
        waiting = part[part["blocked"] > 0]
        if not len(waiting):
            continue
        everyone = members.get(comm, np.unique(part["rank"]))
        entered = np.zeros(len(everyone), np.uint64)  # whoever has no row has entered nothing
        place = np.searchsorted(everyone, part["rank"], sorter=np.argsort(everyone))
        entered[np.argsort(everyone)[np.minimum(place, len(everyone) - 1)]] = part["entered"]
        for seq in np.unique(waiting["blocked"]).tolist():
            here = waiting[waiting["blocked"] == seq]
            missing = set(everyone[entered < seq].tolist())
            missing |= {rank for rank in everyone.tolist() if rank in gone and rank not in set(here["rank"].tolist())}
            found.append(
                Call(
                    comm, seq, None, tuple(here["rank"].tolist()), tuple(sorted(missing)), int(here["call_ns"].max()),
                    Op(int(here["op"][0])),
                )
            )  # fmt: skip
    return found


def _pairs(rows: Summaries, gone: frozenset[int]) -> list[Call]:
    sides: dict[tuple[int, int, int, int], int] = {}  # communicator, source, destination, rank -> last call entered
    for comm, source, destination, rank, entered in rows[["comm", "source", "destination", "rank", "entered"]].tolist():
        key = (comm, source, destination, rank)
        sides[key] = max(sides.get(key, 0), entered)
    found = []
    for row in rows[rows["blocked"] > 0]:
        comm, source, destination, rank, seq = (int(row[n]) for n in ("comm", "source", "destination", "rank", "blocked"))
        other = destination if rank == source else source
        there = other not in gone and sides.get((comm, source, destination, other), 0) >= seq
        missing = () if there or other < 0 else (other,)
        found.append(Call(comm, seq, (source, destination), (rank,), missing, int(row["call_ns"]), Op(int(row["op"]))))
    return found


def mismatches(rows: Summaries, names: Mapping[int, str]) -> list[Verdict]:
    """Members that are in the same call of a communicator with something else than the others."""
    found = []
    rows = rows[rows["source"] < 0]
    calls: dict[tuple[int, int], list[tuple[int, tuple[int, int, int], int]]] = defaultdict(list)
    columns = ["comm", "blocked", "entered", "rank", "op", "dtype", "shape", "call_ns"]
    for comm, blocked, entered, rank, op, dtype, shape, call_ns in rows[columns].tolist():
        calls[comm, blocked or entered].append((rank, (op, dtype, shape), call_ns))  # or it got through
    waited_in = set(rows[rows["blocked"] > 0][["comm", "blocked"]].tolist())
    for (comm, seq), entries in calls.items():
        counts = Counter(what for _, what, _ in entries)
        if len(counts) < 2 or (comm, seq) not in waited_in:
            continue
        usual, most = counts.most_common(1)[0]
        odd = tuple(sorted(rank for rank, what, _ in entries if what != usual))
        told = [f"{_what(what)} on ranks {_some([r for r, w, _ in entries if w == what])}" for what in counts]
        since = max(call_ns for _, _, call_ns in entries)
        found.append(
            Verdict(
                Syndrome.MISMATCH, odd, since, names.get(comm, ""), seq, victims=len(entries) - len(odd),
                confidence=1.0 if most > len(odd) else 0.5, evidence=(f"call {seq} is " + ", and ".join(told),),
            )
        )  # fmt: skip
    return found


def _what(what: tuple[int, int, int]) -> str:
    return f"{Op(what[0]).name.lower()} (type {what[1]}, shape {what[2]:08x})"


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, sorted(ranks)[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def hangs(
    rows: Summaries, members: Members, names: Mapping[int, str], *, before_ns: int, gone: frozenset[int] = frozenset()
) -> list[Verdict]:
    """Verdicts on calls that were entered before a deadline and have not ended; the one with most victims first.

    Args:
        rows: of all ranks that are known; one without rows has entered nothing.
        members: of every communicator, by its number in the job.
        names: of the communicators.
        before_ns: calls whose last waiter came later than this are not looked at.
        gone: ranks whose process has ended.
    """
    out_of_step = [verdict for verdict in mismatches(rows, names) if verdict.since_ns < before_ns]
    if out_of_step:  # what else hangs, hangs for it
        return sorted(out_of_step, key=lambda verdict: -verdict.victims)
    calls = [call for call in calls_waited_in(rows, members, gone) if call.since_ns < before_ns]
    waits_in = {rank: at for at, call in enumerate(calls) for rank in call.waiters}
    found = _stuck(calls, waits_in, names, gone) + _in_the_network(calls, waits_in, names)
    return sorted(found or _circles(calls, waits_in, names), key=lambda verdict: -verdict.victims)


def _stuck(calls: list[Call], waits_in: Mapping[int, int], names: Mapping[int, str], gone: frozenset[int]) -> list[Verdict]:
    """Ranks that others wait for and that wait in no call themselves."""
    waited_for: dict[int, list[Call]] = defaultdict(list)
    for call in calls:
        for rank in call.missing:
            if rank not in waits_in or rank in gone:
                waited_for[rank].append(call)
    found = []
    for rank, held_up in waited_for.items():
        first = min(held_up, key=lambda call: call.since_ns)
        told = [
            f"rank {rank} has not entered {_named(call, names)}; {len(call.waiters)} wait there"
            for call in sorted(held_up, key=lambda call: call.since_ns)[:4]
        ]
        found.append(
            Verdict(
                Syndrome.NON_COMMUNICATION_HANG, (rank,), first.since_ns, names.get(first.comm, ""), first.seq, first.pair,
                victims=len(_behind(held_up, calls)), evidence=tuple(told),
            )
        )  # fmt: skip
    return found


def _in_the_network(calls: list[Call], waits_in: Mapping[int, int], names: Mapping[int, str]) -> list[Verdict]:
    """Calls that everybody has entered and that do not end."""
    del waits_in
    found = []
    seen: set[tuple[int, int, tuple[int, int] | None]] = set()
    for call in calls:
        key = (call.comm, call.seq, call.pair)
        if call.missing or key in seen:
            continue
        seen.add(key)
        ranks = tuple(sorted(set(call.pair))) if call.pair is not None else call.waiters
        told = f"all have entered {_named(call, names)}, and it does not end on ranks {_some(list(call.waiters))}"
        found.append(
            Verdict(
                Syndrome.COMMUNICATION_HANG, ranks, call.since_ns, names.get(call.comm, ""), call.seq, call.pair,
                victims=len(_behind([call], calls)), confidence=1.0 if call.pair is not None else 0.8, evidence=(told,),
            )
        )  # fmt: skip
    return found


def _behind(roots: list[Call], calls: list[Call]) -> set[int]:
    """Ranks that wait in these calls, or for a rank that does."""
    waiting_for: dict[int, list[Call]] = defaultdict(list)
    for call in calls:
        for rank in call.missing:
            waiting_for[rank].append(call)
    victims: set[int] = set()
    todo = list(roots)
    while todo:
        for rank in todo.pop().waiters:
            if rank not in victims:
                victims.add(rank)
                todo += waiting_for[rank]
    return victims


def _circles(calls: list[Call], waits_in: Mapping[int, int], names: Mapping[int, str]) -> list[Verdict]:
    """Every one waits for another one: a circle of ranks, found by going on until a rank comes twice."""
    for start in waits_in:
        path: list[int] = []
        rank = start
        while rank in waits_in and rank not in path:
            path.append(rank)
            missing = [r for r in calls[waits_in[rank]].missing if r in waits_in]
            if not missing:
                break
            rank = missing[0]
        else:
            if rank in path:
                circle = path[path.index(rank) :]
                told = tuple(
                    f"rank {r} waits in {_named(calls[waits_in[r]], names)} for rank {circle[(at + 1) % len(circle)]}"
                    for at, r in enumerate(circle)
                )
                since = max(calls[waits_in[r]].since_ns for r in circle)
                most = max((calls[waits_in[r]] for r in circle), key=lambda call: len(call.waiters) - len(call.missing))
                alone = len(most.waiters) > len(most.missing)  # where many wait for few, these have left out a call
                ranks = most.missing if alone else tuple(sorted(circle))
                return [Verdict(Syndrome.DEADLOCK, ranks, since, victims=len(waits_in), evidence=told)]
    return []


def _named(call: Call, names: Mapping[int, str]) -> str:
    what = f"{call.op.name.lower()} #{call.seq} of {names.get(call.comm, call.comm)}"
    return what if call.pair is None else f"{what} from rank {call.pair[0]} to rank {call.pair[1]}"
