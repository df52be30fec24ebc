"""Links that carry less than the others.

A transfer begins when both sides have entered it: whoever comes late has not made the link slow. In the matrix of sources
and destinations a hot cell is a link, a hot row a rank's sending side, a hot column its receiving side (C4, arXiv 2406.04594,
section 4).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.middles import Floats, grouped, middles_of_others
from unickpt.diagnosis.verdicts import Syndrome, Verdict

SMALLEST_NS = 200_000.0
TIMES = 2.5  # the others' time for as many bytes

# One row per point-to-point call whose both sides are known.
TRANSFER = np.dtype(
    [
        ("source", "i4"),  # global ranks
        ("destination", "i4"),
        ("bytes", "i8"),
        ("ns", "f8"),  # from when both had entered until the receiver had it
    ]
)
Transfers = npt.NDArray[Any]  # of dtype ``TRANSFER``
Ints = npt.NDArray[np.int64]


def slow_links(transfers: Transfers, *, fewest: int = 8, hosts: npt.ArrayLike | None = None) -> list[Verdict]:
    """Links that take longer than the others for as many bytes, for three of four transfers; the slowest first.

    All of a rank's links in one direction are told as that rank.

    Args:
        transfers: of the last steps.
        fewest: transfers of a link that it takes to say anything.
        hosts: a number of its host to every rank. Links within a host are compared with their like.
    """
    if not len(transfers):
        return []
    pairs, link = np.unique(transfers["source"].astype(np.int64) << 32 | transfers["destination"], return_inverse=True)
    ends = np.stack([pairs >> 32, pairs & 0xFFFFFFFF], axis=1)
    sizes = np.frexp(transfers["bytes"].astype(np.float64))[1].astype(np.int64)  # its bits
    if hosts is not None:
        host = np.asarray(hosts)[ends]
        sizes = sizes << 1 | (host[:, 0] == host[:, 1])[link]
    keys = sizes * len(pairs) + link
    keys, (middle, quartile), counts = grouped(keys, transfers["ns"], 0.5, 0.25)
    enough = counts >= fewest
    keys, middle, quartile = keys[enough], middle[enough], quartile[enough]
    times = np.zeros(len(pairs))  # of the worst size
    for size in np.unique(keys // len(pairs)):
        here = np.flatnonzero(keys // len(pairs) == size)
        others = middles_of_others(middle[here, None])[:, 0]
        slow = (quartile[here] > TIMES * others) & (middle[here] > SMALLEST_NS)
        own = keys[here[slow]] % len(pairs)
        times[own] = np.maximum(times[own], middle[here[slow]] / others[slow])
    return by_sides(ends, times, np.isin(np.arange(len(pairs)), keys % len(pairs)))


def by_sides(
    ends: Ints, times: Floats, known: npt.NDArray[np.bool_], *, than: str = "on other links", since_ns: int = 0
) -> list[Verdict]:
    """Hot rows and columns of the matrix first, then what is left of hot cells.

    Args:
        ends: ``[links, 2]``, source and destination.
        times: ``[links]``, how many times longer it takes than others, 0 for one that is not slow.
        known: ``[links]``, whether there were enough transfers.
        than: what they are compared with, for a person.
        since_ns: when it was first seen.
    """
    found: list[tuple[float, Verdict]] = []
    left = times > 0
    for side, name in ((0, "sends"), (1, "receives")):
        ranks, at = np.unique(ends[:, side], return_inverse=True)
        all_slow = np.bincount(at[known & left], minlength=len(ranks)) == np.bincount(at[known], minlength=len(ranks))
        for rank in np.flatnonzero(all_slow & (np.bincount(at[known & left], minlength=len(ranks)) > 1)).tolist():
            own = left & (at == rank)
            worst = float(times[own].max())
            told = f"all that rank {ranks[rank]} {name} takes up to {worst:.1f} times as long as {than}"
            who, victims = (int(ranks[rank]),), int(own.sum())
            verdict = Verdict(Syndrome.COMMUNICATION_SLOW, who, since_ns, victims=victims, evidence=(told,))
            found.append((worst, verdict))
            left &= ~own
    for (source, destination), slow in zip(ends[left].tolist(), times[left].tolist(), strict=True):
        told = f"from rank {source} to rank {destination} takes {slow:.1f} times as long as {than}"
        both = (min(source, destination), max(source, destination))
        verdict = Verdict(Syndrome.COMMUNICATION_SLOW, both, since_ns, link=(source, destination), victims=1, evidence=(told,))
        found.append((slow, verdict))
    return [verdict for _, verdict in sorted(found, key=lambda each: -each[0])]
