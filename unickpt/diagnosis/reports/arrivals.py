"""Lateness of ranks at collectives, and the parts of a rank's time in a step.

Only collectives that all known members have entered count; ``wait_table`` covers the others.

The lateness of a rank in a step is its largest. One late arrival delays a step, and after a call that waits for all members
every rank is on time again, so a median of a hundred calls would not show it. Behind the first member, all ranks are late if
one is early. Behind the median member, only the ranks are late that others have waited for; of two members each is half as
late.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from unickpt.base.arrays import Floats, Ints
from unickpt.diagnosis.recording.records import Op, begins_ns
from unickpt.diagnosis.reports.job_records import JobRecords
from unickpt.diagnosis.snapshot.steps import STEP, steps_of


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrivals at collectives that all known members have entered: arrays ``[n]``, one row for each rank and collective.

    Attributes:
        rank, group, seq: int64: rank, communicator and number of the call.
        step: int64: step of the rank.
        behind_first_ns, behind_median_ns: float64: after the first member, and after the median one (negative if before).
    """

    rank: Ints
    group: Ints
    seq: Ints
    step: Ints
    behind_first_ns: Floats
    behind_median_ns: Floats


def arrivals(job: JobRecords) -> Arrivals:
    """Return all arrivals that can be compared, sorted by group, number and time."""
    columns: list[Ints] = []
    for rank in job.ranks.values():
        calls = rank.records["op"] <= Op.BARRIER
        part = rank.records[calls]
        columns.append(
            np.stack(
                [
                    np.full(len(part), rank.number, np.int64), rank.group[calls], part["seq"].astype(np.int64),
                    part["step"].astype(np.int64), begins_ns(part) + rank.to_clock_ns,
                ]
            )
        )  # fmt: skip
    table = np.concatenate(columns, axis=1) if columns else np.zeros((5, 0), np.int64)
    table = table[:, np.lexsort((table[4], table[2], table[1]))]
    new = np.ones(table.shape[1], bool)
    new[1:] = (table[1:3, 1:] != table[1:3, :-1]).any(axis=0)
    first = np.flatnonzero(new)
    counts = np.diff(np.append(first, table.shape[1]))
    known = np.array([int(np.isin(group.ranks, list(job.ranks)).sum()) for group in job.groups], np.int64)
    whole = (counts == known[table[1, first]]) & (counts > 1)
    call = np.cumsum(new) - 1
    table, call, first, counts = table[:, whole[call]], call[whole[call]], first[whole], counts[whole]
    first = np.append(0, np.cumsum(counts))[:-1]
    entered = table[4]
    low, high = entered[first + (counts - 1) // 2], entered[first + counts // 2]
    middle = np.repeat(low + (high - low) / 2 - entered[first], counts)  # small numbers, exact as floats
    behind = (entered - np.repeat(entered[first], counts)).astype(np.float64)
    return Arrivals(table[0], table[1], table[2], table[3], behind, behind - middle)


MEASURES = ("behind_first", "behind_median", "own", "waiting", "data", "garbage")


@dataclass(frozen=True, slots=True)
class StepTable:
    """Known steps of every rank.

    Attributes:
        ranks: int64 ``[r]``, ascending.
        steps: int64 ``[s]``, ascending; steps of which any rank has records.
        values: name of ``MEASURES`` -> float64 ``[r, s]``, nanoseconds, NaN where unknown: lateness behind the first and
            behind the median member (the largest of the step), own time (in no call that is waited for), waiting, and of the
            own time waits for data and garbage collections.
    """

    ranks: Ints
    steps: Ints
    values: Mapping[str, Floats]


def by_step(job: JobRecords, *, last: int | None = None) -> StepTable:
    """Return lateness and times by rank and step, of the ``last`` steps or of all."""
    came = arrivals(job)
    own = [steps_of(number, rank.records, offset_ns=rank.to_clock_ns) for number, rank in job.ranks.items()]
    spent = np.concatenate([np.zeros(0, STEP), *own])
    steps = np.unique(np.concatenate([came.step, spent["number"].astype(np.int64)]))
    if last is not None:
        steps = steps[-last:]
    ranks = np.array(list(job.ranks), np.int64)
    values = {name: np.full((len(ranks), len(steps)), np.nan) for name in MEASURES}
    if not len(steps):
        return StepTable(ranks, steps, values)
    here = came.step >= steps[0]
    cell = np.searchsorted(ranks, came.rank[here]), np.searchsorted(steps, came.step[here])
    np.fmax.at(values["behind_first"], cell, came.behind_first_ns[here])
    np.fmax.at(values["behind_median"], cell, came.behind_median_ns[here])
    spent = spent[spent["number"] >= steps[0]]
    cell = np.searchsorted(ranks, spent["rank"]), np.searchsorted(steps, spent["number"])
    values["own"][cell] = spent["own_ns"]
    values["waiting"][cell] = spent["end_ns"] - spent["begin_ns"] - spent["own_ns"]
    values["data"][cell], values["garbage"][cell] = spent["data_ns"], spent["garbage_ns"]
    return StepTable(ranks, steps, values)
