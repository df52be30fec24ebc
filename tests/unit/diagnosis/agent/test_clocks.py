"""Common calls align the clocks of several hosts."""

from __future__ import annotations

import dataclasses

import numpy as np

from tests.unit.diagnosis.agent.made import MS, S, made_up
from unickpt.diagnosis.hardware.events import HostHardware
from unickpt.diagnosis.reports.hardware_text import event_text
from unickpt.diagnosis.snapshot.clocks import Offset, apart_s, clock_offsets, on_one_clock
from unickpt.diagnosis.snapshot.snapshot import Snapshot


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


def test_a_clock_far_from_the_others_is_an_event_of_its_host() -> None:
    def host(name: str, ranks: tuple[int, ...], ahead_ns: int) -> Snapshot:
        calls = [(rank, 1, 10 * S + rank * MS + ahead_ns, 10 * S + 10 * MS + ahead_ns) for rank in ranks]
        return dataclasses.replace(made_up(calls, now_ns=11 * S + ahead_ns), hardware={name: HostHardware(("clock",))})

    job = on_one_clock([host("a", (0, 1), 3 * S), host("b", (2, 3), 0), host("c", (4, 5), 10 * MS)])
    assert {name: len(one.events) for name, one in job.hardware.items()} == {"a": 1, "b": 0, "c": 0}
    (event,) = job.hardware["a"].events
    assert event_text(event) == "its clock is 3.0 s ahead of those of other hosts"
    two = on_one_clock([host("a", (0, 1), 0), host("b", (2, 3), -3 * S)])
    assert event_text(*two.hardware["b"].events) == "its clock is 3.0 s behind those of other hosts"
    unknown = [Offset(0, 0), Offset(5 * S, None), Offset(5 * S, 4 * S + 1), Offset(0, 0)]
    assert apart_s(unknown) == [0.0] * 4, "no common call, or one that takes long"


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
