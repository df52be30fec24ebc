"""Traffic of the TCP connections of one host during the last few looks."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.host.tcp_counters import Connections

WINDOW = np.dtype(
    [
        ("rank", "i4"),
        ("here", "u8"),
        ("there", "u8"),
        ("window_ns", "i8"),  # duration of the window
        ("bytes", "i8"),
        ("busy_ns", "i8"),
        ("rtt_us", "u4"),
        ("stuck", "u1"),  # data is in flight, and no acknowledgement arrives
    ]
)
Windows = npt.NDArray[Any]  # of dtype ``WINDOW``
STUCK_BACKOFF = 2  # retransmission time-outs in a row after which a connection counts as stuck


class TcpSampler:
    """Recent traffic of a host's connections, in windows of so many looks."""

    def __init__(self, over: int = 2) -> None:
        self._samples: deque[tuple[int, Connections]] = deque(maxlen=over + 1)

    def window(self, now_ns: int, connections: Connections) -> Windows:
        """Add a sample and return the traffic since the oldest sample that is kept."""
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
