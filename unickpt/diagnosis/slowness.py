"""Who is slow: ranks that keep others waiting step by step, and links that carry less than the others.

A rank's own time of a step is what it does not spend in calls that it waits for. Ranks that make the same calls in a step do
the same work, so that their own times can be compared, and a pipeline stage that has more to do is compared with its like
alone. (C4, arXiv 2406.04594, finds the rank that itself waits least; that is the same rank, without the need to know which
collectives are rings.)

A transfer begins when both sides have entered it: whoever comes late has not made the link slow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.verdicts import Syndrome, Verdict
from unickpt.timing.records import Op, Records

Floats = npt.NDArray[np.float64]
SMALLEST_NS = 2_000_000.0  # excess that is worth a word, whatever the step takes
SHARE = 0.05  # of the step
SPREADS = 4.0  # of the peers' own spread
MOST = 0.6  # of the steps: so many times it has to be above
SLOW_LINK = 2.5  # times the others' time for as many bytes


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank.

    Attributes:
        number: of the step.
        begin_ns, end_ns: on the job's clock.
        own_ns: time in no call that is waited for.
        data_ns, garbage_ns: of that, waits for data and garbage collections.
        calls: equal for ranks that have made the same calls.
    """

    number: int
    begin_ns: int
    end_ns: int
    own_ns: float
    data_ns: float
    garbage_ns: float
    calls: int


def steps_of(records: Records, *, offset_ns: int = 0) -> list[Step]:
    """The steps of a rank, by its records; those at the edges of the ring are left out."""
    marks = records[records["op"] == Op.STEP]
    waits = records[(records["op"] <= Op.RECEIVE) & (records["wait_ns"] > 0) & (records["end_ns"] > 0)]
    waits = waits[np.argsort(waits["wait_ns"], kind="stable")]
    starts, ends = waits["wait_ns"], np.maximum.accumulate(waits["end_ns"]) if len(waits) else waits["end_ns"]
    calls = records[records["op"] <= Op.RECEIVE]
    found = []
    for mark in marks:
        begin, end = int(mark["call_ns"]), int(mark["end_ns"])
        if len(records) and begin < int(records["call_ns"][0]):
            continue
        here = slice(*np.searchsorted(starts, [begin, end]).tolist())
        covered = _covered(starts[here], np.minimum(ends[here], end), begin)
        made = calls[(calls["call_ns"] >= begin) & (calls["call_ns"] < end)]
        kinds = np.sort(made["op"].astype(np.int64) << 48 ^ made["elements_in"].astype(np.int64))
        found.append(
            Step(
                int(mark["step"]), begin + offset_ns, end + offset_ns, float(end - begin - covered),
                _within(records, Op.DATA, begin, end), _within(records, Op.GARBAGE, begin, end), hash(kinds.tobytes()),
            )
        )  # fmt: skip
    return found


def _covered(starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], begin: int) -> int:
    """Length of the union of intervals whose ends only grow."""
    if not len(starts):
        return 0
    before = np.concatenate([[begin], ends[:-1]])
    return int(np.maximum(ends - np.maximum(starts, before), 0).sum())


def _within(records: Records, op: Op, begin: int, end: int) -> float:
    part = records[(records["op"] == op) & (records["call_ns"] >= begin) & (records["call_ns"] < end)]
    return float((part["end_ns"] - part["call_ns"]).sum())


def stragglers(steps: Mapping[int, Sequence[Step]], *, last: int = 20, fewest: int = 16, warm_up: int = 5) -> list[Verdict]:
    """Ranks whose own time exceeds that of their peers, most of the time.

    Args:
        steps: of every rank.
        last: steps to look at, the newest that all peers have.
        fewest: steps that it takes to say anything.
        warm_up: the first steps of a job, which are not looked at.
    """
    found = []
    steps = {rank: [step for step in own if step.number > warm_up] for rank, own in steps.items()}
    for peers in _alike(steps, last):
        numbers = sorted(set.intersection(*(set(by_number) for by_number in peers.values())))[-last:]
        if len(peers) < 2 or len(numbers) < fewest:
            continue
        ranks = sorted(peers)
        table = np.array([[peers[rank][number].own_ns for number in numbers] for rank in ranks])
        length = float(np.median([s.end_ns - s.begin_ns for by_number in peers.values() for s in by_number.values()]))
        for at, rank in enumerate(ranks):
            others = np.delete(table, at, axis=0)
            excess = table[at] - np.median(others, axis=0)
            spread = float(np.median(np.abs(others - np.median(others, axis=0)))) if len(others) > 1 else 0.0
            limit = max(SMALLEST_NS, SHARE * length, SPREADS * spread)
            middle, above = float(np.median(excess)), float((excess > limit).mean())
            if middle > limit and above >= MOST:
                found.append(_slow(rank, [peers[rank][number] for number in numbers], middle, above, length, len(ranks)))
    return sorted(found, key=lambda verdict: -verdict.confidence)


def _alike(steps: Mapping[int, Sequence[Step]], last: int) -> list[dict[int, dict[int, Step]]]:
    """Ranks that have made the same calls in most of the newest steps, each with its steps by number."""
    classes: dict[int, dict[int, dict[int, Step]]] = defaultdict(dict)
    for rank, own in steps.items():
        newest = own[-last:]
        if newest:
            kinds, counts = np.unique([step.calls for step in newest], return_counts=True)
            classes[int(kinds[np.argmax(counts)])][rank] = {step.number: step for step in newest}
    return list(classes.values())


def _slow(rank: int, own: list[Step], excess_ns: float, above: float, length_ns: float, peers: int) -> Verdict:
    data = float(np.median([step.data_ns for step in own]))
    garbage = float(np.median([step.garbage_ns for step in own]))
    cause = "data" if data > excess_ns / 2 else "garbage collection" if garbage > excess_ns / 2 else "compute"
    told = (
        f"rank {rank} takes {excess_ns / 1e6:.1f} ms longer than the {peers - 1} that make the same calls, in {above:.0%} of "
        f"{len(own)} steps of {length_ns / 1e6:.0f} ms; cause: {cause}"
    )
    return Verdict(
        Syndrome.NON_COMMUNICATION_SLOW,
        (rank,),
        own[0].begin_ns,
        victims=peers - 1,
        confidence=min(above, 1.0),
        evidence=(told,),
    )


# ---------------------------------------------------------------- links


@dataclass(frozen=True, slots=True)
class Transfer:
    """One point-to-point call whose both sides are known.

    Attributes:
        source, destination: ranks.
        size_bytes: of what was carried.
        ns: from when both had entered until the receiver had it.
    """

    source: int
    destination: int
    size_bytes: int
    ns: float


def slow_links(transfers: Sequence[Transfer], *, fewest: int = 5) -> list[Verdict]:
    """Links that take longer than the others for as many bytes; all of a rank's links in a direction are that rank.

    Args:
        transfers: of the last steps.
        fewest: transfers of a link that it takes to say anything.
    """
    by_size: dict[int, dict[tuple[int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for transfer in transfers:
        by_size[transfer.size_bytes.bit_length()][transfer.source, transfer.destination].append(transfer.ns)
    slow: dict[tuple[int, int], float] = {}
    known: set[tuple[int, int]] = set()
    for links in by_size.values():
        middles = {link: float(np.median(times)) for link, times in links.items() if len(times) >= fewest}
        known |= set(middles)
        for link, middle in middles.items():
            others = [value for other, value in middles.items() if other != link]
            if others and middle > SLOW_LINK * float(np.median(others)) and middle > SMALLEST_NS / 10:
                slow[link] = max(slow.get(link, 0.0), middle / float(np.median(others)))
    return _told(slow, known)


def _told(slow: Mapping[tuple[int, int], float], known: set[tuple[int, int]]) -> list[Verdict]:
    """Hot rows and columns of the delay matrix first, then what is left of hot cells."""
    left, found = dict(slow), []
    for side, name in ((0, "sends"), (1, "receives")):
        for rank in sorted({link[side] for link in slow}):
            own = [link for link in left if link[side] == rank]
            if len(own) > 1 and len(own) == sum(link[side] == rank for link in known):
                worst = max(left[link] for link in own)
                told = f"all that rank {rank} {name} takes up to {worst:.1f} times as long as on other links"
                found.append(Verdict(Syndrome.COMMUNICATION_SLOW, (rank,), 0, victims=len(own), evidence=(told,)))
                for link in own:
                    del left[link]
    for link, times in left.items():
        told = f"from rank {link[0]} to rank {link[1]} takes {times:.1f} times as long as on other links"
        found.append(Verdict(Syndrome.COMMUNICATION_SLOW, tuple(sorted(link)), 0, link=link, victims=1, evidence=(told,)))
    return found
