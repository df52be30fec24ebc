"""The agent of a host, and several of them: views, their bytes, clocks, the hub, stacks, and what of it reaches a person."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launch import REPO, environment
from unickpt.agent import hub as hubs
from unickpt.agent import starting
from unickpt.agent.crowding import Crowding
from unickpt.agent.hub import Hub, fetch, secret_of, send, serve
from unickpt.agent.watching import Agent, Memory
from unickpt.cli.main import main
from unickpt.diagnosis.clocks import clock_offsets, on_one_clock
from unickpt.diagnosis.examining import examine
from unickpt.diagnosis.steps import STEP
from unickpt.diagnosis.summaries import SUMMARY
from unickpt.diagnosis.transfers import transfers_of
from unickpt.diagnosis.transport import LINK, WINDOW, Sampler, Usual, links_of
from unickpt.diagnosis.verdicts import Syndrome
from unickpt.diagnosis.view import CALL, Group, RankView, View, view_of
from unickpt.diagnosis.wire import packed, unpacked
from unickpt.errors import FormatError
from unickpt.timing import stacks
from unickpt.timing.endings import Endings
from unickpt.timing.folder import read_folder, remove_old
from unickpt.timing.processes import State
from unickpt.timing.ranks import progressions
from unickpt.timing.records import Op, Phase
from unickpt.timing.ring import SUFFIX, Identity, RingWriter
from unickpt.timing.sockets import CONNECTION, connections_of

MS, S = 1_000_000, 1_000_000_000


def ring(folder: Path, rank: int, world: int = 4, *, label: str = "data parallel", pid: int | None = None) -> RingWriter:
    """A ring of this process, or of another one, with one group of all ranks in its table."""
    who = dataclasses.replace(Identity.here(rank, world, "job"), pid=pid or os.getpid())
    made = RingWriter(folder / f"{rank:05d}{SUFFIX}", who, capacity=256)
    made.list_communicator({"name": "g", "label": label, "backend": "gloo", "ranks": progressions(range(world))})
    return made


def call(
    to: RingWriter, number: int, call_ns: int, end_ns: int, *, step: int = 20, seq: int = 0, op: Op = Op.ALL_REDUCE
) -> None:
    """One that is waited for since it was made."""
    to.put(number, call_ns, 0, call_ns, end_ns, seq or number, 8, 8, 0, int(op), 2, 0, 0, 0, -1, 0, step, 7)


def hung(folder: Path, *, culprit: int = 2, since_s: float = 30, world: int = 4, **state: Any) -> None:
    """All ranks but one have entered call 3 so many seconds ago."""
    now = time.monotonic_ns()
    for rank in range(world):
        made = ring(folder, rank, world)
        for number in (1, 2):
            call(made, number, now - int((since_s + 10) * S), now - int((since_s + 9) * S))
        if rank != culprit:
            call(made, 3, now - int(since_s * S), 0)
        made.state(heartbeat_ns=now, step=20, newest=3, phase=int(state.get("phase", Phase.BACKWARD)))


def test_a_view_survives_its_bytes(tmp_path: Path) -> None:
    hung(tmp_path)
    view = view_of(read_folder(tmp_path), {2: "loop (a.py:3)"})
    again = unpacked(packed(view))
    for name in ("rows", "steps", "calls", "windows"):
        assert np.array_equal(getattr(again, name), getattr(view, name)), name
    assert dict(again.ranks) == dict(view.ranks)
    assert list(again.groups) == list(view.groups)
    assert examine(again, after_s=5).lines == examine(view, after_s=5).lines != []


@pytest.mark.parametrize("seed", range(40))
def test_bytes_that_are_no_view_are_refused(tmp_path: Path, seed: int) -> None:
    hung(tmp_path)
    good = packed(view_of(read_folder(tmp_path)))
    chance = np.random.default_rng(seed)
    bad = bytearray(good)
    for _ in range(int(chance.integers(1, 6))):
        bad[int(chance.integers(0, 8 + 1500))] = int(chance.integers(0, 256))
    data = bytes(bad[: int(chance.integers(0, len(bad)))]) if seed % 3 == 0 else bytes(bad)
    try:
        view = unpacked(data)
    except FormatError:
        return
    examine(view, after_s=5)  # what is let in does no harm


@pytest.mark.parametrize(
    ("table", "field", "value"),
    [
        ("rows", "rank", 4),
        ("rows", "comm", 1),
        ("rows", "comm", -1),
        ("rows", "op", 77),
        ("calls", "op", int(Op.STEP)),
        ("calls", "comm", 9),
    ],
)
def test_rows_of_what_a_view_does_not_have_are_refused(tmp_path: Path, table: str, field: str, value: int) -> None:
    hung(tmp_path)
    view = view_of(read_folder(tmp_path))
    rows = getattr(view, table).copy()
    assert len(rows)
    rows[field][-1] = value
    with pytest.raises(FormatError, match=table):
        unpacked(packed(dataclasses.replace(view, **{table: rows})))


@pytest.mark.parametrize("ranks", [[[0, 1, 1 << 40]], [[0, -1, 3]], [[-5, 1, 2]], [[0, 1, 1 << 23], [0, 1, 1 << 24]]])
def test_a_group_that_would_fill_memory_is_refused(tmp_path: Path, ranks: Any) -> None:
    hung(tmp_path)
    view = view_of(read_folder(tmp_path))
    head = packed(dataclasses.replace(view, groups=[Group("g", "data parallel", ranks)]))
    with pytest.raises(FormatError):
        unpacked(head)


# ---------------------------------------------------------------- clocks


def made_up(calls: list[tuple[int, int, int, int]], now_ns: int = 0) -> View:
    """A host of calls ``(rank, seq, call_ns, end_ns)`` of one group."""
    table = np.zeros(len(calls), CALL)
    table["source"] = table["destination"] = -1
    table["op"] = int(Op.ALL_REDUCE)
    for at, (rank, seq, call_ns, end_ns) in enumerate(calls):
        for name, value in zip(("rank", "seq", "call_ns", "end_ns"), (rank, seq, call_ns, end_ns), strict=True):
            table[name][at] = value
    return View(now_ns, {}, [Group("g", "", ((0, 1, 8),))], np.zeros(0, SUMMARY), np.zeros(0, STEP), table)


def test_clocks_are_put_together_by_what_was_called_together() -> None:
    """Host b is 3.5 s behind, host c 70 s ahead; calls take 2 to 4 ms, and ranks come up to 20 ms late."""
    chance = np.random.default_rng(3)
    ahead = {"a": 0, "b": -3_500 * MS, "c": 70_000 * MS}
    calls: dict[str, list[tuple[int, int, int, int]]] = {host: [] for host in ahead}
    for seq in range(1, 60):
        entered = {rank: 10**12 + seq * 100 * MS + int(chance.integers(0, 20 * MS)) for rank in range(6)}
        for rank, call_ns in entered.items():
            host = "abc"[rank // 2]
            end_ns = max(entered.values()) + int(chance.integers(2 * MS, 4 * MS))
            calls[host].append((rank, seq, call_ns + ahead[host], end_ns + ahead[host]))
    views = [made_up(calls[host], now_ns=10**12 + 7_000 * MS + ahead[host]) for host in "abc"]
    offsets = clock_offsets(views)
    for offset, host in zip(offsets, "abc", strict=True):
        assert offset.error_ns is not None
        assert offset.error_ns <= 4 * MS
        assert abs(offset.ns + ahead[host]) <= offset.error_ns
    job = on_one_clock(views)
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


# ---------------------------------------------------------------- what is told


def test_a_rank_that_is_stopped_inside_of_a_call_is_named(tmp_path: Path) -> None:
    hung(tmp_path, culprit=-1)
    view = view_of(read_folder(tmp_path))
    assert [v.syndrome for v in examine(view, after_s=5).verdicts] == [Syndrome.COMMUNICATION_HANG]
    ranks = {
        rank: dataclasses.replace(one, state=State.STOPPED if rank == 3 else one.state) for rank, one in view.ranks.items()
    }
    (verdict,) = examine(dataclasses.replace(view, ranks=ranks), after_s=5).verdicts
    assert (verdict.syndrome, verdict.ranks, verdict.victims) == (Syndrome.NON_COMMUNICATION_HANG, (3,), 3)


@pytest.mark.parametrize("goes_on", [True, False])
def test_who_got_through_a_call_with_another_shape_is_named(tmp_path: Path, goes_on: bool) -> None:
    """Gloo lets one pass whose tensor is smaller; the others stay in the call, and it waits in the next one."""
    hung(tmp_path, culprit=-1)
    now = time.monotonic_ns()
    odd = ring(tmp_path, 2)
    for number in (1, 2):
        call(odd, number, now - 40 * S, now - 39 * S)
    odd.put(3, now - 30 * S, 0, now - 30 * S, now - 29 * S, 3, 5, 5, 0, int(Op.ALL_REDUCE), 2, 0, 0, 0, -1, 0, 20, 8)
    if goes_on:
        call(odd, 4, now - 29 * S, 0)
    odd.state(heartbeat_ns=now, step=20, newest=3 + goes_on, phase=int(Phase.BACKWARD))
    (verdict,) = examine(view_of(read_folder(tmp_path)), after_s=5).verdicts
    assert (verdict.syndrome, verdict.ranks, verdict.seq) == (Syndrome.MISMATCH, (2,), 3)


def dead(view: View, heard_s: dict[int, float], ended: dict[int, str] | None = None) -> View:
    ranks = {
        rank: dataclasses.replace(one, state=State.DEAD, heard_ns=int(heard_s[rank] * S), ended=(ended or {}).get(rank, ""))
        if rank in heard_s
        else one
        for rank, one in view.ranks.items()
    }
    return dataclasses.replace(view, ranks=ranks)


@pytest.mark.parametrize(
    ("heard_s", "named"),
    [
        ({2: 5.0}, [(2,)]),  # the others live
        ({0: 6.0, 1: 6.1, 2: 5.0, 3: 6.2}, [(2,)]),  # they have died of it
        ({0: 6.0, 1: 6.01, 2: 6.02, 3: 6.03}, []),  # somebody has ended the job
        ({0: 6.08, 1: 6.09, 2: 6.0, 3: 6.09}, []),  # and rank 2 was looked at first
    ],
)
def test_nobody_waits_for_the_dead_until_a_deadline(tmp_path: Path, heard_s: dict[int, float], named: list[Any]) -> None:
    hung(tmp_path, culprit=2, since_s=0.2)
    view = dead(view_of(read_folder(tmp_path)), heard_s)
    assert [verdict.ranks for verdict in examine(view, after_s=60).verdicts] == named


@pytest.mark.parametrize(
    ("heard_s", "ended", "named"),
    [
        ({2: 6.0, 0: 6.03, 1: 6.04, 3: 6.04}, {2: "SIGKILL", 0: "SIGTERM", 1: "SIGTERM", 3: "SIGTERM"}, [(2,)]),  # the launcher
        (
            {2: 6.0, 0: 6.03, 1: 6.04, 3: 6.04},
            {2: "SIGKILL", 0: "exit code 1", 1: "SIGTERM", 3: "SIGTERM"},
            [(2,)],
        ),  # died of it
        ({2: 6.0, 0: 6.0, 1: 6.001, 3: 6.002}, dict.fromkeys(range(4), "SIGTERM"), []),  # somebody has ended the job
        ({2: 6.0, 0: 6.0, 1: 6.001, 3: 6.002}, dict.fromkeys(range(4), "SIGKILL"), []),
        ({2: 6.0}, {2: "SIGTERM"}, [(2,)]),  # the others live
    ],
)
def test_who_was_asked_to_end_has_not_died_first(
    tmp_path: Path, heard_s: dict[int, float], ended: dict[int, str], named: list[Any]
) -> None:
    hung(tmp_path, culprit=2, since_s=0.2)
    found = examine(dead(view_of(read_folder(tmp_path)), heard_s, ended), after_s=60)
    assert [verdict.ranks for verdict in found.verdicts] == named
    assert all(f"is dead ({ended[2]})" in line for line in found.lines)


@pytest.mark.parametrize(("ended", "named"), [("SIGSEGV", [(1,)]), ("exit code 1", [(1,)]), ("exit code 0", []), ("", [])])
def test_a_death_is_told_before_anybody_waits(tmp_path: Path, ended: str, named: list[Any]) -> None:
    hung(tmp_path, culprit=-1, since_s=0.2)
    for rank in range(4):  # nobody is in any call
        call(ring(tmp_path, rank), 1, time.monotonic_ns() - S, time.monotonic_ns() - S // 2)
    view = dead(view_of(read_folder(tmp_path)), {1: 6.0}, {1: ended})
    found = examine(view, after_s=60)
    assert [verdict.ranks for verdict in found.verdicts] == named
    assert all(line.startswith(f"rank 1 has ended ({ended}) since ") for line in found.lines)


@pytest.mark.parametrize("reaped", [False, True])
@pytest.mark.parametrize(("how", "told"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGTERM, "SIGTERM"), (None, "exit code 3")])
def test_how_a_process_ended_is_seen_at_once(how: signal.Signals | None, told: str, reaped: bool) -> None:
    command = [sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(3)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        endings = Endings()
        endings.watch([process.pid, os.getpid()])
        parent = threading.Thread(target=process.wait)
        if reaped:
            parent.start()
        begin = time.monotonic_ns()
        assert process.stdin is not None
        process.stdin.close() if how is None else process.send_signal(how)
        endings.sleep(60)
        now = time.monotonic_ns()
        assert begin < endings.known[process.pid].at_ns < now < begin + 30 * S
        assert endings.known[process.pid].how in ((told, "") if reaped else (told,))  # before Linux 6.15, nobody knows any more
        assert os.getpid() not in endings.known
        endings.close()


@pytest.mark.parametrize(
    ("phase", "count"), [(Phase.CHECKPOINT, 0), (Phase.EVALUATION, 0), (Phase.FORWARD, 1), (Phase.DATA, 1)]
)
def test_a_rank_that_writes_may_take_its_time(tmp_path: Path, phase: Phase, count: int) -> None:
    hung(tmp_path, phase=phase, since_s=130)  # 120 s are allowed where no steps are known
    found = examine(view_of(read_folder(tmp_path)))
    assert len(found.verdicts) == count
    if phase is Phase.DATA:
        assert "waiting for data" in found.lines[0]


def test_coordinates_are_told(tmp_path: Path) -> None:
    hung(tmp_path)
    (line,) = examine(view_of(read_folder(tmp_path)), after_s=5).lines
    assert "(dp 2)" in line


def test_a_wall_clock_that_is_set_makes_no_call_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hung(tmp_path, since_s=1)
    later = time.time_ns() + 3600 * S
    monkeypatch.setattr("unickpt.timing.folder.time.time_ns", lambda: later)
    assert examine(view_of(read_folder(tmp_path)), after_s=5).verdicts == []


def test_transfers_begin_when_both_sides_are_there() -> None:
    calls = np.zeros(4, CALL)
    calls["rank"], calls["op"] = [0, 1, 0, 1], [int(Op.SEND), int(Op.RECEIVE)] * 2
    calls["source"], calls["destination"], calls["seq"], calls["bytes"] = 0, 1, [1, 1, 2, 2], 64
    calls["call_ns"], calls["end_ns"] = [100, 50, 200, 900], [0, 130, 0, 925]
    assert transfers_of(calls)["ns"].tolist() == [30.0, 25.0]
    calls["wait_ns"] = [0, 125, 0, 700]
    assert transfers_of(calls)["ns"].tolist() == [25.0]  # the first may have been there for long when somebody looked


def test_a_hang_does_not_lengthen_the_deadline() -> None:
    memory = Memory()
    empty = made_up([])
    memory.deadline_s = 5.0
    assert memory.with_more(dataclasses.replace(empty, longest_wait_ns=2 * S)).longest_wait_ns == 2 * S
    assert memory.with_more(dataclasses.replace(empty, longest_wait_ns=60 * S)).longest_wait_ns == 2 * S


def test_steps_are_remembered_beyond_one_look() -> None:
    memory, empty = Memory(), made_up([])
    for first in (1, 3, 20, 40):
        steps = np.zeros(4, STEP)
        steps["number"] = np.arange(first, first + 4)
        seen = memory.with_more(dataclasses.replace(empty, steps=steps)).steps["number"].tolist()
    assert seen == [1, 2, 3, 4, 5, 6, 20, 21, 22, 23, 40, 41, 42, 43]


# ---------------------------------------------------------------- links


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


def told(*rows: tuple[int, int, float, float], looks: int = 6, usual: Usual | None = None) -> list[Any]:
    usual = usual or learnt()
    found: list[Any] = []
    for look in range(looks):
        found = usual.slow(links(*rows), look * S, HOSTS)
    return [verdict.link or verdict.ranks for verdict in found]


def learnt() -> Usual:
    usual = Usual()
    for look in range(20):
        usual.slow(links((0, 3, 10, 0.1), (3, 0, 10, 0.1), (1, 2, 12, 0.1), (2, 1, 9, 0.1)), look * S, HOSTS)
    return usual


def test_a_link_that_takes_longer_than_it_used_to_is_named() -> None:
    assert told((0, 3, 11, 0.1), (3, 0, 9, 0.1), (1, 2, 500, 0.8), (2, 1, 9, 0.1)) == [(1, 2)]


@pytest.mark.parametrize(("late_ms", "named"), [(0, [(2, 3)]), (300, [])])
def test_links_of_a_job_that_waits_for_a_late_rank_tell_nothing(late_ms: int, named: list[Any]) -> None:
    """Acknowledgements that have nothing to go with wait for 40 ms, and links look slow for it."""
    usual = Usual()
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
        view = dataclasses.replace(made_up([], now_ns=look * S), steps=steps, windows=windows)
        found = examine(view, usual=usual).verdicts
    assert [verdict.link for verdict in found if verdict.syndrome is Syndrome.COMMUNICATION_SLOW] == named


@pytest.mark.parametrize(("share", "named"), [(0.0, [(2, 3)]), (0.5, [])])
def test_links_of_a_rank_that_is_starved_of_processors_tell_nothing(share: float, named: list[Any]) -> None:
    usual = Usual()
    for look in range(30):
        windows = np.zeros(2, WINDOW)
        windows["rank"], windows["here"], windows["there"] = [2, 3], [1, 2], [2, 1]
        windows["window_ns"], windows["bytes"] = 2 * S, 1 << 20
        windows["busy_ns"] = [400 * MS if look > 22 else 20 * MS, 20 * MS]
        view = made_up([], now_ns=look * S)
        ranks = {at: RankView(9, "a", State.RUNNING, False, 1, 0, crowded=share if at == 3 else 0.02) for at in range(4)}
        view = dataclasses.replace(view, ranks=ranks, windows=windows)
        found = examine(view, usual=usual).verdicts
    assert [verdict.link for verdict in found if verdict.syndrome is Syndrome.COMMUNICATION_SLOW] == named


def test_a_process_that_wants_a_processor_and_has_none_is_seen() -> None:
    """Two processes of one processor, of which each has half of it; a third one sleeps."""
    loop = [sys.executable, "-c", "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"]
    others = [subprocess.Popen(loop), subprocess.Popen(loop), subprocess.Popen(["sleep", "60"])]
    try:
        time.sleep(1.0)
        crowding, pids = Crowding(), {rank: other.pid for rank, other in enumerate(others)}
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
    assert set(told((0, 3, 500, 0.8), (3, 0, 200, 0.3), (1, 2, 600, 0.8), (2, 1, 300, 0.3))) == {(0, 3), (1, 2)}


def test_both_ways_are_named_if_both_are_slow() -> None:
    slow = told((0, 3, 500, 0.8), (3, 0, 500, 0.7), (1, 2, 600, 0.8), (2, 1, 600, 0.8))
    assert set(slow) == {(0, 3), (3, 0), (1, 2), (2, 1)}


def test_a_moment_is_no_fault_and_neither_is_an_idle_link() -> None:
    assert told((1, 2, 500, 0.8), looks=3) == []
    assert told((1, 2, 500, 0.01)) == []
    assert told((1, 2, 500, 0.8), usual=Usual()) == []  # nothing is known of it


def test_what_two_processes_send_each_other_is_seen_by_the_kernel() -> None:
    """Over loopback: 8 MB from one to the other, at both ends in this process, as ranks 0 and 1 of two processes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\ns = socket.create_connection(('127.0.0.1', {port}))\nwhile s.recv(1 << 20): pass"
        other = subprocess.Popen([sys.executable, "-c", code])
        own, _ = server.accept()
        with own:
            pids = {0: os.getpid(), 1: other.pid}
            sampler = Sampler()
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
    assert 0 < found["share"][at] < 1
    assert not found["stuck"].any()


def test_connections_that_come_and_go() -> None:
    sampler = Sampler()
    one = np.zeros(1, CONNECTION)
    one["here"], one["there"], one["acked"], one["busy_us"] = 5, 6, 1000, 10
    assert sampler.window(0, np.zeros(0, CONNECTION)).dtype == WINDOW
    assert sampler.window(1, one)["bytes"].tolist() == [0]  # it may have been there before
    one = one.copy()
    one["acked"] = 1500
    assert sampler.window(2, one)["bytes"].tolist() == [0]  # against the empty sample
    assert sampler.window(3, one)["bytes"].tolist() == [500]


# ---------------------------------------------------------------- the hub


@pytest.fixture
def served() -> Iterator[tuple[Hub, str]]:
    hub = Hub()
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/secret"
    server = serve(hub, listener, secret_of(address))
    yield hub, address
    server.shutdown()
    server.server_close()


def split(tmp_path: Path, since_s: float = 30) -> tuple[Path, Path]:
    """The rings of a hung job on two hosts; rank 2 is on the second one."""
    hung(tmp_path / "a", since_s=since_s)
    (tmp_path / "b").mkdir()
    for rank in (2, 3):
        (tmp_path / "a" / f"{rank:05d}{SUFFIX}").rename(tmp_path / "b" / f"{rank:05d}{SUFFIX}")
    return tmp_path / "a", tmp_path / "b"


def looked_at_by_two(tmp_path: Path, served: tuple[Hub, str], since_s: float) -> tuple[Path, Path, str, dict[str, list[str]]]:
    """Both folders of a job that has hung for so long, the hub's address, and what each agent has told."""
    hub, address = served
    first, second = split(tmp_path, since_s)
    lines: dict[str, list[str]] = {"a": [], "b": []}
    starting.write_address(second, address)
    agents = Agent(first, lines["a"].append, hub), Agent(second, lines["b"].append)
    for _ in range(2):
        agents[1].look(read_folder(second))
        agents[0].look(read_folder(first))
    agents[1].look(read_folder(second))
    return first, second, address, lines


def test_two_agents_are_one_view(tmp_path: Path, served: tuple[Hub, str]) -> None:
    _, _, address, lines = looked_at_by_two(tmp_path, served, since_s=30)
    # with 4 ranks and no steps, 120 s are allowed
    assert lines == {"a": [], "b": []}
    job = fetch(address)
    assert sorted(job.ranks) == [0, 1, 2, 3]
    (verdict,) = examine(job, after_s=5).verdicts
    assert verdict.ranks == (2,)


def test_the_agent_of_the_culprit_tells_it_too(tmp_path: Path, served: tuple[Hub, str]) -> None:
    first, _, address, lines = looked_at_by_two(tmp_path, served, since_s=130)
    assert len(lines["a"]) == len(lines["b"]) == 1  # once, not at every look
    assert "rank 2 has not entered all_reduce #3" in lines["b"][0]
    (noted,) = [json.loads(line) for line in (first / "verdicts.jsonl").read_text().splitlines()]
    assert (noted["ranks"], noted["syndrome"]) == ([2], "non-communication hang")
    verdicts = json.loads(urllib.request.urlopen(f"{address}/verdicts").read())
    assert verdicts["lines"][0].startswith("rank 2")


def test_alone_an_agent_tells_nothing_of_others(tmp_path: Path) -> None:
    hung(tmp_path / "a", since_s=130)
    (tmp_path / "a" / f"00002{SUFFIX}").unlink()
    lines: list[str] = []
    starting.write_address(tmp_path / "a", "http://127.0.0.1:9/gone")  # nobody answers
    Agent(tmp_path / "a", lines.append).look(read_folder(tmp_path / "a"))
    assert lines == []


def test_a_host_that_is_silent_is_unknown(tmp_path: Path, served: tuple[Hub, str], monkeypatch: pytest.MonkeyPatch) -> None:
    hub, address = served
    first, second = split(tmp_path)
    send(address, "b", view_of(read_folder(second)))
    monkeypatch.setattr("unickpt.agent.watching._SILENT_S", -1.0)
    Agent(first, print, hub).look(read_folder(first))
    job = fetch(address)
    assert {rank: one.state for rank, one in job.ranks.items()}[2] is State.UNKNOWN
    assert any("nothing was heard of" in problem for problem in job.problems)


@pytest.mark.parametrize("path", ["view", "other/view", "secret", "secret/", "secret/../view", "secret/else"])
def test_only_who_knows_the_address_is_answered(served: tuple[Hub, str], path: str) -> None:
    base = served[1].rpartition("/")[0]
    for data in (None, b"x"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{base}/{path}", data)
        assert refused.value.code == 404


def test_what_is_no_view_is_refused_by_the_hub(served: tuple[Hub, str]) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{served[1]}/view", b"nonsense")
    assert refused.value.code == 400
    assert served[0].others() == []


def test_prometheus_is_answered(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    hung(tmp_path)
    hub = Hub()
    listener = socket.create_server(("127.0.0.1", 0))
    base = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = serve(hub, listener, "secret", open_metrics=True)
    try:
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{base}/metrics")
        assert refused.value.code == 503
        view = view_of(read_folder(tmp_path))
        hub.publish(view, examine(view, after_s=5))
        for path in ("metrics", "secret/metrics"):
            text = urllib.request.urlopen(f"{base}/{path}").read().decode()
            assert 'unickpt_rank_step{rank="1"} 20.0' in text
            assert 'unickpt_verdicts{rank="2",syndrome="non-communication hang"} 1.0' in text
            assert 'unickpt_collectives_total{group="data parallel"} 3.0' in text
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"{base}/verdicts")
    finally:
        server.shutdown()
        server.server_close()


def test_diagnose_asks_an_agent(tmp_path: Path, served: tuple[Hub, str], capsys: pytest.CaptureFixture[str]) -> None:
    hub, address = served
    hung(tmp_path)
    Agent(tmp_path, print, hub).look(read_folder(tmp_path))
    assert main(["diagnose", address, "--after", "5"]) == 1
    assert "rank 2 has not entered" in " ".join(capsys.readouterr().out.split())
    assert main(["diagnose", "http://127.0.0.1:9/x"]) == 2
    assert "no agent answers there" in capsys.readouterr().err
    assert main(["diagnose", "ftp://127.0.0.1/x"]) == 2


def test_the_address_is_its_owners_alone(tmp_path: Path) -> None:
    starting.write_address(tmp_path, "http://127.0.0.1:1/s")
    assert starting.read_address(tmp_path) == "http://127.0.0.1:1/s"
    assert (tmp_path / starting.ADDRESS).stat().st_mode & 0o077 == 0


def test_an_answer_is_about_ranks_that_are_there(tmp_path: Path) -> None:
    hung(tmp_path)
    view = view_of(read_folder(tmp_path))
    found = examine(view, after_s=5)
    assert hubs.answer(found, view).ask == [2]
    others = dataclasses.replace(view, ranks={rank: one for rank, one in view.ranks.items() if rank != 2})
    assert hubs.answer(found, others) == hubs.Answer()


# ---------------------------------------------------------------- stacks

STUCK = """
import sys, time
from pathlib import Path
from unickpt.timing import stacks
listening = stacks.listen(Path(sys.argv[1]))
def busy():
    print("here", flush=True)
    {body}
def outer():
    busy()
outer()
"""


@pytest.mark.parametrize("body", ["while True: pass", "time.sleep(3600)", "sum(iter(int, 1))"])
def test_the_stack_of_a_process_that_is_stuck(tmp_path: Path, body: str) -> None:
    path = tmp_path / "0.stacks"
    command = [sys.executable, "-c", STUCK.format(body=body), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPO, env=environment(UNICKPT_AUTOLOAD="0")) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.2)  # it says so a line before it is
            for _ in range(2):
                assert stacks.ask(process.pid, path).startswith("busy (<string>:8) < outer (<string>:10)")
            assert process.poll() is None
        finally:
            process.kill()


def test_a_process_that_does_not_listen_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "0.stacks").write_text("main 0x1\n")
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert stacks.ask(process.pid, tmp_path / "0.stacks") == ""
        time.sleep(0.1)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_signal_that_somebody_uses_is_not_taken(tmp_path: Path) -> None:
    assert stacks.SIGNAL is not None
    before = signal.signal(stacks.SIGNAL, lambda *_: None)
    try:
        assert stacks.listen(tmp_path / "0.stacks") is None
    finally:
        signal.signal(stacks.SIGNAL, before)


# ---------------------------------------------------------------- folders


def test_old_jobs_are_removed_with_all_their_files(tmp_path: Path) -> None:
    for name, age_s in (("old", 1000.0), ("new", 0.0)):
        ring(tmp_path / name, 0)
        (tmp_path / name / "agent").write_text("x")
        at = time.time() - age_s
        os.utime(tmp_path / name / f"00000{SUFFIX}", (at, at))
    (tmp_path / "else").mkdir()
    remove_old(tmp_path, older_than_s=500)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["else", "new"]
    remove_old(tmp_path / "nowhere", older_than_s=0)


def test_rings_of_another_host_are_of_unknown_processes(tmp_path: Path) -> None:
    who = dataclasses.replace(Identity.here(0, 1, "job"), host="elsewhere")
    RingWriter(tmp_path / f"0{SUFFIX}", who, capacity=8)
    who = dataclasses.replace(Identity.here(1, 2, "job"), boot="before")
    RingWriter(tmp_path / f"1{SUFFIX}", who, capacity=8)
    job = read_folder(tmp_path)
    assert job.states == {0: State.UNKNOWN, 1: State.DEAD}


def test_a_look_sees_more_than_what_has_come() -> None:
    from unickpt.agent.watching import FEWEST, RECORDS, window

    assert window({}, {}) == RECORDS
    assert window({0: 100, 1: 100}, {0: 150, 1: 120}) == FEWEST
    assert window({0: 1000, 1: 100}, {0: 3000, 1: 120}) == 8000
    assert window({0: 1000}, {0: 3000, 1: 90_000}) == RECORDS  # a rank that is new


def test_an_agent_gives_way_to_a_newer_one(tmp_path: Path) -> None:
    """Of a job that was started again in the same folder, where there are always ranks that live."""
    from unickpt.agent import watching

    hung(tmp_path, culprit=-1)
    options = {"every_s": 0.05, "gives_way": True}
    thread = threading.Thread(target=watching.watch, args=(tmp_path, print), kwargs=options, daemon=True)
    thread.start()
    time.sleep(0.5)
    assert thread.is_alive()
    (started,) = tmp_path.glob(f"{watching.STARTED}-*")
    started.write_text("another one")
    thread.join(10)
    assert not thread.is_alive()


def test_stacks_are_done_without_where_there_is_no_room(tmp_path: Path) -> None:
    assert stacks.listen(tmp_path / "nowhere" / "0.stacks") is None


def test_watching_ends_when_nobody_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from unickpt.agent import watching

    monkeypatch.setattr(watching, "_WITHOUT_RANKS_S", 0.2)
    thread = threading.Thread(target=watching.watch, args=(tmp_path, print), kwargs={"every_s": 0.05}, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
