"""Measures the link between two agents: a few small TCP transfers over an authenticated connection, with limits on both sides.

The request and the answers are frames with the job's secret. The bytes that are measured are plain, and both sides drop them.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from unickpt.steering.state.link_verdicts import LinkSpeed
from unickpt.steering.wire.codec import Frames, SteeringError, dial

SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)  # bytes of the transfers, until one takes long enough
ENOUGH_S = 0.05  # of a transfer, so that its time is known well
PINGS = 5
LIMIT_S = 10.0  # of a transfer, for the side that serves it
MOST_AT_ONCE = 4  # measurements that an agent serves
_DIAL_S = 2.0


def measure(address: str, key: bytes, limit_s: float) -> LinkSpeed:
    """Measure the link to an agent.

    Args:
        address: of the agent, ``host:port``.
        key: key of the job.
        limit_s: time limit of all transfers together.

    Raises:
        OSError: the agent cannot be reached, or the time is over before the smallest transfer has ended.
        EOFError, SteeringError: it refuses, or serves too many measurements.
    """
    end_s = time.monotonic() + limit_s
    frames = dial(address, key, min(_DIAL_S, limit_s))
    try:
        frames.settimeout(limit_s)
        latency_s = min(_pinged(frames) for _ in range(PINGS))
        found = None
        for size in SIZES:
            try:
                found, took_s = _transferred(frames, size, latency_s, end_s)
            except TimeoutError:
                if found is None:
                    raise
                break
            if took_s > ENOUGH_S or time.monotonic() + 20 * took_s > end_s:
                break
        assert found is not None
        return found
    finally:
        frames.close()


def _pinged(frames: Frames) -> float:
    began_s = time.monotonic()
    frames.send({"kind": "hello"})
    frames.receive()
    return time.monotonic() - began_s


def _transferred(frames: Frames, size: int, latency_s: float, end_s: float) -> tuple[LinkSpeed, float]:
    """Send and receive ``size`` bytes. Return the speed, and the time of the faster direction."""
    frames.send({"kind": "transfer", "bytes": size})
    if frames.receive().get("bytes") != size:
        raise SteeringError("the agent serves too many measurements")
    began_s = time.monotonic()
    frames.pour(size, end_s)
    frames.receive()
    sent_s = max(time.monotonic() - began_s, 1e-9)
    frames.send({"kind": "back"})
    began_s = time.monotonic()
    frames.drain(size, end_s)
    received_s = max(time.monotonic() - began_s, 1e-9)
    return LinkSpeed(latency_s, size / sent_s, size / received_s), min(sent_s, received_s)


class TransferServer:
    """Serves the measurements of other agents, a few at a time."""

    def __init__(self) -> None:
        self._free = threading.Semaphore(MOST_AT_ONCE)

    def serve(self, frames: Frames, request: dict[str, Any], limit_s: float) -> None:
        """Take part in one transfer.

        Raises:
            SteeringError: the request is malformed.
            OSError, EOFError: the connection is broken, or the time is over.
        """
        size = request.get("bytes")
        if size not in SIZES:
            raise SteeringError(f"a transfer of {str(size)[:40]} bytes")
        if not self._free.acquire(blocking=False):
            frames.send({"bytes": 0})
            return
        try:
            end_s = time.monotonic() + limit_s
            frames.send({"bytes": size})
            frames.drain(size, end_s)
            frames.send({})
            frames.receive()
            frames.pour(size, end_s)
        finally:
            self._free.release()
