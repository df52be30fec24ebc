"""Activity of ranks in the last steps: the main activity of every rank in each of equal parts of the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Floats, Ints
from unickpt.diagnosis.recording.records import Op, Phase
from unickpt.diagnosis.reports.job_records import JobRecords, RankRecords, unended

KINDS = ("nothing known", "own time", "optimizer", "communication", "waits for data", "garbage collection", "checkpoint")
NOTHING, OWN, OPTIMIZER, COMMUNICATION, DATA, GARBAGE, CHECKPOINT = range(len(KINDS))
_HANG_SHARE = 0.25  # largest share of the window for calls that have not ended


@dataclass(frozen=True, slots=True)
class Timeline:
    """Activity of ranks in the last steps.

    Attributes:
        ranks: rank of each line.
        begin_ns, end_ns: window on the job's clock.
        kinds: uint8 ``[ranks, parts]``, of ``KINDS``.
        steps: ``(number, begin_ns)`` of each step in the window, for the median rank.
        goes_on_s: seconds left out at the end, in which no call ended.
    """

    ranks: tuple[int, ...]
    begin_ns: int
    end_ns: int
    kinds: npt.NDArray[np.uint8]
    steps: tuple[tuple[int, int], ...]
    goes_on_s: float


def timeline(job: JobRecords, ranks: Sequence[int], *, steps: int = 8, parts: int = 1200) -> Timeline:
    """Return the last steps of some ranks.

    Args:
        job: records of the job.
        ranks: global ranks.
        steps: number of newest steps.
        parts: number of parts of the window.
    """
    chosen = [job.ranks[rank] for rank in ranks]
    begins: dict[int, list[int]] = {}
    last_ns = 0
    for rank in chosen:
        records = rank.records
        marks = records[records["op"] == Op.STEP]
        for number, begin in zip(marks["step"].tolist(), (marks["call_ns"] + rank.to_clock_ns).tolist(), strict=True):
            begins.setdefault(number, []).append(begin)
        if len(records):
            last_ns = max(last_ns, int(records["call_ns"].max() + rank.to_clock_ns))
            last_ns = max(last_ns, int(records["end_ns"].max()) + rank.to_clock_ns if records["end_ns"].any() else 0)
    newest = sorted(begins)[-steps:]
    middle = [(number, int(np.median(np.array(begins[number])))) for number in newest]
    first_ns = min((begin for number in newest for begin in begins[number]), default=last_ns - 10_000_000_000)
    first_ns = min(first_ns, last_ns - 1_000_000)
    until_ns = max([rank.until_ns for rank in chosen if rank.alive], default=last_ns)
    end_ns = max(min(until_ns, last_ns + int((last_ns - first_ns) * _HANG_SHARE)), last_ns)
    edges = np.linspace(0, end_ns - first_ns, parts + 1).astype(np.int64)
    known = np.array([group.ends_known for group in job.groups], bool)
    kinds = [_line(rank, edges, first_ns, known) for rank in chosen]
    return Timeline(
        tuple(ranks),
        first_ns,
        end_ns,
        np.stack(kinds) if kinds else np.zeros((0, parts), np.uint8),
        tuple(middle),
        max(until_ns - end_ns, 0) / 1e9,
    )


def _line(rank: RankRecords, edges: Ints, first_ns: int, ends_known: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """Return uint8 ``[parts]`` for one rank."""
    records = rank.records
    to_window = rank.to_clock_ns - first_ns
    shares = np.zeros((len(KINDS), len(edges) - 1))
    if not len(records):
        return np.zeros(len(edges) - 1, np.uint8)
    begin, end = records["call_ns"] + to_window, records["end_ns"] + to_window
    going = unended(rank, ends_known)
    waited = (records["op"] <= Op.RECEIVE) & (records["wait_ns"] > 0) & ((records["end_ns"] > 0) | going)
    until = rank.until_ns - first_ns
    waits = np.stack([records["wait_ns"] + to_window, np.where(records["end_ns"] > 0, end, until)])[:, waited]
    shares[COMMUNICATION] = _covered(waits, edges)
    for kind, op in ((DATA, Op.DATA), (GARBAGE, Op.GARBAGE), (CHECKPOINT, Op.CHECKPOINT)):
        shares[kind] = _covered(np.stack([begin, end])[:, records["op"] == op], edges)
    order = np.argsort(begin, kind="stable")
    order = order[records["op"][order] <= Op.RECEIVE]
    within = (records["phase"][order] == Phase.OPTIMIZER)[:-1] & (records["phase"][order] == Phase.OPTIMIZER)[1:]
    between = np.stack([begin[order][:-1], begin[order][1:]])[:, within]
    lived = _covered(np.array([[int(begin.min())], [max(until, int(begin.max()))]]), edges)
    rest = np.maximum(lived - shares.sum(axis=0), 0)
    shares[OPTIMIZER] = np.minimum(_covered(between, edges), rest)
    shares[OWN] = rest - shares[OPTIMIZER]
    kinds: npt.NDArray[np.uint8] = np.argmax(shares, axis=0).astype(np.uint8)
    kinds[lived <= 0] = NOTHING
    return kinds


def _covered(spans: Ints, edges: Ints) -> Floats:
    """Return float64 ``[parts]``: length of each part that the union of ``[2, n]`` spans (begins and ends) covers."""
    spans = np.clip(spans[:, np.argsort(spans[0], kind="stable")], edges[0], edges[-1])
    if not spans.shape[1]:
        return np.zeros(len(edges) - 1)
    reach = np.maximum.accumulate(spans[1])
    begin = np.maximum(spans[0], np.append(spans[0, 0], reach[:-1]))  # without the part that an earlier span covers
    keep = reach > begin
    begin, reach = begin[keep], reach[keep]
    total = _before(begin, edges) - _before(reach, edges)
    return np.diff(total).astype(np.float64)


def _before(moments: Ints, edges: Ints) -> Floats:
    """Return float64 ``[edges]``: sum of the distances of each edge to the ascending times before it."""
    sums = np.append(0, np.cumsum(moments.astype(np.float64)))
    count = np.searchsorted(moments, edges, side="right")
    result: Floats = count * edges.astype(np.float64) - sums[count]
    return result
