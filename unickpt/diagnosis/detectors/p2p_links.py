"""Find slow links by comparing point-to-point transfers.

A transfer begins when both sides have entered it, so a late rank does not make its link look slow. In the matrix of sources
and destinations a hot cell is a slow link, a hot row a slow sender, a hot column a slow receiver (C4, arXiv 2406.04594,
section 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.base.arrays import Floats, Ints
from unickpt.diagnosis.detectors.medians import grouped_quantiles, medians_of_others
from unickpt.diagnosis.detectors.observations import Baseline, Direction, SlowTransfers
from unickpt.diagnosis.detectors.verdicts import Syndrome, Verdict
from unickpt.diagnosis.recording.records import Op
from unickpt.diagnosis.snapshot.snapshot import Calls

SMALLEST_NS = 200_000.0
TIMES = 2.5  # times the median of other links at the same size
AT_ONCE_NS = 50_000  # after the begin of a wait: the data was already there

# One row per point-to-point call of which both sides are known.
TRANSFER = np.dtype(
    [
        ("source", "i4"),  # global ranks
        ("destination", "i4"),
        ("bytes", "i8"),
        ("ns", "f8"),  # from the entry of the later side to the end on the receiver
    ]
)
TransferRows = npt.NDArray[Any]  # of dtype ``TRANSFER``


def begun(send_call_ns: Ints, receive_call_ns: Ints, receive_wait_ns: Ints) -> Ints:
    """Return the begin of transfers, ``[n]``, on one clock. Unknown waits are 0."""
    found: Ints = np.maximum(np.maximum(send_call_ns, receive_call_ns), receive_wait_ns)
    return found


def transfers_of(calls: Calls) -> TransferRows:
    """Return transfers, from the time at which both sides had entered and the receiver waited to the end on the receiver.

    A late rank does not make its link look slow. Data that arrived before the receiver waited is left out: gloo shows the end
    only to a wait, so the duration is unknown.

    Args:
        calls: calls of all ranks, on one clock.
    """
    single = calls[(calls["source"] >= 0) & (calls["destination"] >= 0)]
    sends, receives = single[single["op"] == Op.SEND], single[(single["op"] == Op.RECEIVE) & (single["end_ns"] > 0)]
    names = ["comm", "source", "destination", "seq"]
    if not len(sends) or not len(receives):
        return np.zeros(0, TRANSFER)
    keys = np.stack([np.r_[sends[name], receives[name]].astype(np.int64) for name in names], axis=1)
    key = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
    _, at, of = np.intersect1d(key[: len(sends)], key[len(sends) :], return_indices=True)
    sends, receives = sends[at], receives[of]
    out = np.zeros(len(at), TRANSFER)
    out["source"], out["destination"] = sends["source"], sends["destination"]
    out["bytes"] = receives["bytes"]
    out["ns"] = np.maximum(receives["end_ns"] - begun(sends["call_ns"], receives["call_ns"], receives["wait_ns"]), 0)
    unknown = (receives["wait_ns"] > np.maximum(sends["call_ns"], receives["call_ns"])) & (out["ns"] < AT_ONCE_NS)
    known: TransferRows = out[~unknown]
    return known


def slow_links(
    transfers: TransferRows, *, fewest: int = 8, hosts: npt.ArrayLike | None = None, clock_error_ns: float = 0.0
) -> list[Verdict]:
    """Return verdicts on links that are slower than others of the same size in three of four transfers, the slowest first.

    If all links of a rank in one direction are slow, the verdict is on the rank.

    Args:
        transfers: transfers of the last steps.
        fewest: smallest number of transfers of a link that is judged.
        hosts: host number of every rank. Links within a host are compared with each other only.
        clock_error_ns: largest error between the clocks of two hosts; added to the limit.
    """
    if not len(transfers):
        return []
    pairs, link = np.unique(transfers["source"].astype(np.int64) << 32 | transfers["destination"], return_inverse=True)
    ends = np.stack([pairs >> 32, pairs & 0xFFFFFFFF], axis=1)
    sizes = np.frexp(transfers["bytes"].astype(np.float64))[1].astype(np.int64)  # number of bits
    if hosts is not None:
        host = np.asarray(hosts)[ends]
        sizes = sizes << 1 | (host[:, 0] == host[:, 1])[link]
    keys = sizes * len(pairs) + link
    keys, (middle, quartile), counts = grouped_quantiles(keys, transfers["ns"], 0.5, 0.25)
    enough = counts >= fewest
    keys, middle, quartile = keys[enough], middle[enough], quartile[enough]
    times = np.zeros(len(pairs))  # factor at the worst size
    for size in np.unique(keys // len(pairs)):
        here = np.flatnonzero(keys // len(pairs) == size)
        others = medians_of_others(middle[here, None])[:, 0]
        slow = (quartile[here] > TIMES * others + clock_error_ns) & (middle[here] > SMALLEST_NS)
        own = keys[here[slow]] % len(pairs)
        times[own] = np.maximum(times[own], middle[here[slow]] / others[slow])
    return by_sides(ends, times, np.isin(np.arange(len(pairs)), keys % len(pairs)))


def by_hosts(verdicts: Sequence[Verdict], hosts: Mapping[int, str]) -> list[Verdict]:
    """Return the verdicts with one alone for all slow links from one host to another one, which may be hundreds.

    Args:
        verdicts: those on links have one observation, the slowest first.
        hosts: of the ranks.
    """
    found: dict[tuple[object, ...], list[Verdict]] = {}
    for at, verdict in enumerate(verdicts):
        way = tuple(hosts.get(rank, "") for rank in verdict.link or ())
        apart = len(set(way)) == 2 and all(way) and isinstance(verdict.evidence[0], SlowTransfers)
        found.setdefault(way if apart else (at,), []).append(verdict)
    return [_one_of(each, way) if len(way) == 2 else each[0] for way, each in found.items()]


def _one_of(verdicts: Sequence[Verdict], way: tuple[object, ...]) -> Verdict:
    """Return one verdict on the slow links from one host to another one."""
    (slowest,), links = verdicts[0].evidence, tuple(each.link for each in verdicts if each.link is not None)
    assert isinstance(slowest, SlowTransfers)
    evidence = replace(slowest, hosts=tuple(map(str, way)), links=links)
    since_ns, victims = min(each.since_ns for each in verdicts), len({destination for _, destination in links})
    return replace(verdicts[0], evidence=(evidence,), since_ns=since_ns, victims=victims)


def by_sides(
    ends: Ints, times: Floats, known: npt.NDArray[np.bool_], *, baseline: Baseline = Baseline.OTHER_LINKS, since_ns: int = 0
) -> list[Verdict]:
    """Return verdicts on hot rows and columns of the matrix, then on the remaining hot cells.

    Args:
        ends: ``[links, 2]``, source and destination.
        times: ``[links]``, factor by which a link is slower than the baseline; 0 if it is not slow.
        known: ``[links]``, whether there were enough transfers.
        baseline: quantity that ``times`` compares with.
        since_ns: time of the first observation.
    """
    found: list[tuple[float, Verdict]] = []
    left = times > 0
    for side, direction in ((0, Direction.SENDS), (1, Direction.RECEIVES)):
        ranks, at = np.unique(ends[:, side], return_inverse=True)
        all_slow = np.bincount(at[known & left], minlength=len(ranks)) == np.bincount(at[known], minlength=len(ranks))
        for rank in np.flatnonzero(all_slow & (np.bincount(at[known & left], minlength=len(ranks)) > 1)).tolist():
            own = left & (at == rank)
            worst = float(times[own].max())
            evidence = (SlowTransfers(direction, worst, baseline),)
            who, victims = (int(ranks[rank]),), int(own.sum())
            verdict = Verdict(Syndrome.COMMUNICATION_SLOW, who, since_ns, victims=victims, evidence=evidence)
            found.append((worst, verdict))
            left &= ~own
    for (source, destination), slow in zip(ends[left].tolist(), times[left].tolist(), strict=True):
        evidence = (SlowTransfers(Direction.LINK, slow, baseline),)
        both = (min(source, destination), max(source, destination))
        verdict = Verdict(Syndrome.COMMUNICATION_SLOW, both, since_ns, link=(source, destination), victims=1, evidence=evidence)
        found.append((slow, verdict))
    return [verdict for _, verdict in sorted(found, key=lambda each: -each[0])]
