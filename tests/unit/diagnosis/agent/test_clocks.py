"""Common calls align the clocks of several hosts."""

from __future__ import annotations

import numpy as np

from tests.unit.diagnosis.agent.made import MS, made_up
from unickpt.diagnosis.snapshot.clocks import clock_offsets, on_one_clock


def test_clocks_are_aligned_by_common_calls() -> None:
    """Host b is 3.5 s behind, host c 70 s ahead. Calls take 2 to 4 ms, and ranks are up to 20 ms late."""
    chance = np.random.default_rng(3)
    ahead = {"a": 0, "b": -3_500 * MS, "c": 70_000 * MS}
    calls: dict[str, list[tuple[int, int, int, int]]] = {host: [] for host in ahead}
    for seq in range(1, 60):
        entered = {rank: 10**12 + seq * 100 * MS + int(chance.integers(0, 20 * MS)) for rank in range(6)}
        for rank, call_ns in entered.items():
            host = "abc"[rank // 2]
            end_ns = max(entered.values()) + int(chance.integers(2 * MS, 4 * MS))
            calls[host].append((rank, seq, call_ns + ahead[host], end_ns + ahead[host]))
    snapshots = [made_up(calls[host], now_ns=10**12 + 7_000 * MS + ahead[host]) for host in "abc"]
    offsets = clock_offsets(snapshots)
    for offset, host in zip(offsets, "abc", strict=True):
        assert offset.error_ns is not None
        assert offset.error_ns <= 4 * MS
        assert abs(offset.ns + ahead[host]) <= offset.error_ns
    job = on_one_clock(snapshots)
    assert abs(job.now_ns - (10**12 + 7_000 * MS)) <= 4 * MS
    assert job.calls["call_ns"].max() - job.calls["call_ns"].min() < 7_000 * MS


def test_a_host_that_shares_no_call_keeps_its_clock() -> None:
    other = made_up([(4, 9, 100, 200)])
    assert [offset.error_ns for offset in clock_offsets([made_up([(0, 1, 100, 200)]), other])] == [0, None]


def test_a_clock_that_is_reached_through_another_host() -> None:
    """a and c have no call in common; b has one with each."""
    a = made_up([(0, 1, 1_000, 2_000)])
    b = made_up([(1, 1, 6_100, 7_000), (1, 2, 8_000, 9_000)])
    c = made_up([(2, 2, 28_200, 29_000)])
    offsets = clock_offsets([a, b, c])
    assert [(offset.ns, offset.error_ns) for offset in offsets] == [(0, 0), (-5_050, 950), (-25_150, 900)]
