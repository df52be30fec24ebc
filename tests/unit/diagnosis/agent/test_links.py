"""Detection of slow connections between two hosts."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from tests.unit.diagnosis.agent.made import MS, S, made_up
from unickpt.diagnosis.detectors.examine import examine
from unickpt.diagnosis.detectors.tcp_links import LINK, LinkHistory, links_of
from unickpt.diagnosis.detectors.verdicts import Syndrome
from unickpt.diagnosis.host.process_state import CpuWaitSampler, State
from unickpt.diagnosis.host.tcp_counters import CONNECTION, Sockets, connections_of
from unickpt.diagnosis.reports.verdict_text import render_all
from unickpt.diagnosis.snapshot.snapshot import RankSnapshot
from unickpt.diagnosis.snapshot.steps import STEP
from unickpt.diagnosis.snapshot.tcp_windows import WINDOW, TcpSampler


def links(*rows: tuple[int, int, float, float]) -> Any:
    out = np.zeros(len(rows), LINK)
    for at, (source, destination, ns_per_byte, share) in enumerate(rows):
        out["source"][at], out["destination"][at], out["ns_per_byte"][at], out["share"][at] = (
            source,
            destination,
            ns_per_byte,
            share,
        )
    return out


HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}


def slow_pairs(*rows: tuple[int, int, float, float], looks: int = 6, usual: LinkHistory | None = None) -> list[Any]:
    usual = usual or learnt()
    found: list[Any] = []
    for look in range(looks):
        found = usual.slow(links(*rows), look * S, HOSTS)
    return [verdict.link or verdict.ranks for verdict in found]


def learnt() -> LinkHistory:
    usual = LinkHistory()
    for look in range(20):
        usual.slow(links((0, 3, 10, 0.1), (3, 0, 10, 0.1), (1, 2, 12, 0.1), (2, 1, 9, 0.1)), look * S, HOSTS)
    return usual


def test_a_link_that_became_slower_is_named() -> None:
    assert slow_pairs((0, 3, 11, 0.1), (3, 0, 9, 0.1), (1, 2, 500, 0.8), (2, 1, 9, 0.1)) == [(1, 2)]


@pytest.mark.parametrize(("late_ms", "named"), [(0, [(2, 3)]), (300, [])])
def test_links_are_ignored_while_a_job_waits_for_a_late_rank(late_ms: int, named: list[Any]) -> None:
    """Delayed acknowledgements wait for 40 ms, so links appear slow."""
    usual = LinkHistory()
    for look in range(30):
        steps = np.zeros(4 * 24, STEP)
        steps["rank"], steps["number"] = np.repeat(np.arange(4), 24), np.tile(np.arange(10 + look, 34 + look), 4)
        steps["end_ns"], steps["own_ns"], steps["calls"] = 700 * MS, 100 * MS, 5
        late = (steps["rank"] == 0) & (steps["number"] > 10 + 24 + 15)
        steps["own_ns"][late] += late_ms * MS
        windows = np.zeros(2, WINDOW)
        windows["rank"], windows["here"], windows["there"] = [2, 3], [1, 2], [2, 1]
        windows["window_ns"], windows["bytes"] = 2 * S, 1 << 20
        windows["busy_ns"] = [400 * MS if look > 22 else 20 * MS, 20 * MS]
        snapshot = dataclasses.replace(made_up([], now_ns=look * S), steps=steps, windows=windows)
        found = examine(snapshot, usual=usual).verdicts
    assert [verdict.link for verdict in found if verdict.syndrome is Syndrome.COMMUNICATION_SLOW] == named


@pytest.mark.parametrize(("share", "named"), [(0.0, [(2, 3)]), (0.5, [])])
def test_links_of_a_rank_without_processor_time_are_ignored(share: float, named: list[Any]) -> None:
    usual = LinkHistory()
    for look in range(30):
        windows = np.zeros(2, WINDOW)
        windows["rank"], windows["here"], windows["there"] = [2, 3], [1, 2], [2, 1]
        windows["window_ns"], windows["bytes"] = 2 * S, 1 << 20
        windows["busy_ns"] = [400 * MS if look > 22 else 20 * MS, 20 * MS]
        snapshot = made_up([], now_ns=look * S)
        ranks = {at: RankSnapshot(9, "a", State.RUNNING, False, 1, 0, cpu_wait=share if at == 3 else 0.02) for at in range(4)}
        snapshot = dataclasses.replace(snapshot, ranks=ranks, windows=windows)
        found = examine(snapshot, usual=usual).verdicts
    assert [verdict.link for verdict in found if verdict.syndrome is Syndrome.COMMUNICATION_SLOW] == named


@pytest.mark.parametrize(
    ("shares", "step", "named"),
    [
        ([0.1, 0.1, 0.9, 0.2], 20, [2]), ([0.1, 0.1, 0.9, 0.2], 12, []), ([0.1, 0.1, 0.45, 0.2], 20, []),
        ([0.1, 0.1, 0.9, 0.8], 20, []), ([0.5, 0.6, 0.9, 0.5], 20, []), ([0.0, 0.0, 0.0, 0.0], 20, []),
    ],
)  # fmt: skip
def test_the_one_rank_that_has_no_processor_is_named(shares: list[float], step: int, named: list[int]) -> None:
    """Not in the first steps, and not if many processes wait for a processor."""
    ranks = {at: RankSnapshot(9, "a", State.RUNNING, False, step, 0, cpu_wait=share) for at, share in enumerate(shares)}
    snapshot = dataclasses.replace(made_up([], now_ns=100 * S), ranks=ranks)
    found = examine(snapshot)
    assert [verdict.ranks[0] for verdict in found.verdicts] == named
    sentences = [text.sentence for text in render_all(found.verdicts, snapshot)]
    assert all("rank 2 waits for a processor 90% of the time, the others 10%" in line for line in sentences)


def test_a_process_that_waits_for_a_processor_is_detected() -> None:
    """Two processes share one processor, and a third one sleeps."""
    loop = [sys.executable, "-c", "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"]
    others = [subprocess.Popen(loop), subprocess.Popen(loop), subprocess.Popen(["sleep", "60"])]
    try:
        time.sleep(1.0)
        crowding, pids = CpuWaitSampler(), {rank: other.pid for rank, other in enumerate(others)}
        assert crowding.shares(time.monotonic_ns(), pids) == {}
        time.sleep(2.0)
        found = crowding.shares(time.monotonic_ns(), pids)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert found[0] > 0.25
    assert found[1] > 0.25
    assert found[2] < 0.1


def test_the_way_back_is_slow_for_its_acknowledgements() -> None:
    assert set(slow_pairs((0, 3, 500, 0.8), (3, 0, 200, 0.3), (1, 2, 600, 0.8), (2, 1, 300, 0.3))) == {(0, 3), (1, 2)}


def test_both_ways_are_named_if_both_are_slow() -> None:
    slow = slow_pairs((0, 3, 500, 0.8), (3, 0, 500, 0.7), (1, 2, 600, 0.8), (2, 1, 600, 0.8))
    assert set(slow) == {(0, 3), (3, 0), (1, 2), (2, 1)}


def test_a_moment_is_no_fault_and_neither_is_an_idle_link() -> None:
    assert slow_pairs((1, 2, 500, 0.8), looks=3) == []
    assert slow_pairs((1, 2, 500, 0.01)) == []
    assert slow_pairs((1, 2, 500, 0.8), usual=LinkHistory()) == []  # nothing is known of it


def test_sockets_of_a_process_are_renewed_every_few_looks_and_at_once_for_another_process() -> None:
    sockets, none = Sockets(every=3), subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with socket.socket() as first:
        for _ in range(4):
            assert sockets.owners({7: os.getpid()})[os.fstat(first.fileno()).st_ino] == 7
        with socket.socket() as second:
            known = [os.fstat(second.fileno()).st_ino in sockets.owners({7: os.getpid()}) for _ in range(6)]
            assert known.index(True) <= 2
            assert all(known[known.index(True) :])
        assert os.fstat(first.fileno()).st_ino not in sockets.owners({7: none.pid})
    none.communicate(b"\n")


def test_the_kernel_reports_the_traffic_of_two_processes() -> None:
    """Send 8 MB over loopback. Both ends are in this process, as ranks 0 and 1."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\ns = socket.create_connection(('127.0.0.1', {port}))\nwhile s.recv(1 << 20): pass"
        other = subprocess.Popen([sys.executable, "-c", code])
        own, _ = server.accept()
        with own:
            pids = {0: os.getpid(), 1: other.pid}
            sampler = TcpSampler()
            sampler.window(0, connections_of(pids))
            own.sendall(bytes(8 << 20))
            time.sleep(0.2)
            found = links_of(sampler.window(S, connections_of(pids)))
            own.shutdown(socket.SHUT_RDWR)
        other.wait()
    pairs = found[["source", "destination"]].tolist()
    assert (0, 1) in pairs
    at = pairs.index((0, 1))
    assert 0 < found["ns_per_byte"][at] < 1000
    assert 0 <= found["share"][at] < 1  # 8 MB may take less than a tick of the kernel's clock
    assert not found["stuck"].any()


def test_a_link_that_was_too_fast_to_time_is_judged_by_the_resolution() -> None:
    """Carry 1 MB in each window, in less than a tick; then at 500 ns per byte."""

    def windows(busy_ns: int) -> Any:
        out = np.zeros(2, WINDOW)
        out["rank"], out["here"], out["there"] = [2, 3], [1, 2], [2, 1]
        out["window_ns"], out["bytes"], out["busy_ns"] = S, 1 << 20, [busy_ns, 0]
        return out

    usual = LinkHistory()
    for look in range(20):
        assert usual.slow(links_of(windows(0)), look * S) == []
    for look in range(20, 30):  # 20 ns per byte: no more than two ticks
        assert usual.slow(links_of(windows(20_000_000)), look * S) == []
    named = [usual.slow(links_of(windows(500_000_000)), look * S) for look in range(30, 36)][-1]
    assert [verdict.link for verdict in named] == [(2, 3)]


def test_connections_that_come_and_go() -> None:
    sampler = TcpSampler()
    one = np.zeros(1, CONNECTION)
    one["here"], one["there"], one["acked"], one["busy_us"] = 5, 6, 1000, 10
    assert sampler.window(0, np.zeros(0, CONNECTION)).dtype == WINDOW
    assert sampler.window(1, one)["bytes"].tolist() == [0]  # it may have been there before
    one = one.copy()
    one["acked"] = 1500
    assert sampler.window(2, one)["bytes"].tolist() == [0]  # against the empty sample
    assert sampler.window(3, one)["bytes"].tolist() == [500]


@pytest.mark.parametrize(("there", "named"), [(1, []), (2, [(1, 2)])])
def test_what_a_process_sends_to_itself_goes_over_no_link(there: int, named: list[Any]) -> None:
    """A program may upload to a server of its own."""
    out = np.zeros(2, WINDOW)
    out["rank"], out["here"], out["there"] = [1, there], [1, 2], [2, 1]
    out["window_ns"], out["bytes"], out["busy_ns"] = S, 1 << 20, [500_000_000, 0]
    assert [(source, destination) for source, destination in links_of(out)[["source", "destination"]].tolist()] == [
        *named, *(each[::-1] for each in named),
    ]  # fmt: skip
