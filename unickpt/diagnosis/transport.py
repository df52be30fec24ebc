"""Links that carry less than they did, or than the others do, from what the kernels know of their connections.

C4 (arXiv 2406.04594, section 4.2) has its transport layer from the collective library; gloo, and NCCL over sockets, use TCP, of
which the kernel counts what was sent and for how long something was under way. From both sides of a connection a link is
known by its ranks, so that a collective over many links is no obstacle.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.links import by_sides
from unickpt.diagnosis.verdicts import Verdict
from unickpt.timing.sockets import Connections

WINDOW = np.dtype(
    [
        ("rank", "i4"),
        ("here", "u8"),
        ("there", "u8"),
        ("window_ns", "i8"),  # that the next two are of
        ("bytes", "i8"),
        ("busy_ns", "i8"),
        ("rtt_us", "u4"),
        ("stuck", "u1"),  # something is under way, and nothing comes back
    ]
)
Windows = npt.NDArray[Any]  # of dtype ``WINDOW``
LINK = np.dtype(
    [("source", "i4"), ("destination", "i4"), ("ns_per_byte", "f8"), ("share", "f8"), ("rtt_us", "u4"), ("stuck", "u1")]
)
Links = npt.NDArray[Any]  # of dtype ``LINK``

SLOWER = 3.0  # times what is usual
LASTING_NS = 4_000_000_000  # so long it has to have been so
SHARE = 0.1  # of the time that a link has to be busy to hold anybody up
CLEARLY = 1.4  # times
LEAST_BYTES = 4096
STUCK_BACKOFF = 2
_COLUMNS = ["source", "destination", "ns_per_byte", "share"]
_USUAL, _FEWEST = 60, 8  # windows that tell what is usual, and how many it takes


class Sampler:
    """What a host's connections have carried lately.

    Args:
        over: looks that a window goes back.
    """

    def __init__(self, over: int = 2) -> None:
        self._samples: deque[tuple[int, Connections]] = deque(maxlen=over + 1)

    def window(self, now_ns: int, connections: Connections) -> Windows:
        """Add a sample; what has come since the oldest one that is kept."""
        connections = connections[np.argsort(connections["here"], kind="stable")]
        self._samples.append((now_ns, connections))
        then_ns, before = self._samples[0]
        out = np.zeros(len(connections), WINDOW)
        for name in ("rank", "here", "there", "rtt_us"):
            out[name] = connections[name]
        out["stuck"] = (connections["unacked"] > 0) & (connections["backoff"] >= STUCK_BACKOFF)
        at = np.minimum(np.searchsorted(before["here"], connections["here"]), max(len(before) - 1, 0))
        same = before["here"][at] == connections["here"] if len(before) else np.zeros(len(connections), bool)
        out["window_ns"] = now_ns - then_ns
        for name, column, scale in (("bytes", "acked", 1), ("busy_ns", "busy_us", 1000)):
            new = connections[column].astype(np.int64)
            old = np.where(same, before[column][at].astype(np.int64), new) if len(before) else new
            out[name] = np.maximum(new - old, 0) * scale
        return out


def links_of(windows: Windows) -> Links:
    """Both sides of the connections joined: what each rank sends to each other one."""
    order = np.argsort(windows["here"], kind="stable")
    sides = windows["here"][order]
    if not len(sides):
        return np.zeros(0, LINK)
    at = np.minimum(np.searchsorted(sides, windows["there"]), len(sides) - 1)
    known = sides[at] == windows["there"]
    own, other = windows[known], windows["rank"][order][at[known]]
    key, at = np.unique(np.stack([own["rank"], other], axis=1), axis=0, return_inverse=True)
    at = at.reshape(-1)
    carried, busy, window = (np.bincount(at, own[name], len(key)) for name in ("bytes", "busy_ns", "window_ns"))
    parts = np.maximum(np.bincount(at, minlength=len(key)), 1)
    out = np.zeros(len(key), LINK)
    out["source"], out["destination"] = key[:, 0], key[:, 1]
    enough = carried >= LEAST_BYTES
    out["ns_per_byte"] = np.where(enough, busy / np.maximum(carried, 1), np.nan)
    out["share"] = busy / np.maximum(window / parts, 1)
    np.maximum.at(out["rtt_us"], at, own["rtt_us"])
    np.maximum.at(out["stuck"], at, own["stuck"])
    return out


class Usual:
    """What the links of a job have taken for a byte so far, each by itself."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], deque[float]] = {}
        self._slow: dict[tuple[int, int], tuple[int, float]] = {}  # since when, and for how long it has been busy since

    def slow(self, links: Links, now_ns: int, hosts: Mapping[int, str] | None = None) -> list[Verdict]:
        """Links that hold somebody up and take longer than they used to. What is not slow is remembered as usual.

        Args:
            links: as they are now.
            now_ns: when that is.
            hosts: of the ranks.
        """
        times = np.zeros(len(links))
        known = np.zeros(len(links), bool)
        for at, (source, destination, ns_per_byte, share) in enumerate(links[_COLUMNS].tolist()):
            link = source, destination
            past = self._known.setdefault(link, deque(maxlen=_USUAL))
            if ns_per_byte != ns_per_byte:  # hardly anything was sent
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
        return by_sides(ends, times, known, than="before for a byte", since_ns=since_ns)

    def forget(self) -> None:
        """What was slow until now had another reason."""
        self._slow.clear()

    def _ways_back(self, links: Links, hosts: Mapping[int, str]) -> npt.NDArray[np.bool_]:
        """Links that are slow for their acknowledgements, which go the way that is: those of two hosts in the direction that
        is clearly less busy than the other one."""
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
    """Source and destination of links on which nothing comes back any more."""
    return [(int(s), int(d)) for s, d in links[links["stuck"] > 0][["source", "destination"]].tolist()]
