"""Jobs with one fault each, and what ought to be told of it."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.deadlines import deadline_s
from unickpt.diagnosis.hangs import hangs
from unickpt.diagnosis.links import Transfers, slow_links
from unickpt.diagnosis.middles import Floats
from unickpt.diagnosis.simulation.calls import (
    MS,
    Disturbance,
    Item,
    Program,
    Sequence,
    play,
    program,
    summaries,
    until,
)
from unickpt.diagnosis.simulation.layout import WORLD, Layout
from unickpt.diagnosis.simulation.steps import Slowness, timed
from unickpt.diagnosis.steps import Steps
from unickpt.diagnosis.stragglers import stragglers
from unickpt.diagnosis.summaries import Summaries
from unickpt.diagnosis.verdicts import Syndrome, Verdict
from unickpt.diagnosis.waiting import Members

MICROBATCHES, STEPS, TRANSFER_STEPS = 4, 26, 5
CLOCKS_NS = 50_000.0  # standard deviation of what is left of the differences of the hosts' clocks
START_NS = 1_700_000_000 * 10**9
HANGS_SINCE_NS = 60 * 10**9


class Fault(enum.Enum):
    """What is done to the job."""

    SOUND = "none"
    STOPPED = "rank stopped"
    LOOP = "rank in an endless loop"
    DEAD = "rank dead"
    DEAD_WITHIN = "rank dead within a call"
    SKIPPED = "collective skipped by a rank"
    MISMATCHED = "collective of another shape"
    DEADLOCK = "two groups entered in another order"
    DEAD_LINK = "dead link"
    DEAD_GROUP = "collective that does not end"
    SLEEP_5 = "sleep of 5 ms per step"
    SLEEP_20 = "sleep of 20 ms per step"
    SLEEP_100 = "sleep of 100 ms per step"
    STARVED = "rank with two thirds of a processor"
    GARBAGE = "garbage collections in most steps"
    DATA = "slow data loader"
    SLOW_LINK = "slow link, one direction"
    SLOW_LINK_BOTH = "slow link, both directions"
    SLOW_RECEIVER = "slow receiving side of a rank"


@dataclass(frozen=True, slots=True)
class Expected:
    """What ought to be told.

    Attributes:
        syndromes: any of them is right; none for a sound job.
        ranks: all that are to be named, and no others
        allowed: but these: of two ranks that differ, it cannot always be told which is right.
        links: all that are to be named; if there are some, ranks are theirs.
        cause: word in the evidence.
    """

    syndromes: frozenset[Syndrome] = frozenset()
    ranks: frozenset[int] = frozenset()
    allowed: frozenset[int] = frozenset()
    links: frozenset[tuple[int, int]] = frozenset()
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Scene:
    """A job at the moment of a diagnosis.

    Attributes:
        rows, members, names, gone: what ``hangs`` takes.
        steps, transfers, hosts: what ``stragglers`` and ``slow_links`` take.
        waits_ns: ``[ranks]``, the longest wait of each that is over.
        now_ns: of the diagnosis, on the job's clock.
        expected: what ought to be told.
    """

    rows: Summaries
    members: Members
    names: dict[int, str]
    gone: frozenset[int]
    steps: Steps
    transfers: Transfers
    hosts: npt.NDArray[np.int64]
    waits_ns: Floats
    now_ns: int
    expected: Expected


def diagnosed(scene: Scene) -> list[Verdict]:
    """One whole pass of diagnosis: deadline, hangs, and if nothing hangs, who drags."""
    before_ns = scene.now_ns - int(1e9 * deadline_s(scene.steps, scene.waits_ns))
    slow = stragglers(scene.steps) + slow_links(scene.transfers, hosts=scene.hosts)
    return hangs(scene.rows, scene.members, scene.names, before_ns=before_ns, gone=scene.gone) or slow


def right_syndrome(verdicts: list[Verdict], expected: Expected) -> bool:
    """All verdicts have it; no verdict, for a sound job."""
    if not expected.syndromes:
        return not verdicts
    return bool(verdicts) and all(verdict.syndrome in expected.syndromes for verdict in verdicts)


def right_place(verdicts: list[Verdict], expected: Expected) -> bool:
    """The ranks or links that are at fault are named, and no others, with the cause, if there is one to tell."""
    told = all(any(expected.cause in line for line in verdict.evidence) for verdict in verdicts) or not expected.cause
    if expected.links:
        return told and {verdict.link for verdict in verdicts} == set(expected.links)
    named = {rank for verdict in verdicts for rank in verdict.ranks}
    return told and expected.ranks <= named <= expected.ranks | expected.allowed


def simulate(layout: Layout, fault: Fault, seed: int) -> Scene:
    """A job in which a fault has happened to a random rank or link in a random place of a step, or none."""
    random = np.random.default_rng([seed, list(Fault).index(fault)])
    rank = int(random.integers(layout.world))
    skew_ns = CLOCKS_NS * random.standard_normal(layout.world // layout.tp)
    slow, expected = _slowness(layout, fault, rank, random)
    job = timed(layout, MICROBATCHES, STEPS, slow, skew_ns, random, told=TRANSFER_STEPS)
    job.steps["begin_ns"] += START_NS
    job.steps["end_ns"] += START_NS

    replica = layout.place(rank)[1]
    alike = (replica + 1) % layout.dp
    played = sorted(layout.rank(p, d, t) for d in {replica, alike} for p in range(layout.pp) for t in range(layout.tp))
    step = {each: program(layout, each, MICROBATCHES) for each in played}
    counts = {each: _counts(items, STEPS) for each, items in step.items()}
    disturbance, hung = _disturbance(layout, fault, rank, step[rank], counts[rank], random)
    programs = {each: items + items for each, items in step.items()}  # whoever is ahead goes on into the next step
    records = play(programs, counts, disturbance, lambda: float(random.uniform(0.9, 1.1)))
    last_ns = max(int(max(own["call_ns"].max(), own["end_ns"].max())) for own in records.values() if len(own))
    if hung.syndromes:
        now_ns = last_ns + HANGS_SINCE_NS
    else:
        now_ns = int(random.uniform(0.1, 0.9) * last_ns)
        records = {each: until(own, now_ns) for each, own in records.items()}
    rows = summaries(layout, records, replica, alike)
    hosts = layout.hosts()
    rows["call_ns"] += START_NS + job.end_ns + skew_ns[hosts[rows["rank"]]].astype(np.int64)

    middle = float(np.median(job.steps["end_ns"] - job.steps["begin_ns"]))
    return Scene(
        rows=rows,
        members=layout.members(),
        names=layout.names(),
        gone=frozenset({rank} if fault in (Fault.DEAD, Fault.DEAD_WITHIN) else ()),
        steps=job.steps,
        transfers=job.transfers,
        hosts=hosts,
        waits_ns=middle * random.uniform(0.2, 1.0, layout.world),
        now_ns=START_NS + job.end_ns + now_ns,
        expected=hung if hung.syndromes else expected,
    )


def _counts(items: Program, times: int) -> Counter[Sequence]:
    found = Counter(call.sequence for item in items for call in item.calls)
    return Counter({sequence: times * count for sequence, count in found.items()})


def _disturbance(
    layout: Layout, fault: Fault, rank: int, items: Program, counts: Counter[Sequence], random: np.random.Generator
) -> tuple[Disturbance, Expected]:
    """What makes the job hang, in the next step of a rank, and what ought to be told; nothing for other faults."""
    stage, replica, tensor = layout.place(rank)
    collective = [at for at, item in enumerate(items) if any(call.source < 0 for call in item.calls)]
    at = int(random.choice(collective))
    (call,) = items[at].calls
    if fault in (Fault.STOPPED, Fault.LOOP, Fault.DEAD):
        stuck = frozenset({Syndrome.NON_COMMUNICATION_HANG})
        return Disturbance(stops={rank: int(random.integers(len(items)))}), Expected(stuck, frozenset({rank}))
    if fault is Fault.DEAD_WITHIN:
        stuck = frozenset({Syndrome.NON_COMMUNICATION_HANG})
        return Disturbance(stops={rank: at}, within=True), Expected(stuck, frozenset({rank}))
    if fault is Fault.SKIPPED:
        changed = [*items[:at], Item(items[at].compute_ns, ()), *items[at + 1 :], *items]
        return Disturbance(programs={rank: changed}), _odd(layout, call.comm, rank, Syndrome.DEADLOCK, Syndrome.MISMATCH)
    if fault is Fault.MISMATCHED:
        other = call._replace(shape=call.shape + 1, elements=call.elements + 1)
        changed = [*items[:at], Item(items[at].compute_ns, (other,)), *items[at + 1 :], *items]
        return Disturbance(programs={rank: changed}), _odd(layout, call.comm, rank, Syndrome.MISMATCH)
    if fault is Fault.DEADLOCK:
        norm = next(n for n in collective if items[n].calls[0].comm == WORLD)
        before = collective[collective.index(norm) - int(random.integers(1, 1 + min(2, collective.index(norm))))]
        changed = [*items[:before], items[norm], *items[before:norm], *items[norm + 1 :], *items]
        return Disturbance(programs={rank: changed}), _odd(layout, items[before].calls[0].comm, rank, Syndrome.DEADLOCK)
    if fault is Fault.DEAD_LINK:
        source, destination = random.permutation([rank, _neighbour(layout, rank, random)]).tolist()
        sequence = (layout.pipeline_group(replica, tensor), source, destination)
        since = counts[sequence] + int(random.integers(1, MICROBATCHES + 1))
        link = frozenset({(source, destination)})
        return Disturbance(lost={sequence: since}), Expected(frozenset({Syndrome.COMMUNICATION_HANG}), links=link)
    if fault is Fault.DEAD_GROUP:
        comm = int(random.choice([layout.tensor_group(stage, replica), layout.data_group(stage, tensor), WORLD]))
        members = frozenset(layout.members()[comm].tolist())
        lost = {(comm, -1, -1): counts[comm, -1, -1] + 1}
        return Disturbance(lost=lost), Expected(frozenset({Syndrome.COMMUNICATION_HANG}), members)
    return Disturbance(), Expected()


def _odd(layout: Layout, comm: int, rank: int, *syndromes: Syndrome) -> Expected:
    """The rank that does something else than the others of its group is named."""
    members = frozenset(layout.members()[comm].tolist())
    return Expected(frozenset(syndromes), frozenset({rank}), members if len(members) == 2 else frozenset())


def _neighbour(layout: Layout, rank: int, random: np.random.Generator) -> int:
    """A rank that it exchanges activations with."""
    stage, replica, tensor = layout.place(rank)
    return layout.rank(int(random.choice([s for s in (stage - 1, stage + 1) if 0 <= s < layout.pp])), replica, tensor)


def _slowness(layout: Layout, fault: Fault, rank: int, random: np.random.Generator) -> tuple[Slowness, Expected]:
    """What makes the job slow, and what ought to be told; nothing for other faults."""
    ranks = {
        Fault.SLEEP_5: (Slowness(rank, sleep_ns=5 * MS), "compute"),
        Fault.SLEEP_20: (Slowness(rank, sleep_ns=20 * MS), "compute"),
        Fault.SLEEP_100: (Slowness(rank, sleep_ns=100 * MS), "compute"),
        Fault.STARVED: (Slowness(rank, starved=1.5), "compute"),
        Fault.GARBAGE: (Slowness(rank, garbage_ns=60 * MS), "garbage collection"),
        Fault.DATA: (Slowness(rank, data_ns=40 * MS), "data"),
    }
    if fault in ranks:
        slow, cause = ranks[fault]
        return slow, Expected(frozenset({Syndrome.NON_COMMUNICATION_SLOW}), frozenset({rank}), cause=cause)
    if fault not in (Fault.SLOW_LINK, Fault.SLOW_LINK_BOTH, Fault.SLOW_RECEIVER):
        return Slowness(), Expected()
    link = (rank, _neighbour(layout, rank, random))
    links = [link] if fault is Fault.SLOW_LINK else [link, link[::-1]]
    if fault is Fault.SLOW_RECEIVER:
        stage, replica, tensor = layout.place(rank)
        links = [(layout.rank(s, replica, tensor), rank) for s in (stage - 1, stage + 1) if 0 <= s < layout.pp]
    slow = Slowness(links={each: float(random.uniform(4.0, 10.0)) for each in links})
    drags = frozenset({Syndrome.COMMUNICATION_SLOW})
    if fault is Fault.SLOW_RECEIVER and len(links) > 1:
        return slow, Expected(drags, frozenset({rank}), cause="receives")
    return slow, Expected(drags, links=frozenset(links))
