"""What the ranks did in the last steps: for every rank and each of equal parts of the time, what took most of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from unickpt.timing.records import Op, Phase
from unickpt.views.gathering import Ints, Rank, View, unended
from unickpt.views.lateness import Floats

KINDS = ("nothing known", "own time", "optimizer", "communication", "waits for data", "garbage collection", "checkpoint")
NOTHING, OWN, OPTIMIZER, COMMUNICATION, DATA, GARBAGE, CHECKPOINT = range(len(KINDS))
_HANG_SHARE = 0.25  # of the window that is given to what has not ended


@dataclass(frozen=True, slots=True)
class Timeline:
    """What some ranks did in the last steps.

    Attributes:
        ranks: whose lines these are.
        begin_ns, end_ns: of the window, on the job's clock.
        kinds: uint8 ``[ranks, parts]``, of ``KINDS``.
        steps: ``(number, begin_ns)`` of each step in the window: when the median rank began it.
        goes_on_s: what is left out at its end, if nothing has ended for so long; 0 if nothing is.
    """

    ranks: tuple[int, ...]
    begin_ns: int
    end_ns: int
    kinds: npt.NDArray[np.uint8]
    steps: tuple[tuple[int, int], ...]
    goes_on_s: float


def timeline(view: View, ranks: Sequence[int], *, steps: int = 8, parts: int = 1200) -> Timeline:
    """The last steps of some ranks.

    Args:
        view: of the job.
        ranks: whose.
        steps: how many, counted back from the newest.
        parts: that the window is cut into.
    """
    chosen = [view.ranks[rank] for rank in ranks]
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
    known = np.array([group.ends_known for group in view.groups], bool)
    kinds = [_line(rank, edges, first_ns, known) for rank in chosen]
    return Timeline(
        tuple(ranks), first_ns, end_ns, np.stack(kinds) if kinds else np.zeros((0, parts), np.uint8), tuple(middle),
        max(until_ns - end_ns, 0) / 1e9,
    )  # fmt: skip


def _line(rank: Rank, edges: Ints, first_ns: int, ends_known: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """uint8 ``[parts]``: of one rank."""
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
    """float64 ``[parts]``: how much of each part the union of ``[2, n]`` spans (beginnings and ends) covers."""
    spans = np.clip(spans[:, np.argsort(spans[0], kind="stable")], edges[0], edges[-1])
    if not spans.shape[1]:
        return np.zeros(len(edges) - 1)
    reach = np.maximum.accumulate(spans[1])
    begin = np.maximum(spans[0], np.append(spans[0, 0], reach[:-1]))  # what an earlier one has covered is not counted again
    keep = reach > begin
    begin, reach = begin[keep], reach[keep]
    total = _before(begin, edges) - _before(reach, edges)
    return np.diff(total).astype(np.float64)


def _before(moments: Ints, edges: Ints) -> Floats:
    """float64 ``[edges]``: sum of what each edge is after each of the ascending moments that are before it."""
    sums = np.append(0, np.cumsum(moments.astype(np.float64)))
    count = np.searchsorted(moments, edges, side="right")
    result: Floats = count * edges.astype(np.float64) - sums[count]
    return result
