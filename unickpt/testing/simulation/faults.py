"""Simulated jobs with one fault each, and the expected verdict."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Floats
from unickpt.diagnosis.detectors.hangs import deadline_s, hangs
from unickpt.diagnosis.detectors.observations import Direction, SlowTransfers
from unickpt.diagnosis.detectors.p2p_links import TransferRows, slow_links
from unickpt.diagnosis.detectors.stragglers import stragglers
from unickpt.diagnosis.detectors.verdicts import Cause, Syndrome, Verdict
from unickpt.diagnosis.detectors.waits import Groups, Members
from unickpt.diagnosis.snapshot.progress import ProgressTable
from unickpt.diagnosis.snapshot.steps import StepRows
from unickpt.testing.simulation.calls import (
    MS,
    CallSequence,
    Disturbance,
    Program,
    ProgramItem,
    job_progress,
    play,
    program,
    until,
)
from unickpt.testing.simulation.layout import WORLD, ParallelLayout
from unickpt.testing.simulation.steps import Slowness, timed

MICROBATCHES, STEPS, TRANSFER_STEPS = 4, 26, 5
CLOCKS_NS = 200_000.0  # standard deviation of the remaining clock differences between hosts
START_NS = 1_700_000_000 * 10**9
HANGS_SINCE_NS = 60 * 10**9


class JobFault(enum.Enum):
    """Fault of a simulated job."""

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
    """Expected verdict.

    Attributes:
        syndromes: acceptable syndromes; empty for a sound job.
        ranks: ranks that must be named.
        allowed: further ranks that may be named: of two ranks that differ, either may be right.
        links: links that must be named. If there are any, ``ranks`` is not checked.
        cause: cause of every verdict; None for any.
        direction: slow side of a rank in the evidence of every verdict; None for any.
    """

    syndromes: frozenset[Syndrome] = frozenset()
    ranks: frozenset[int] = frozenset()
    allowed: frozenset[int] = frozenset()
    links: frozenset[tuple[int, int]] = frozenset()
    cause: Cause | None = None
    direction: Direction | None = None


@dataclass(frozen=True, slots=True)
class Scene:
    """A job at the time of a diagnosis.

    Attributes:
        rows, members, groups, gone: arguments of ``hangs``.
        steps, transfers, hosts: arguments of ``stragglers`` and ``slow_links``.
        waits_ns: ``[ranks]``, longest completed wait of each rank.
        now_ns: time of the diagnosis, on the job's clock.
        expected: expected verdict.
    """

    rows: ProgressTable
    members: Members
    groups: Groups
    gone: frozenset[int]
    steps: StepRows
    transfers: TransferRows
    hosts: npt.NDArray[np.int64]
    waits_ns: Floats
    now_ns: int
    expected: Expected


def diagnosed(scene: Scene) -> list[Verdict]:
    """Run one complete diagnosis: deadline and hangs; without a hang, slow ranks and links."""
    before_ns = scene.now_ns - int(1e9 * deadline_s(scene.steps, scene.waits_ns))
    slow = stragglers(scene.steps) + slow_links(scene.transfers, hosts=scene.hosts)
    return hangs(scene.rows, scene.members, scene.groups, before_ns=before_ns, gone=scene.gone) or slow


def right_syndrome(verdicts: list[Verdict], expected: Expected) -> bool:
    """Return whether all verdicts have an expected syndrome; for a sound job, whether there is none."""
    if not expected.syndromes:
        return not verdicts
    return bool(verdicts) and all(verdict.syndrome in expected.syndromes for verdict in verdicts)


def right_place(verdicts: list[Verdict], expected: Expected) -> bool:
    """Return whether exactly the ranks or links at fault are named, with the expected cause."""
    right = all(_explained(verdict, expected) for verdict in verdicts)
    if expected.links:
        return right and {verdict.link for verdict in verdicts} == set(expected.links)
    named = {rank for verdict in verdicts for rank in verdict.ranks}
    return right and expected.ranks <= named <= expected.ranks | expected.allowed


def _explained(verdict: Verdict, expected: Expected) -> bool:
    directions = {each.direction for each in verdict.evidence if isinstance(each, SlowTransfers)}
    return expected.cause in (None, verdict.cause) and (expected.direction is None or expected.direction in directions)


def simulate(layout: ParallelLayout, fault: JobFault, seed: int) -> Scene:
    """Simulate a job in which a fault hits a random rank or link at a random place of a step.

    Faults of links need two stages at least.
    """
    random = np.random.default_rng([seed, list(JobFault).index(fault)])
    rank = int(random.integers(layout.world))
    skew_ns = CLOCKS_NS * random.standard_normal(layout.world // layout.tp)
    slow, expected = _slowness(layout, fault, rank, random)
    job = timed(layout, MICROBATCHES, STEPS, slow, skew_ns, random, transfer_steps=TRANSFER_STEPS)
    job.steps["begin_ns"] += START_NS
    job.steps["end_ns"] += START_NS

    replica = layout.place(rank)[1]
    sound = (replica + 1) % layout.dp
    played = sorted(layout.rank(p, d, t) for d in {replica, sound} for p in range(layout.pp) for t in range(layout.tp))
    step = {each: program(layout, each, MICROBATCHES) for each in played}
    counts = {each: _counts(items, STEPS) for each, items in step.items()}
    disturbance, hung = _disturbance(layout, fault, rank, step[rank], counts[rank], random)
    programs = {each: items + items for each, items in step.items()}  # ranks that are ahead continue into the next step
    records = play(programs, counts, disturbance, lambda: float(random.uniform(0.9, 1.1)))
    last_ns = max(int(max(own["call_ns"].max(), own["end_ns"].max())) for own in records.values() if len(own))
    if hung.syndromes:
        now_ns = last_ns + HANGS_SINCE_NS
    else:
        now_ns = int(random.uniform(0.1, 0.9) * last_ns)
        records = {each: until(own, now_ns) for each, own in records.items()}
    rows = job_progress(layout, records, replica, sound)
    hosts = layout.hosts()
    rows["call_ns"] += START_NS + job.end_ns + skew_ns[hosts[rows["rank"]]].astype(np.int64)

    middle = float(np.median(job.steps["end_ns"] - job.steps["begin_ns"]))
    return Scene(
        rows=rows,
        members=layout.members(),
        groups=layout.groups(),
        gone=frozenset({rank} if fault in (JobFault.DEAD, JobFault.DEAD_WITHIN) else ()),
        steps=job.steps,
        transfers=job.transfers,
        hosts=hosts,
        waits_ns=middle * random.uniform(0.2, 1.0, layout.world),
        now_ns=START_NS + job.end_ns + now_ns,
        expected=hung if hung.syndromes else expected,
    )


def _counts(items: Program, times: int) -> Counter[CallSequence]:
    found = Counter(call.sequence for item in items for call in item.calls)
    return Counter({sequence: times * count for sequence, count in found.items()})


def _disturbance(
    layout: ParallelLayout,
    fault: JobFault,
    rank: int,
    items: Program,
    counts: Counter[CallSequence],
    random: np.random.Generator,
) -> tuple[Disturbance, Expected]:
    """Return the deviation that makes the job hang, and the expected verdict; both empty for other faults."""
    stage, replica, tensor = layout.place(rank)
    collective = [at for at, item in enumerate(items) if any(call.source < 0 for call in item.calls)]
    at = int(random.choice(collective))
    (call,) = items[at].calls
    if fault in (JobFault.STOPPED, JobFault.LOOP, JobFault.DEAD):
        stuck = frozenset({Syndrome.NON_COMMUNICATION_HANG})
        return Disturbance(stops={rank: int(random.integers(len(items)))}), Expected(stuck, frozenset({rank}))
    if fault is JobFault.DEAD_WITHIN:
        stuck = frozenset({Syndrome.NON_COMMUNICATION_HANG})
        return Disturbance(stops={rank: at}, within=True), Expected(stuck, frozenset({rank}))
    if fault is JobFault.SKIPPED:
        changed = [*items[:at], ProgramItem(items[at].compute_ns, ()), *items[at + 1 :], *items]
        return Disturbance(programs={rank: changed}), _odd(layout, call.comm, rank, Syndrome.DEADLOCK, Syndrome.MISMATCH)
    if fault is JobFault.MISMATCHED:
        other = call._replace(shape=call.shape + 1, elements=call.elements + 1)
        changed = [*items[:at], ProgramItem(items[at].compute_ns, (other,)), *items[at + 1 :], *items]
        return Disturbance(programs={rank: changed}), _odd(layout, call.comm, rank, Syndrome.MISMATCH)
    if fault is JobFault.DEADLOCK:
        norm = next(n for n in collective if items[n].calls[0].comm == WORLD)
        before = collective[collective.index(norm) - int(random.integers(1, 1 + min(2, collective.index(norm))))]
        changed = [*items[:before], items[norm], *items[before:norm], *items[norm + 1 :], *items]
        return Disturbance(programs={rank: changed}), _odd(layout, items[before].calls[0].comm, rank, Syndrome.DEADLOCK)
    if fault is JobFault.DEAD_LINK:
        source, destination = random.permutation([rank, _neighbour(layout, rank, random)]).tolist()
        sequence = (layout.pipeline_group(replica, tensor), source, destination)
        since = counts[sequence] + int(random.integers(1, MICROBATCHES + 1))
        link = frozenset({(source, destination)})
        return Disturbance(lost={sequence: since}), Expected(frozenset({Syndrome.COMMUNICATION_HANG}), links=link)
    if fault is JobFault.DEAD_GROUP:
        groups = layout.members()
        several = [layout.tensor_group(stage, replica), layout.data_group(stage, tensor), WORLD]
        comm = int(random.choice([each for each in several if len(groups[each]) > 1]))
        members = frozenset(groups[comm].tolist())
        lost = {(comm, -1, -1): counts[comm, -1, -1] + 1}
        return Disturbance(lost=lost), Expected(frozenset({Syndrome.COMMUNICATION_HANG}), members)
    return Disturbance(), Expected()


def _odd(layout: ParallelLayout, comm: int, rank: int, *syndromes: Syndrome) -> Expected:
    """Expect the rank that deviates from the others of its group."""
    members = frozenset(layout.members()[comm].tolist())
    return Expected(frozenset(syndromes), frozenset({rank}), members if len(members) == 2 else frozenset())


def _neighbour(layout: ParallelLayout, rank: int, random: np.random.Generator) -> int:
    """Return a rank that exchanges activations with ``rank``."""
    stage, replica, tensor = layout.place(rank)
    return layout.rank(int(random.choice([s for s in (stage - 1, stage + 1) if 0 <= s < layout.pp])), replica, tensor)


def _slowness(layout: ParallelLayout, fault: JobFault, rank: int, random: np.random.Generator) -> tuple[Slowness, Expected]:
    """Return the slowness of the job, and the expected verdict; both empty for other faults."""
    ranks = {
        JobFault.SLEEP_5: (Slowness(rank, sleep_ns=5 * MS), Cause.COMPUTE),
        JobFault.SLEEP_20: (Slowness(rank, sleep_ns=20 * MS), Cause.COMPUTE),
        JobFault.SLEEP_100: (Slowness(rank, sleep_ns=100 * MS), Cause.COMPUTE),
        JobFault.STARVED: (Slowness(rank, starved=1.5), Cause.COMPUTE),
        JobFault.GARBAGE: (Slowness(rank, garbage_ns=60 * MS), Cause.GARBAGE),
        JobFault.DATA: (Slowness(rank, data_ns=40 * MS), Cause.DATA),
    }
    if fault in ranks:
        slow, cause = ranks[fault]
        return slow, Expected(frozenset({Syndrome.NON_COMMUNICATION_SLOW}), frozenset({rank}), cause=cause)
    if fault not in (JobFault.SLOW_LINK, JobFault.SLOW_LINK_BOTH, JobFault.SLOW_RECEIVER):
        return Slowness(), Expected()
    link = (rank, _neighbour(layout, rank, random))
    links = [link] if fault is JobFault.SLOW_LINK else [link, link[::-1]]
    if fault is JobFault.SLOW_RECEIVER:
        stage, replica, tensor = layout.place(rank)
        links = [(layout.rank(s, replica, tensor), rank) for s in (stage - 1, stage + 1) if 0 <= s < layout.pp]
    slow = Slowness(links={each: float(random.uniform(4.0, 10.0)) for each in links})
    drags = frozenset({Syndrome.COMMUNICATION_SLOW})
    if fault is JobFault.SLOW_RECEIVER and len(links) > 1:
        return slow, Expected(drags, frozenset({rank}), direction=Direction.RECEIVES)
    return slow, Expected(drags, links=frozenset(links))
