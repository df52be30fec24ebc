"""Find slow links from the kernel's counters of TCP connections.

C4 (arXiv 2406.04594, section 4.2) instruments the transport layer of the collective library. Gloo, and NCCL over sockets, use
TCP, for which the kernel counts acknowledged bytes and busy time. Both ends of a connection identify the ranks of a link, so
this works for collectives over many links, too.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.detectors.observations import Baseline
from unickpt.diagnosis.detectors.p2p_links import by_sides
from unickpt.diagnosis.detectors.verdicts import Verdict
from unickpt.diagnosis.snapshot.tcp_windows import Windows

LINK = np.dtype(
    [("source", "i4"), ("destination", "i4"), ("ns_per_byte", "f8"), ("share", "f8"), ("rtt_us", "u4"), ("stuck", "u1")]
)
Links = npt.NDArray[Any]  # of dtype ``LINK``

SLOWER = 3.0  # times the median of the past
LASTING_NS = 4_000_000_000  # shortest duration to report
SHARE = 0.1  # smallest share of time in which a link must be busy
CLEARLY = 1.4  # ratio of busy shares of the two directions between hosts
LEAST_BYTES = 4096
TICK_NS = 10_000_000  # the kernel counts busy time in ticks of 1 to 10 ms: a shorter time may read as 0
_COLUMNS = ["source", "destination", "ns_per_byte", "share"]
_USUAL, _FEWEST = 60, 8  # windows of the past that are kept, and fewest to judge


def links_of(windows: Windows) -> Links:
    """Join both ends of the connections: traffic from each rank to each other one.

    The time per byte is an upper bound if a link was busy for less than a tick of the kernel's clock.
    """
    order = np.argsort(windows["here"], kind="stable")
    sides = windows["here"][order]
    if not len(sides):
        return np.zeros(0, LINK)
    at = np.minimum(np.searchsorted(sides, windows["there"]), len(sides) - 1)
    known = sides[at] == windows["there"]
    own, other = windows[known], windows["rank"][order][at[known]]
    apart = own["rank"] != other  # what a process sends to itself goes over no link
    own, other = own[apart], other[apart]
    key, at = np.unique(np.stack([own["rank"], other], axis=1), axis=0, return_inverse=True)
    at = at.reshape(-1)
    carried, busy, window = (np.bincount(at, own[name], len(key)) for name in ("bytes", "busy_ns", "window_ns"))
    parts = np.maximum(np.bincount(at, minlength=len(key)), 1)
    out = np.zeros(len(key), LINK)
    out["source"], out["destination"] = key[:, 0], key[:, 1]
    enough = carried >= LEAST_BYTES
    out["ns_per_byte"] = np.where(enough, np.maximum(busy, TICK_NS) / np.maximum(carried, 1), np.nan)
    out["share"] = busy / np.maximum(window / parts, 1)
    np.maximum.at(out["rtt_us"], at, own["rtt_us"])
    np.maximum.at(out["stuck"], at, own["stuck"])
    return out


class LinkHistory:
    """Time per byte of every link of a job in the past."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], deque[float]] = {}
        self._slow: dict[tuple[int, int], tuple[int, float]] = {}  # since when, and summed busy share

    def slow(self, links: Links, now_ns: int, hosts: Mapping[int, str] | None = None) -> list[Verdict]:
        """Return verdicts on busy links that are slower than in the past; remember the others as normal."""
        times = np.zeros(len(links))
        known = np.zeros(len(links), bool)
        for at, (source, destination, ns_per_byte, share) in enumerate(links[_COLUMNS].tolist()):
            link = source, destination
            past = self._known.setdefault(link, deque(maxlen=_USUAL))
            if ns_per_byte != ns_per_byte:  # NaN: hardly anything was sent
                continue
            known[at] = len(past) >= _FEWEST
            more = ns_per_byte / float(np.median(past)) if known[at] else 0.0
            if more < SLOWER:
                past.append(ns_per_byte)
                self._slow.pop(link, None)
            elif share >= SHARE:
                since_ns, busy = self._slow.get(link, (now_ns, 0.0))
                self._slow[link] = since_ns, busy + share
                times[at] = more if now_ns - since_ns >= LASTING_NS else 0.0
        times[self._ways_back(links, hosts or {})] = 0.0
        slow = times > 0
        if not slow.any():
            return []
        since_ns = min(self._slow[link][0] for link in links[["source", "destination"]][slow].tolist())
        ends = np.stack([links["source"], links["destination"]], axis=1).astype(np.int64)
        return by_sides(ends, times, known, baseline=Baseline.OWN_PAST, since_ns=since_ns)

    def forget(self) -> None:
        """Forget which links were slow: the slowness had another reason."""
        self._slow.clear()

    def _ways_back(self, links: Links, hosts: Mapping[int, str]) -> npt.NDArray[np.bool_]:
        """Return which links are slow only because their acknowledgements travel on a slow link.

        That is the clearly less busy direction between two hosts.
        """
        busy: dict[tuple[str, str], float] = defaultdict(float)
        for (source, destination), (_, share) in self._slow.items():
            busy[_host(source, hosts), _host(destination, hosts)] += share

        def is_back(source: int, destination: int) -> bool:
            one, other = _host(source, hosts), _host(destination, hosts)
            return one != other and busy[one, other] * CLEARLY < busy[other, one]

        return np.array([is_back(*link) for link in links[["source", "destination"]].tolist()], bool)


def _host(rank: int, hosts: Mapping[int, str]) -> str:
    return hosts.get(rank, f"of rank {rank}")


def stuck_links(links: Links) -> list[tuple[int, int]]:
    """Return source and destination of links on which no acknowledgement arrives."""
    return [(int(s), int(d)) for s, d in links[links["stuck"] > 0][["source", "destination"]].tolist()]
