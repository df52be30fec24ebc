"""Members that have entered the same call of a communicator with another operation, element type or shape."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.detectors.observations import CallVariant
from unickpt.diagnosis.detectors.verdicts import Syndrome, Verdict
from unickpt.diagnosis.detectors.waits import Groups, group_of
from unickpt.diagnosis.recording.records import Op
from unickpt.diagnosis.snapshot.progress import ProgressTable

_FLAT = (Op.ALL_REDUCE, Op.BROADCAST, Op.REDUCE)  # for these, backends look at the number of elements and not at the shape


def mismatches(rows: ProgressTable, groups: Groups) -> list[Verdict]:
    """Return calls in which a rank waits and that differ between the members that have entered them.

    The ranks that differ from the majority are at fault; without a majority, all of them.
    """
    rows = rows[rows["source"] < 0]
    seq = np.where(rows["blocked"] > 0, rows["blocked"], rows["entered"])  # a rank that does not wait got through
    order = np.lexsort((seq, rows["comm"]))
    rows, seq = rows[order], seq[order]
    if not len(rows):
        return []
    first = np.flatnonzero(np.concatenate([[True], (np.diff(rows["comm"]) != 0) | (np.diff(seq) != 0)]))
    group = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(rows))))
    differs, waits = np.zeros(len(first), bool), np.zeros(len(first), bool)
    for column in (rows["op"], rows["dtype"], sizes(rows, group)):
        differs[group[column != column[first][group]]] = True
    waits[group[rows["blocked"] > 0]] = True
    return [_mismatch(rows[group == at], int(seq[first[at]]), groups) for at in np.flatnonzero(differs & waits).tolist()]


def sizes(rows: ProgressTable, group: npt.NDArray[np.intp]) -> npt.NDArray[np.uint64]:
    """Return what counts of the size of each row's call: the number of elements, or else the hash of the shape.

    Args:
        rows: positions of ranks in calls.
        group: for each row, the number of the call that it is compared in. Of a call, all members are compared alike.
    """
    flat = np.ones(int(group.max(initial=-1)) + 1, bool)
    np.logical_and.at(flat, group, np.isin(rows["op"], _FLAT) & (rows["elements"] > 0))  # all members, and all known
    found: npt.NDArray[np.uint64] = np.where(flat[group], rows["elements"], rows["shape"])
    return found


def _mismatch(rows: ProgressTable, seq: int, groups: Groups) -> Verdict:
    """Return the verdict on one call, from the rows of the members that have entered it."""
    calls = [tuple(what) for what in rows[["op", "dtype", "shape"]].tolist()]
    counts = Counter(calls)
    most = max(counts.values())
    usual = [what for what, count in counts.items() if count == most]
    ranks = rows["rank"].tolist()
    odd = [rank for rank, what in zip(ranks, calls, strict=True) if what not in usual or len(usual) > 1]
    variants = tuple(
        CallVariant(
            Op(op),
            dtype,
            shape,
            tuple(rank for rank, own in zip(ranks, calls, strict=True) if own == (op, dtype, shape)),
            int(rows["elements"][calls.index((op, dtype, shape))]),
        )
        for (op, dtype, shape), _ in counts.most_common(4)
    )
    return Verdict(
        Syndrome.MISMATCH, tuple(sorted(odd)), int(rows["call_ns"].max()), group_of(int(rows["comm"][0]), groups),
        variants[0].op, seq, victims=len(rows) - len(odd), confidence=1.0 if len(usual) == 1 else 0.5, evidence=variants,
    )  # fmt: skip
