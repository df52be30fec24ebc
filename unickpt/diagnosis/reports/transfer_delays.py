"""Durations of point-to-point calls of which both sides are known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unickpt.base.arrays import Floats, Ints
from unickpt.diagnosis.detectors.medians import grouped_quantiles
from unickpt.diagnosis.detectors.p2p_links import begun
from unickpt.diagnosis.recording.records import Op, begins_ns, bytes_in
from unickpt.diagnosis.reports.job_records import JobRecords


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """Arrays ``[n]``, one row for each transfer that has ended.

    Attributes:
        source, destination: int64 ranks.
        size_bytes: int64, bytes sent.
        took_ns: float64: from the time at which both sides had entered and the receiver waited to the end on the receiver.
    """

    source: Ints
    destination: Ints
    size_bytes: Ints
    took_ns: Floats


@dataclass(frozen=True, slots=True)
class Delay:
    """One cell of the delay matrix.

    Attributes:
        source, destination: ranks.
        size_class: ``2 ** (size_class - 1) <= bytes < 2 ** size_class``; 0 for no bytes, -1 for all sizes together.
        median_ns: median duration of its transfers.
        count: number of its transfers.
    """

    source: int
    destination: int
    size_class: int
    median_ns: float
    count: int


def pairs(job: JobRecords) -> Ints:
    """Return int64 ``[p, 4]``: rank and record of every send, rank and record of its receive."""
    sides: dict[Op, list[Ints]] = {Op.SEND: [], Op.RECEIVE: []}
    for rank in job.ranks.values():
        for op in sides:
            at = np.flatnonzero(rank.records["op"] == op)
            part = rank.records[at]
            own, peer = np.full(len(at), rank.number, np.int64), part["peer"].astype(np.int64)
            ends = (own, peer) if op is Op.SEND else (peer, own)
            sides[op].append(np.stack([rank.group[at], *ends, part["seq"].astype(np.int64), own, at]))
    both = [np.concatenate([np.zeros((6, 0), np.int64), *sides[op]], axis=1) for op in sides]
    side = np.repeat([0, 1], [table.shape[1] for table in both])
    table = np.concatenate(both, axis=1)
    order = np.lexsort((side, *table[:4]))
    table, side = table[:, order], side[order]
    met = (table[:4, 1:] == table[:4, :-1]).all(axis=0) & (side[:-1] == 0) & (side[1:] == 1)
    at = np.flatnonzero(met)
    return np.stack([table[4, at], table[5, at], table[4, at + 1], table[5, at + 1]], axis=1)


def transfer_times(job: JobRecords) -> TransferTimes:
    """Return all transfers that have ended, in any order."""
    found = pairs(job)
    rows: list[Ints] = []
    for source, sender in job.ranks.items():
        own = found[found[:, 0] == source]
        for destination in np.unique(own[:, 2]).tolist():
            receiver = job.ranks[destination]
            here = own[own[:, 2] == destination]
            sent, got = sender.records[here[:, 1]], receiver.records[here[:, 3]]
            waits = np.where(got["wait_ns"] > 0, got["wait_ns"] + receiver.to_clock_ns, 0)
            begin = begun(begins_ns(sent) + sender.to_clock_ns, begins_ns(got) + receiver.to_clock_ns, waits)
            took = got["end_ns"] + receiver.to_clock_ns - begin
            ended = (got["end_ns"] > 0) & (took >= 0)  # negative: the clock error exceeds the duration
            columns = [np.full(len(here), source), np.full(len(here), destination), bytes_in(sent), took]
            rows.append(np.stack(columns)[:, ended])
    table = np.concatenate([np.zeros((4, 0), np.int64), *rows], axis=1)
    return TransferTimes(table[0], table[1], table[2], table[3].astype(np.float64))


def delay_matrix(made: TransferTimes) -> list[Delay]:
    """Return the median of every pair of ranks for each class of sizes and for all sizes, by class, source and destination."""
    sizes = np.frexp(made.size_bytes.astype(np.float64))[1].astype(np.int64)  # as int.bit_length
    return [*_medians(made, np.full(len(sizes), -1, np.int64)), *_medians(made, sizes)]


def _medians(made: TransferTimes, sizes: Ints) -> list[Delay]:
    keys = np.stack([sizes, made.source, made.destination], axis=1)
    cells, cell = np.unique(keys, axis=0, return_inverse=True)
    _, (middle,), counts = grouped_quantiles(cell.reshape(-1), made.took_ns)
    found = zip(cells.tolist(), middle.tolist(), counts.tolist(), strict=True)
    return [Delay(source, destination, size, median, count) for (size, source, destination), median, count in found]
