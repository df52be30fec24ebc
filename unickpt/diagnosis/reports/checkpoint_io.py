"""Seconds and bytes of saves and loads by rank, phase and checkpoint, as ByteCheckpoint's heat map shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from unickpt.base.arrays import Floats, Ints
from unickpt.diagnosis.recording.records import Flag, Op, bytes_in
from unickpt.diagnosis.reports.job_records import OP_NAMES, JobRecords


@dataclass(frozen=True, slots=True)
class PhaseSummary:
    """One phase over all ranks and checkpoints.

    Attributes:
        phase: name of the operation, as in ``OP_NAMES``.
        ranks: number of ranks with records.
        median_ns: median over the ranks of their time for one checkpoint, in nanoseconds.
        slowest: rank with the longest mean time for one checkpoint.
        slowest_ns: that time.
        slowest_bytes: its mean bytes for one checkpoint.
        bytes: sum over all ranks and checkpoints.
        background: whether training went on meanwhile.
    """

    phase: str
    ranks: int
    median_ns: float
    slowest: int
    slowest_ns: float
    slowest_bytes: float
    bytes: int
    background: bool


@dataclass(frozen=True, slots=True)
class CheckpointIo:
    """Phases of all checkpoints in the records.

    Attributes:
        ranks: int64 ``[r]``, ascending.
        steps: int64 ``[c]``: steps of the checkpoints, ascending.
        times: phase -> float64 ``[r, c]`` in nanoseconds, NaN where there is none.
        sizes: phase -> float64 ``[r, c]`` in bytes, only for phases with bytes.
        summaries: for each phase with records.
    """

    ranks: Ints
    steps: Ints
    times: Mapping[str, Floats]
    sizes: Mapping[str, Floats]
    summaries: tuple[PhaseSummary, ...]


def checkpoint_io(job: JobRecords) -> CheckpointIo:
    """Return the phases of saves and loads that the rings hold. Several saves of one step are added."""
    ranks = np.array(list(job.ranks), np.int64)
    parts = {number: rank.records[rank.records["op"] >= Op.SAVE_STAGE] for number, rank in job.ranks.items()}
    found = [part["step"].astype(np.int64) for part in parts.values()]
    steps = np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)
    times, sizes, summaries = {}, {}, []
    for op in (each for each in Op if each.checkpoint_io):
        spent = np.full((len(ranks), len(steps)), np.nan)
        moved, counts, background = spent.copy(), np.zeros(spent.shape), False
        for row, part in enumerate(parts.values()):
            here = part[part["op"] == op]
            column = np.searchsorted(steps, here["step"].astype(np.int64))
            for table, values in ((spent, here["end_ns"] - here["call_ns"]), (moved, bytes_in(here))):
                table[row, column] = 0
                np.add.at(table[row], column, np.maximum(values, 0).astype(np.float64))
            np.add.at(counts[row], column, 1)
            background = background or bool((here["flags"] & int(Flag.ASYNC)).any())
        if not counts.any():
            continue
        times[OP_NAMES[op]] = spent
        if np.nansum(moved):
            sizes[OP_NAMES[op]] = moved
        known = counts.sum(axis=1) > 0
        mean = np.nansum(spent, axis=1)[known] / counts.sum(axis=1)[known]
        at = int(np.argmax(mean))
        each = np.nansum(moved, axis=1)[known][at] / counts.sum(axis=1)[known][at]
        summaries.append(
            PhaseSummary(
                OP_NAMES[op], int(known.sum()), float(np.median(mean)), int(ranks[known][at]), float(mean[at]), float(each),
                int(np.nansum(moved)), background,
            )
        )  # fmt: skip
    return CheckpointIo(ranks, steps, times, sizes, tuple(summaries))
