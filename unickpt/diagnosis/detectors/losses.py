"""Find time that no comparison of medians between ranks shows.

- Garbage collections at different steps on different ranks: every step waits for somebody, and no rank is slower than another.
- A rank, or all ranks of a host, that are late in some steps, such as every seventh, and in the others not.
- All ranks take longer than earlier in the job.

They are judged by the share of the time that they cost, over more steps than a rank that is always slow. Where sound ranks are
late by chance, all are equally often.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Floats
from unickpt.diagnosis.detectors.hints import AllSlower
from unickpt.diagnosis.detectors.medians import medians_of_others, row_medians
from unickpt.diagnosis.detectors.observations import LongStepsNowAndThen, RotatingPauses, SlowerThanBefore
from unickpt.diagnosis.detectors.stragglers import at_least
from unickpt.diagnosis.detectors.verdicts import Cause, Syndrome, Verdict
from unickpt.diagnosis.snapshot.steps import StepRows

OVER, LONGER = 64, 256  # newest steps that are compared: first, and where nothing is found in them
FEWEST_STEPS = 24  # of them that must be known
LOST = 0.05  # smallest loss to report, as a share of the time
COLLECTIONS = 3  # smallest number of steps in which each of at least two ranks collects
FALSE_ALARMS = 1e-4  # probability of a false alarm by chance, over all ranks of a job
LATE_OF_STEP = 0.5  # smallest excess of a late step, as a share of the median step
ALONE = 0.8  # share of the late steps of the job that are those of the rank
WARM_UP = 5
REGULAR = 4  # smallest number of late steps at equal distances
NEW, OLD = 32, 32  # newest steps, and oldest known ones, of a job that has become slower
SLOWER = 1.4  # smallest multiple of the own time before


def losses(steps: StepRows, hosts: Mapping[int, str] = MappingProxyType({})) -> list[Verdict]:
    """Return verdicts on ranks that are late now and then; otherwise on garbage collections in turn.

    Args:
        steps: steps of every rank, in any order.
        hosts: host of each rank; empty if unknown. All ranks of a host may be late together.
    """
    steps = steps[steps["number"] > WARM_UP]
    for over in (OVER, LONGER):
        ranks, table, _ = _tables(steps, over)
        if len(ranks) < 2 or table.shape[2] < FEWEST_STEPS:
            return []
        each = [(rank,) for rank in ranks.tolist()]
        together = _by_host(ranks.tolist(), hosts)
        found = _now_and_then(ranks, table, each) or (_now_and_then(ranks, table, together) if len(together) > 1 else [])
        found = found or (_in_turn(ranks, table) if over == OVER else [])
        if found or table.shape[2] < over:
            return found
    return []


def slower_than_before(steps: StepRows, hosts: Mapping[int, str], cpu_waits: Sequence[tuple[int, float]]) -> list[Verdict]:
    """Return a verdict on all ranks if each takes longer than earlier in the job, with the same calls in a step.

    Nearly all newest steps of each rank must be longer than nearly all of its oldest known ones, and not because other programs
    use the processors.

    Args:
        steps: steps of every rank, in any order.
        hosts: host of each rank.
        cpu_waits: ``Snapshot.cpu_waits``. Without them it is not known what other programs do, and nothing is said.
    """
    ranks, table, numbers = _tables(steps[steps["number"] > WARM_UP], LONGER)
    if not len(ranks) or table.shape[2] < NEW + OLD:
        return []
    calls = table[_COLUMNS.index("calls")]
    alike = (calls == calls[:, -1:]).all(axis=0) & ~table[_COLUMNS.index("long")].any(axis=0)  # other calls, other work
    table, numbers = table[:, :, alike], numbers[alike]
    if table.shape[2] < max(NEW + OLD, len(alike) / 2):
        return []
    own = table[_COLUMNS.index("own_ns")]
    old, new = own[:, :OLD], own[:, -NEW:]
    usual = row_medians(old)
    times = row_medians(new) / np.maximum(usual, 1.0)
    apart = np.quantile(new, 0.1, axis=1) > np.quantile(old, 0.9, axis=1)
    length = float(np.median(table[1, :, -NEW:] - table[0, :, -NEW:]))
    excess = float(np.median(row_medians(new) - usual))
    if not apart.all() or times.min() < SLOWER or excess < LOST * length:
        return []
    before, now = _waited_per_step(table[:, :, :OLD], cpu_waits), _waited_per_step(table[:, :, -NEW:], cpu_waits)
    if before is None or now is None or now - before > excess / 2:
        return []
    evidence = SlowerThanBefore(excess, length, float(np.median(times)), NEW, (int(numbers[0]), int(numbers[OLD - 1])))
    cause = next(
        (
            cause
            for cause, name in ((Cause.DATA, "data_ns"), (Cause.GARBAGE, "garbage_ns"))
            if _grown(table[_COLUMNS.index(name)]) > excess / 2
        ),
        Cause.COMPUTE,
    )
    there = tuple(dict.fromkeys(hosts[rank] for rank in ranks.tolist() if rank in hosts))
    return [
        Verdict(
            Syndrome.NON_COMMUNICATION_SLOW, tuple(ranks.tolist()), int(table[0, :, -NEW].min()), victims=len(ranks),
            cause=cause, evidence=(evidence,), next=AllSlower(there, int(numbers[-NEW]), int(numbers[-1])),
        )
    ]  # fmt: skip


def _waited_per_step(table: Floats, cpu_waits: Sequence[tuple[int, float]]) -> float | None:
    """Return how long the median rank waited for a processor in a step, in nanoseconds; None without a look in these steps."""
    begin, end = float(table[0].min()), float(table[1].max())
    shares = [share for at_ns, share in cpu_waits if begin <= at_ns <= end]
    return float(np.mean(shares)) * float(np.median(table[1] - table[0])) if shares else None


def _grown(times: Floats) -> float:
    """Return by how much a part of the own time has grown, median over ranks."""
    return float(np.median(row_medians(times[:, -NEW:]) - row_medians(times[:, :OLD])))


def _by_host(ranks: Sequence[int], hosts: Mapping[int, str]) -> list[tuple[int, ...]]:
    """Return the ranks of each host; empty if a host is unknown."""
    found: dict[str, list[int]] = {}
    for rank in ranks:
        if rank not in hosts:
            return []
        found.setdefault(hosts[rank], []).append(rank)
    return [tuple(members) for members in found.values()]


_COLUMNS = ("begin_ns", "end_ns", "own_ns", "garbage_ns", "data_ns", "long", "calls")


def _tables(steps: StepRows, over: int) -> tuple[npt.NDArray[np.int32], Floats, npt.NDArray[np.uint32]]:
    """Return the ranks, for the newest steps that all of them have ``[column, rank, step]``, and the numbers of these steps."""
    ranks, row = np.unique(steps["rank"], return_inverse=True)
    numbers, count = np.unique(steps["number"], return_counts=True)
    numbers = numbers[count == len(ranks)][-over:]
    keep = np.isin(steps["number"], numbers)
    table = np.full((len(_COLUMNS), len(ranks), len(numbers)), np.nan)
    at = np.searchsorted(numbers, steps["number"][keep])
    for place, name in enumerate(_COLUMNS):
        table[place, row[keep], at] = steps[name][keep]
    return ranks, table, numbers


def _now_and_then(ranks: npt.NDArray[np.int32], table: Floats, units: Sequence[tuple[int, ...]]) -> list[Verdict]:
    """Return a verdict on the unit, a rank or the ranks of a host, to which nearly all late steps belong."""
    begin, end, own, garbage, data, long, _ = table
    length = np.median(end - begin, axis=0)
    usual = float(np.median(length))
    rows = [np.searchsorted(ranks, unit) for unit in units]
    more = own - row_medians(own)[:, None]  # than the rank itself usually takes: stages of a pipeline differ
    more = np.array([np.median(more[row], axis=0) for row in rows])
    excess = more - np.maximum(medians_of_others(more), 0.0)  # nobody is late where the others are faster than they usually are
    excess = np.where(long.any(axis=0), 0.0, excess)  # saves and evaluations are not judged
    late = excess > LATE_OF_STEP * usual
    hits = late.sum(axis=1)
    at = int(np.argmax(hits))
    slow, total = int(hits[at]), int(hits.sum())
    lost = float(excess[at][late[at]].sum())
    if slow < 2 or slow > late.shape[1] / 2 or slow < ALONE * total or lost < LOST * float(length.sum()):
        return []
    where = np.flatnonzero(late[at])
    if len(units) * at_least(slow, total, 1 / len(units)) * _regular(where, late.shape[1]) > FALSE_ALARMS / 2:
        return []
    distances = np.bincount(np.diff(where))
    every = int(distances.argmax()) if distances.max() * 2 >= slow else 0
    first = int(rows[at][0])
    cause = next(
        (cause for cause, column in ((Cause.DATA, data), (Cause.GARBAGE, garbage)) if _explains(column[first], late[at], lost)),
        Cause.COMPUTE,
    )
    evidence = LongStepsNowAndThen(
        float(np.median(excess[at][late[at]])), lost / late.shape[1], usual, slow, late.shape[1], every
    )
    return [
        Verdict(
            Syndrome.NON_COMMUNICATION_SLOW, units[at], int(begin[first, where[0]]), victims=len(ranks) - len(units[at]),
            confidence=slow / total, cause=cause, evidence=(evidence,),
        )
    ]  # fmt: skip


def _regular(where: npt.NDArray[np.intp], steps: int) -> float:
    """Return the probability of late steps at equal distances by chance; 1 for other distances, or for few steps."""
    if len(where) < REGULAR or len(set(np.diff(where).tolist())) > 1:
        return 1.0
    patterns = steps * steps / (2 * (len(where) - 1))  # of so many steps at equal distances
    return float(min(1.0, patterns / math.comb(steps, len(where))))


def _explains(times: Floats, late: npt.NDArray[np.bool_], lost: float) -> bool:
    """Return whether a part of a rank's own times, beyond the usual, is more than half of what late steps have cost."""
    return float((times - np.median(times))[late].sum()) > lost / 2


def _in_turn(ranks: npt.NDArray[np.int32], table: Floats) -> list[Verdict]:
    """Collections at the same steps would cost those of the rank with the longest ones; the rest is lost.

    A collection costs what the rank's own time exceeds the usual: a device that has work to do hides it.
    """
    begin, end, own, garbage, _, long, _ = table
    more = np.maximum(own - row_medians(own)[:, None], 0.0)
    garbage = np.where(long.any(axis=0), 0.0, np.minimum(garbage, more))
    lost = float(garbage.max(axis=0).sum() - garbage.sum(axis=1).max())
    length = np.median(end - begin, axis=0)
    often = (garbage > 0).sum(axis=1) >= COLLECTIONS
    if often.sum() < 2 or lost < LOST * float(length.sum()):
        return []
    count = garbage.shape[1]
    evidence = RotatingPauses(lost / count, float(length.mean()), count, int((garbage.max(axis=0) > 0).sum()))
    return [
        Verdict(
            Syndrome.NON_COMMUNICATION_SLOW, tuple(ranks[often].tolist()), int(begin.min()), victims=len(ranks),
            cause=Cause.GARBAGE, evidence=(evidence,),
        )
    ]  # fmt: skip
