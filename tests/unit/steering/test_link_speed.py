"""Transfers between two agents, with limits on both sides, and requests that are refused."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.steering.peers import KEY, Job, Slowly, until
from unickpt.steering.agent.peer import Peer
from unickpt.steering.links.link_speed import MOST_AT_ONCE, SIZES, measure
from unickpt.steering.state.limits import Limits
from unickpt.steering.wire.codec import Frames, SteeringError, dial, key_of


@pytest.fixture
def peer() -> Iterator[Peer]:
    job = Job(Limits(1, 4, join_s=1.0, expiry_s=60.0))
    made = job.start("a")
    until(lambda: made.leads)
    yield made
    made.close()


def test_a_link_is_measured_in_both_directions_within_its_time(peer: Peer) -> None:
    direct = measure(peer.address, KEY, 5.0)
    assert direct.slowest > 10e6
    assert 0 < direct.latency_s < 1
    slow = Slowly(peer.address, 1e6)
    try:
        found = measure(slow.address, KEY, 5.0)
        assert 0.2e6 < found.slowest < 3e6
        began_s = time.monotonic()
        with pytest.raises(OSError, match="time"):
            measure(Slowly(peer.address, 20e3).address, KEY, 0.5)
        assert time.monotonic() - began_s < 3
    finally:
        slow.close()


def transfer(peer: Peer, request: Any, key: bytes = KEY) -> Frames:
    frames = dial(peer.address, key, 5.0)
    frames.send(request)
    return frames


@pytest.mark.parametrize("size", [0, -1, 1, None, "x", [1], SIZES[-1] * 16, 1.5, True, {}])
def test_other_sizes_are_refused(peer: Peer, size: Any) -> None:
    with pytest.raises((EOFError, OSError)):
        transfer(peer, {"kind": "transfer", "bytes": size}).receive()
    assert peer.refused == 1


def test_a_stranger_measures_nothing(peer: Peer) -> None:
    with pytest.raises((EOFError, OSError)):
        transfer(peer, {"kind": "transfer", "bytes": SIZES[0]}, key_of("guess")).receive()
    assert peer.refused == 1


def test_an_agent_serves_a_few_measurements_at_a_time(peer: Peer) -> None:
    busy = [transfer(peer, {"kind": "transfer", "bytes": SIZES[-1]}) for _ in range(MOST_AT_ONCE)]
    assert [frames.receive() for frames in busy] == [{"bytes": SIZES[-1]}] * MOST_AT_ONCE
    with pytest.raises(SteeringError, match="too many"):
        measure(peer.address, KEY, 5.0)
    for frames in busy:
        frames.close()
    until(lambda: _serves(peer))
    assert peer.leads


def _serves(peer: Peer) -> bool:
    try:
        return measure(peer.address, KEY, 5.0).slowest > 0
    except SteeringError:
        return False
