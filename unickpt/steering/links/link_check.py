"""The leader orders hosts to measure their links pairwise. Every host measures when the leader asks it."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from unickpt.steering.links.link_speed import measure
from unickpt.steering.state.link_verdicts import LinkFinding, LinkSpeed, Pair, judge, pairs_to_measure, thirds
from unickpt.steering.state.membership import Membership
from unickpt.steering.wire.codec import SteeringError
from unickpt.steering.wire.probing import Probe

LINK_S = 3.0  # time limit of a link
_SLACK_S = 3.0  # of the answer to the leader, beyond the measurement
_FASTEST = 1e13  # bytes per second that are believed


def check(ends: Pair, state: Membership, probe: Probe, limit_s: float) -> LinkFinding:
    """Check both ends of a link. Training goes on meanwhile. Never raises for a host that cannot be reached.

    Args:
        ends: the two hosts.
        state: state of the job.
        probe: asks the hosts.
        limit_s: time limit. Links that are not measured by then are unknown.
    """
    end_s = time.monotonic() + limit_s
    speeds: dict[Pair, LinkSpeed | None] = {}
    for one, other in pairs_to_measure(ends, thirds(state, ends)):
        for asked, target in ((one, other), (other, one)):
            left_s = min(LINK_S, end_s - time.monotonic())
            if left_s <= 0 or asked not in state.hosts or target not in state.hosts:
                break
            with contextlib.suppress(OSError, EOFError, SteeringError, ValueError):
                request = {"kind": "measure", "host": target, "seconds": left_s}
                answer = probe.ask(state.hosts[asked].address, request, left_s + _SLACK_S)
                speeds[one, other] = _speed(answer)
                break
    return judge(ends, speeds)


def answer(request: dict[str, Any], state: Membership | None, key: bytes) -> dict[str, Any]:
    """Measure the link from this host to another host of the job, as the leader asks.

    Raises:
        SteeringError: the request is malformed, or the host is unknown.
    """
    host = state.hosts.get(str(request.get("host"))[:256]) if state is not None else None
    limit_s = request.get("seconds")
    if host is None or isinstance(limit_s, bool) or not isinstance(limit_s, (int, float)) or not 0 < limit_s <= LINK_S:
        raise SteeringError("a measurement needs a host of the job and a time limit")
    try:
        found = measure(host.address, key, limit_s)
    except (OSError, EOFError, SteeringError) as err:
        return {"failed": f"{type(err).__name__}: {err}"[:200]}
    return {"speed": [found.latency_s, found.sends, found.receives]}


def _speed(said: dict[str, Any]) -> LinkSpeed | None:
    """Return what a host has measured; None if it cannot use the link.

    Raises:
        ValueError: the answer is malformed.
    """
    if "speed" not in said:
        return None
    values = said["speed"]
    good = isinstance(values, list) and len(values) == 3
    if not good or any(type(each) is not float or not 0 < each < _FASTEST for each in values):
        raise ValueError("not a speed")
    return LinkSpeed(*values)
