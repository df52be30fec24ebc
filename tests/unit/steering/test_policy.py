"""The policy: every row of its table, deadlines, and no eviction in a thousand sound windows."""

from __future__ import annotations

import itertools
import random
import socket
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest

from tests.support.repository import REPO
from tests.unit.steering.made import running as job
from unickpt.base.errors import ConfigError
from unickpt.base.options.declared import declarations
from unickpt.base.options.steering import SteeringOptions, from_rendezvous
from unickpt.diagnosis.detectors.hangs import BEFORE_S
from unickpt.diagnosis.detectors.hardware import Weight
from unickpt.diagnosis.detectors.observations import (
    CallRef,
    DownMember,
    Exited,
    LongSteps,
    LongStepsNowAndThen,
    NotEntered,
    RotatingPauses,
)
from unickpt.diagnosis.detectors.verdicts import Cause, Syndrome, Verdict
from unickpt.diagnosis.host.movement import ProcessSample, Traffic, same_place_s, sample, still_s
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.host.stack_dumps import Frame
from unickpt.diagnosis.host.tcp_counters import CONNECTION, Connections, connections_of
from unickpt.diagnosis.recording.records import Op
from unickpt.diagnosis.snapshot.snapshot import GroupInfo
from unickpt.steering.policy.policy import Fault, Finding, History, Row, decide, finding_of
from unickpt.steering.state.hosts import host_rows, table
from unickpt.steering.state.membership import (
    NEVER_S,
    JobPhase,
    Joined,
    Membership,
    Park,
    Paused,
)
from unickpt.steering.state.orders import Action, Order, events
from unickpt.steering.state.transitions import transition

DEFAULTS = SteeringOptions()
EVICT = SteeringOptions(slow="evict")


def the_order(
    finding: Finding, state: Membership | None = None, options: SteeringOptions = DEFAULTS, **past: Any
) -> Order | None:
    orders = decide([finding], History(**past), state or job(), options)
    assert len(orders) <= 1
    return orders[0] if orders else None


def found(fault: Fault, *hosts: str, age_s: float = 1000.0, still: float = 100.0, **more: Any) -> Finding:
    return Finding(fault, hosts, age_s, still, text="evidence", **more)


def parked(row: Row, *hosts: str, for_s: float = 300.0) -> Order:
    return Order(Action.PARK, hosts, row.name, "evidence", for_s)


def restarted(row: Row) -> Order:
    return Order(Action.RESTART, (), row.name, "evidence")


ROWS: list[tuple[Row, Finding, Membership, SteeringOptions, History, Order]] = [
    (Row.DEAD_OUT, found(Fault.DEAD, "h1", age_s=45), job(), DEFAULTS, History(), parked(Row.DEAD_OUT, "h1")),
    (Row.STOPPED_OUT, found(Fault.STOPPED, "h1", age_s=60), job(), DEFAULTS, History(), parked(Row.STOPPED_OUT, "h1")),
    (Row.HUNG_OUT, found(Fault.HUNG, "h1", age_s=300), job(), DEFAULTS, History(), parked(Row.HUNG_OUT, "h1")),
    (
        Row.BROKEN_OUT, found(Fault.HUNG, "h1", age_s=60, still=0, hardware=Weight.PRESENT), job(), DEFAULTS,
        History(longest_pause_s=900), parked(Row.BROKEN_OUT, "h1", for_s=NEVER_S),
    ),
    (
        Row.WITNESS_OUT, found(Fault.WRONG, "h1", age_s=0), job(), DEFAULTS, History(),
        parked(Row.WITNESS_OUT, "h1", for_s=NEVER_S),
    ),
    (Row.WITNESS, found(Fault.WRONG, age_s=0), job(), DEFAULTS, History(), restarted(Row.WITNESS)),
    (Row.COMMON, found(Fault.WRONG, "h1", "h2", "h3"), job(4, 1), DEFAULTS, History(), restarted(Row.COMMON)),
    (Row.AT_FAULT_BUT_NEEDED, found(Fault.DEAD, "h1"), job(4, 4), DEFAULTS, History(), restarted(Row.AT_FAULT_BUT_NEEDED)),
    (Row.COMMON, found(Fault.HUNG, "h1", "h2", "h3"), job(4, 1), DEFAULTS, History(), restarted(Row.COMMON)),
    (Row.PROGRAM, found(Fault.MISMATCH, "h1", age_s=1), job(), DEFAULTS, History(), restarted(Row.PROGRAM)),
    (Row.PROGRAM, found(Fault.DEADLOCK, "h1", age_s=1), job(), DEFAULTS, History(), restarted(Row.PROGRAM)),
    (Row.NETWORK, found(Fault.NETWORK, age_s=300), job(), DEFAULTS, History(), restarted(Row.NETWORK)),
    (
        Row.LINK_CHECK, found(Fault.SLOW_LINK, "h2", "h1"), job(), DEFAULTS, History(),
        Order(Action.CHECK, ("h1", "h2"), "LINK_CHECK", "evidence"),
    ),
    (
        Row.LINK_OUT, found(Fault.DEAD_LINK, "h2", "h1", blamed="h2"), job(), DEFAULTS,
        History(checked=frozenset({("h1", "h2")})), parked(Row.LINK_OUT, "h2"),
    ),
    (Row.SLOW_OUT, found(Fault.SLOW, "h1"), job(4, 4, 1), EVICT, History(), parked(Row.SLOW_OUT, "h1")),
    (
        Row.NO_PROGRESS, found(Fault.MISMATCH, "h1"), job(), DEFAULTS, History(fruitless=3),
        Order(Action.STOP, (), "NO_PROGRESS", "3 restarts without progress; PROGRAM: evidence"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "finding", "state", "options", "history", "order"), ROWS, ids=[str(each[0].name) for each in ROWS]
)
def test_every_row(
    row: Row, finding: Finding, state: Membership, options: SteeringOptions, history: History, order: Order
) -> None:
    assert decide([finding], history, state, options) == [order]
    assert row.name in order.reason


def test_the_rows_are_all_tested_and_documented() -> None:
    assert {each[0] for each in ROWS} == set(Row)
    page = (REPO / "docs" / "guides" / "steering-policy.md").read_text()
    missing = [row.name for row in Row if f"| `{row.name}` | {row.value} |" not in page]
    assert not missing


@pytest.mark.parametrize(
    "finding",
    [
        found(Fault.DEAD, "h1", age_s=44.9),
        found(Fault.STOPPED, "h1", age_s=59),
        found(Fault.HUNG, "h1", age_s=299),
        found(Fault.HUNG, "h1", still=29),
        found(Fault.HUNG, "h1", still=0, same_place_s=419),
        found(Fault.HUNG, "h1", age_s=100_000, at_work=True),
        found(Fault.NETWORK, age_s=299),
        found(Fault.SLOW, "h1", age_s=100_000, gain=0.9),
        found(Fault.DEAD, "elsewhere"),
    ],
    ids=str,
)
def test_telling_is_not_acting(finding: Finding) -> None:
    assert the_order(finding) is None


@pytest.mark.parametrize(
    ("finding", "row", "age_s"),
    [
        (found(Fault.HUNG, "h1", still=0, at_work=True), Row.BROKEN_OUT, 60),
        (found(Fault.DEAD, "h1"), Row.BROKEN_OUT, 9),
        (found(Fault.NETWORK, "h1"), Row.BROKEN_OUT, 60),
        (found(Fault.SLOW, "h1", gain=0.9), Row.BROKEN_OUT, 60),
        (found(Fault.DEAD_LINK, "h1", "h2", blamed="h2"), Row.LINK_OUT, 0),
    ],
    ids=str,
)
def test_broken_hardware_shortens_the_deadline_and_a_person_admits_the_host(finding: Finding, row: Row, age_s: float) -> None:
    finding = replace(finding, hardware=Weight.PRESENT)
    order = the_order(replace(finding, age_s=age_s), options=EVICT)
    assert order is not None
    assert (order.reason, order.for_s, order.hosts) == (row.name, NEVER_S, finding.hosts[-1:])
    if age_s:
        assert the_order(replace(finding, age_s=age_s - 0.1), options=EVICT) is None


def test_sound_hardware_lengthens_the_deadline_a_little() -> None:
    for weight, hang_s, loop_s, slow_s in ((Weight.ABSENT, 390, 546, 390), (Weight.UNKNOWN, 300, 420, 300)):
        for finding, field, limit_s in (
            (found(Fault.HUNG, "h1"), "age_s", hang_s),
            (found(Fault.HUNG, "h1", still=0), "same_place_s", loop_s),
            (found(Fault.SLOW, "h1", gain=0.9), "age_s", slow_s),
            (found(Fault.NETWORK), "age_s", hang_s),
        ):
            finding = replace(finding, hardware=weight)
            assert the_order(replace(finding, **{field: limit_s}), options=EVICT) is not None
            assert the_order(replace(finding, **{field: limit_s - 0.1}), options=EVICT) is None
    dead = found(Fault.DEAD, "h1", age_s=45, hardware=Weight.ABSENT)
    assert the_order(dead) == parked(Row.DEAD_OUT, "h1")
    options = SteeringOptions()  # with NCCL, all ranks end after 600 s
    assert options.sound_factor * max(options.hang_seconds, options.loop_seconds) < 600


def test_where_too_few_hosts_are_left_broken_hardware_restarts_in_place() -> None:
    finding = found(Fault.HUNG, "h1", hardware=Weight.PRESENT)
    assert the_order(finding, job(4, 4)) == restarted(Row.AT_FAULT_BUT_NEEDED)


@pytest.mark.parametrize(
    ("cause", "evidence"),
    [
        (Cause.GARBAGE, LongSteps(60e6, 100e6, 2, 8, 1.0)),
        (Cause.GARBAGE, RotatingPauses(60e6, 100e6, 64, 32)),
        (Cause.COMPUTE, LongStepsNowAndThen(600e6, 60e6, 100e6, 8, 64, 8)),
    ],
)
def test_what_the_program_loses_takes_no_host_out(cause: Cause, evidence: Any) -> None:
    verdict = Verdict(
        Syndrome.NON_COMMUNICATION_SLOW, (1,), 0, cause=Cause.COMPUTE, evidence=(LongSteps(60e6, 100e6, 2, 8, 1.0),)
    )
    hosts, now_ns = {0: "h0", 1: "h1", 2: "h2"}, int(1e15)
    slow = [
        finding_of(each, hosts, now_ns, predicted=0.9)
        for each in (verdict, replace(verdict, cause=cause, evidence=(evidence,)))
    ]
    assert [finding.fault for finding in slow] == [Fault.SLOW] * 2
    assert [the_order(finding, options=EVICT) is not None for finding in slow] == [True, False]


def test_the_deadline_of_a_hang_grows_with_the_pauses_of_the_job() -> None:
    assert the_order(found(Fault.HUNG, "h1", age_s=899), longest_pause_s=300.0) is None
    assert the_order(found(Fault.HUNG, "h1", age_s=900), longest_pause_s=300.0) == parked(Row.HUNG_OUT, "h1")


def test_an_endless_loop_is_out_after_a_deadline_of_its_own() -> None:
    assert the_order(found(Fault.HUNG, "h1", still=0, same_place_s=420)) == parked(Row.HUNG_OUT, "h1")
    nccl_s = 600.0  # torch's default with NCCL
    assert the_order(found(Fault.HUNG, "h1", age_s=nccl_s - 60, still=0, same_place_s=nccl_s - 60 - BEFORE_S)), "before NCCL"


def test_ranks_that_may_not_react_are_killed_and_others_may_finish_a_save() -> None:
    ranks = {
        fault: order.ranks
        for fault in Fault
        if (order := the_order(found(fault, "h1", ranks=(2, 3)), options=replace(EVICT, slow_seconds=1.0)))
    }
    assert ranks[Fault.STOPPED] == ranks[Fault.HUNG] == (2, 3)
    assert ranks[Fault.MISMATCH] == ranks[Fault.NETWORK] == ranks[Fault.DEAD] == ()


def test_a_host_that_is_out_again_waits_twice_as_long() -> None:
    waits = [the_order(found(Fault.DEAD, "h1"), evictions={"h1": times}) for times in (0, 1, 2, 9, 1000)]
    assert [order and order.for_s for order in waits] == [300, 600, 1200, 86_400, 86_400]


def test_a_slow_host_is_out_only_if_asked_and_if_it_pays() -> None:
    slow = found(Fault.SLOW, "h1", gain=0.2)
    assert the_order(slow) is None
    assert the_order(slow, options=EVICT) is None  # a quarter of the capacity is more than a fifth
    assert the_order(replace(slow, gain=0.3), options=EVICT) == parked(Row.SLOW_OUT, "h1")
    assert the_order(slow, job(4, 2, spares=1), EVICT) == parked(Row.SLOW_OUT, "h1")
    assert the_order(replace(slow, age_s=299), job(4, 2, spares=1), EVICT) is None
    assert the_order(slow, job(4, 4), EVICT) is None  # too few would be left


def test_a_link_is_checked_once_before_one_end_is_blamed() -> None:
    known = frozenset({("h1", "h2")})
    assert the_order(found(Fault.SLOW_LINK, "h2", "h1"), checked=known) is None
    assert the_order(found(Fault.DEAD_LINK, "h2", "h1", age_s=100), checked=known) is None
    assert the_order(found(Fault.DEAD_LINK, "h2", "h1"), checked=known) == restarted(Row.NETWORK)
    slow = found(Fault.SLOW_LINK, "h2", "h1", blamed="h2", gain=0.5)
    assert the_order(slow, checked=known) is None
    assert the_order(slow, options=EVICT, checked=known) == parked(Row.SLOW_OUT, "h2")


def test_a_link_within_a_host_is_the_hosts() -> None:
    assert the_order(found(Fault.DEAD_LINK, "h1", age_s=300)) == parked(Row.LINK_OUT, "h1")
    assert the_order(found(Fault.DEAD_LINK, "h1", age_s=299)) is None
    assert the_order(found(Fault.SLOW_LINK, "h1", gain=0.5)) is None
    assert the_order(found(Fault.SLOW_LINK, "h1", gain=0.5), options=EVICT) == parked(Row.SLOW_OUT, "h1")


def test_one_order_at_a_time_the_most_certain_first() -> None:
    findings = [found(Fault.NETWORK), found(Fault.SLOW_LINK, "h2", "h3"), found(Fault.DEAD, "h1"), found(Fault.MISMATCH, "h2")]
    assert decide(findings, History(), job(), DEFAULTS) == [parked(Row.DEAD_OUT, "h1")]


def test_no_order_without_a_running_round() -> None:
    state = transition(job(), Park("h0", "asked"), 0.0)
    assert state.phase is JobPhase.GATHERING
    assert decide([found(Fault.DEAD, "h1")], History(), state, DEFAULTS) == []
    assert decide([found(Fault.DEAD, "h1")], History(), replace(job(), closed="asked"), DEFAULTS) == []


def test_orders_act_on_the_membership() -> None:
    state = job()
    order = parked(Row.DEAD_OUT, "h1")
    assert order.text == "park h1 for 300 s: DEAD_OUT: evidence"
    for event in events(order, state):
        state = transition(state, event, 0.0)
    assert state.reason == "h1 is parked: DEAD_OUT: evidence"
    assert table(host_rows(state, 5.0)).splitlines()[1:3] == [
        "h0    -     -      stopping  -",
        "h1    -     -      parked    5 s    DEAD_OUT: evidence",
    ]
    assert host_rows(job(), 7.0)[2].as_json() == {
        "host": "h2",
        "rank": 2,
        "ranks": [],
        "state": "running",
        "since_s": 7.0,
        "reason": "",
    }
    running = job()
    for name, workers in (("h0", 8), ("h1", 1), ("h2", 2)):
        running = transition(running, Joined(name, "1", f"{name}:1", workers), 0.0)
    assert [list(row.ranks) for row in host_rows(running, 5.0)] == [list(range(8)), [8], [9, 10], []]
    assert table(host_rows(running, 5.0)).splitlines()[1].split() == ["h0", "0", "0-7", "running", "5", "s"]
    for event in events(Order(Action.ADMIT, ("h1",)), state):
        state = transition(state, event, 0.0)
    assert not state.parked
    assert events(Order(Action.CHECK, ("h1", "h2")), state) == []
    again = job()
    for event in events(restarted(Row.PROGRAM), again):
        again = transition(again, event, 0.0)
    assert (again.phase, again.reason) == (JobPhase.GATHERING, "PROGRAM: evidence")
    for event in events(Order(Action.STOP, (), "NO_PROGRESS", "why"), again):
        again = transition(again, event, 0.0)
    assert again.closed == "NO_PROGRESS: why"


# ---------------------------------------------------------------- verdicts

GROUP = GroupInfo("dp", "dp", ((0, 4, 1),))  # type: ignore[arg-type]
HOSTS = {rank: f"h{rank // 2}" for rank in range(8)}
NOW_NS = 2_000 * 10**9


def hang(rank: int, since_s: float = 1000.0, **more: Any) -> Verdict:
    evidence = (NotEntered(rank, CallRef(Op.ALL_REDUCE, 7, GROUP), 3),)
    return Verdict(Syndrome.NON_COMMUNICATION_HANG, (rank,), int(since_s * 1e9), **{"evidence": evidence, **more})


@pytest.mark.parametrize(
    ("verdict", "fault", "hosts"),
    [
        (hang(3), Fault.HUNG, ("h1",)),
        (hang(3, state=State.STOPPED), Fault.STOPPED, ("h1",)),
        (hang(3, state=State.DEAD), Fault.DEAD, ("h1",)),
        (hang(3, evidence=(Exited(3, None),)), Fault.DEAD, ("h1",)),
        (hang(3, evidence=(Exited(5, None),)), Fault.HUNG, ("h1",)),
        (Verdict(Syndrome.COMMUNICATION_HANG, (2,), 0, evidence=(DownMember(2, State.DEAD, None),)), Fault.DEAD, ("h1",)),
        (Verdict(Syndrome.COMMUNICATION_HANG, (0, 2), 0), Fault.NETWORK, ("h0", "h1")),
        (Verdict(Syndrome.COMMUNICATION_HANG, (), 0, link=(1, 7)), Fault.DEAD_LINK, ("h0", "h3")),
        (Verdict(Syndrome.COMMUNICATION_SLOW, (), 0, link=(7, 1)), Fault.SLOW_LINK, ("h3", "h0")),
        (Verdict(Syndrome.NON_COMMUNICATION_SLOW, (4, 5), 0), Fault.SLOW, ("h2",)),
        (Verdict(Syndrome.MISMATCH, (4,), 0), Fault.MISMATCH, ("h2",)),
        (Verdict(Syndrome.DEADLOCK, (0, 1), 0), Fault.DEADLOCK, ("h0",)),
    ],
)
def test_verdicts_as_findings(verdict: Verdict, fault: Fault, hosts: tuple[str, ...]) -> None:
    finding = finding_of(verdict, HOSTS, NOW_NS)
    assert (finding.fault, finding.hosts) == (fault, hosts)
    assert finding.age_s == (NOW_NS - verdict.since_ns) / 1e9


def test_the_gain_of_a_slow_rank_and_the_work_of_a_waiting_one() -> None:
    slow = Verdict(Syndrome.NON_COMMUNICATION_SLOW, (1,), 0, evidence=(LongSteps(25e6, 100e6, 7, 20, 1.0),))
    assert finding_of(slow, HOSTS, NOW_NS).gain == 0.25
    assert finding_of(hang(1, cause=Cause.CHECKPOINT), HOSTS, NOW_NS).at_work


def test_movement_is_a_stack_processor_time_or_bytes() -> None:
    frames = (Frame("wait", "a.py", 3), Frame("main", "a.py", 9))
    stays = [ProcessSample(float(t), frames, 5.0 + 0.01 * t, 100) for t in range(60)]
    assert still_s(stays) == 59
    assert still_s([*stays[:40], *(replace(each, io_bytes=101) for each in stays[40:])]) == 19
    assert still_s([*stays[:40], *(replace(each, stack=frames[1:]) for each in stays[40:])]) == 19
    assert still_s([replace(each, cpu_s=each.at_s / 2) for each in stays]) == 0
    assert still_s([replace(each, tcp_bytes=5000 * int(each.at_s)) for each in stays]) == 0  # an upload
    assert still_s([replace(each, tcp_bytes=10**7) if each.at_s < 40 else each for each in stays]) == 59  # a lost count
    assert still_s([]) == 0


def test_traffic_of_busy_connections_is_counted() -> None:
    def look(*rows: tuple[int, int, int, int]) -> Connections:
        found = np.zeros(len(rows), CONNECTION)
        for at, row in enumerate(rows):
            for name, value in zip(("rank", "here", "acked", "received"), row, strict=True):
                found[name][at] = value
        return found

    traffic = Traffic()
    traffic.add(look((0, 11, 500_000, 100), (1, 12, 50, 0)), 5.0)  # as they are found
    assert (traffic.of(0), traffic.of(1), traffic.of(7)) == (0, 0, 0)
    traffic.add(look((0, 11, 900_000, 150), (1, 12, 50, 0), (0, 13, 9000, 1000)), 6.0)
    assert traffic.of(0) == 400_050 - 60 * 4096 + 10_000 - 2 * 4096  # a new one counts from its beginning
    traffic.add(look((1, 12, 60, 0)), 7.0)  # those of rank 0 are closed
    traffic.add(look((1, 12, 60, 5000), (0, 11, 3, 0)), 8.0)  # a connection with the same ends
    assert traffic.of(0) == 400_050 - 60 * 4096 + 10_000 - 2 * 4096
    assert traffic.of(1) == 0


def test_a_slow_upload_moves_and_bursts_in_passing_do_not() -> None:
    """5 KB a second for two minutes, and 40 KB every ten seconds of an exporter in the rank."""
    upload, exporter = Traffic(), Traffic()
    moved = []
    for second in range(120):
        for traffic, count in ((upload, 5000 * second), (exporter, 40_000 * (second // 10))):
            found = np.zeros(1, CONNECTION)
            found["here"], found["received"] = 3, count
            traffic.add(found if second else found[:0], float(second))
        moved.append(upload.of(0))
    assert exporter.of(0) == 0
    assert all(later > sooner for sooner, later in itertools.pairwise(moved[5:]))


def test_a_store_that_many_ranks_ask_does_not_make_its_rank_move() -> None:
    """512 ranks that each move 200 bytes a second: a hundred kilobytes a second in all."""
    traffic = Traffic()
    for second in range(60):
        found = np.zeros(512, CONNECTION)
        found["here"], found["acked"] = np.arange(512), 200 * second
        traffic.add(found, float(second))
    assert traffic.of(0) == 0


def test_an_upload_through_a_slow_socket_moves() -> None:
    """``send`` is not in the counters of input and output, and the main thread is in one call for as long as it lasts."""
    code = (
        "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); "
        "s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096); s.sendall(bytes(1 << 24))"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = subprocess.Popen([sys.executable, "-c", code, str(listener.getsockname()[1])])
        try:
            with listener.accept()[0] as taken:
                taken.recv(1 << 16)
                traffic = Traffic()
                traffic.add(connections_of({3: sender.pid}), 0.0)
                before = sample(sender.pid, 0.0, (), 0, traffic.of(3))
                for _ in range(100):
                    taken.recv(1 << 16)
                traffic.add(connections_of({3: sender.pid}), 2.0)
                after = sample(sender.pid, 2.0, (), 0, traffic.of(3))
        finally:
            sender.kill()
            sender.wait()
    assert before is not None
    assert after is not None
    assert after.io_bytes == before.io_bytes
    assert after.tcp_bytes - before.tcp_bytes > 1 << 20
    assert after.transfers_since(before)


def test_an_endless_loop_stays_in_its_functions_and_other_work_does_not() -> None:
    frame = Frame("spin", "a.py", 3)
    loop = [ProcessSample(float(t), (replace(frame, line=t),), 1.0 * t, 100) for t in range(60)]
    assert (still_s(loop), same_place_s(loop)) == (0, 59)
    assert same_place_s([replace(each, children_s=each.at_s / 2) for each in loop]) == 0  # compilers
    assert same_place_s([replace(each, cpu_s=0.2 * each.at_s) for each in loop]) == 0  # an overloaded machine
    assert same_place_s([replace(each, io_bytes=each.io_bytes + int(each.at_s)) for each in loop]) == 0
    assert same_place_s([*loop[:40], *(replace(each, stack=(replace(frame, function="step"),)) for each in loop[40:])]) == 19
    assert same_place_s([replace(each, stack=()) for each in loop]) == same_place_s([]) == 0


def test_the_movement_of_real_processes() -> None:
    """A loop uses the processor, a sleeper nothing, and a parent has what its children use."""
    spin, parent = "while True: pass", "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    arguments = [["import time; time.sleep(99)"], [spin], [parent, spin]]
    started = [subprocess.Popen([sys.executable, "-c", *each]) for each in arguments]
    try:
        time.sleep(1.0)
        before = [sample(each.pid, 0.0, ()) for each in started]
        end = time.monotonic() + 60  # other work may hold the processors
        while True:
            time.sleep(0.5)
            after = [sample(each.pid, 2.0, ()) for each in started]
            used = [(b.cpu_s - a.cpu_s, b.children_s - a.children_s) for a, b in zip(before, after, strict=True) if a and b]
            if (used[1][0] > 0.2 and used[2][1] > 0.2) or time.monotonic() > end:
                break
    finally:
        for each in started:
            for process in [*psutil.Process(each.pid).children(recursive=True), each]:
                process.kill()
            each.wait()
    assert used[0] == (0, 0)
    assert used[1][0] > 0.2
    assert used[1][1] == 0
    assert used[2][1] > 0.2
    assert sample(started[0].pid, 3.0, ()) in (None, ProcessSample(3.0, (), 0.0, 0))


# ---------------------------------------------------------------- sound jobs


def sound_window(source: random.Random) -> tuple[list[ProcessSample], list[Cause | None], float]:
    """Return samples of a rank that others wait for, its known causes, and the job's longest pause so far.

    It evaluates alone, uploads, compiles in child processes, saves to a stuck file system, waits between attempts of a
    download, runs on an overloaded machine, has a longer batch, evaluates and stands still for 25 s now and then, or computes
    in one function for 400 s at a time. The last two are close to the defaults of 30 s and 420 s.
    """
    kind = source.choice(
        ["evaluation", "upload", "compilation", "save", "retry", "overload", "batch", "stands still", "one function"]
    )
    length_s = source.uniform(20, {"retry": 280, "batch": 60}.get(kind, 1500))
    pause_s = source.choice([0.0, source.uniform(0, length_s)])
    main = Frame("main", "train.py", 3)
    samples, cpu_s, moved, stack = [], 0.0, 0, (main,)
    at_s = 0.0
    while at_s < length_s:
        at_s += 5.0
        moves = kind != "stands still" or at_s % 30.0 == 0
        if kind in ("evaluation", "compilation", "batch", "one function") or (kind == "stands still" and moves):
            cpu_s += 5.0 * source.uniform(0.3, 1.0)
        if kind == "overload":
            cpu_s += 5.0 * source.uniform(0.03, 0.2)
        if kind == "upload":
            moved += source.randint(1, 10**8)
        if (kind in ("evaluation", "batch") and source.random() < 0.5) or (kind == "stands still" and moves):
            stack = (Frame(f"layer_{source.randint(0, 40)}", "model.py", 7), main)
        if kind == "one function":
            stack = (Frame(f"part_{at_s // 405.0:.0f}", "model.py", int(at_s)), main)
        samples.append(ProcessSample(at_s, stack, cpu_s, moved, cpu_s if kind == "compilation" else 0.0))
    return samples, [Cause.CHECKPOINT if kind == "save" else None], pause_s


def test_no_eviction_in_a_thousand_sound_windows() -> None:
    """The detectors name the rank in all of them: the policy must wait, with whatever spares and options."""
    looks = 0
    for seed in range(1000):
        source = random.Random(seed)
        samples, (cause,), pause_s = sound_window(source)
        state, options = job(4, 2, spares=source.randint(0, 1)), source.choice([DEFAULTS, EVICT])
        history = History(longest_pause_s=pause_s, fruitless=source.randint(0, 2))
        rank = source.choice([0, source.randint(0, 7)])
        for end in range(1, len(samples) + 1):
            seen = samples[max(0, end - 120) : end]
            verdict = hang(rank, 1000.0, state=source.choice([State.RUNNING, State.SLEEPING]), cause=cause)
            now_ns = int((1000.0 + seen[-1].at_s) * 1e9)
            finding = finding_of(verdict, HOSTS, now_ns, still=still_s(seen), same_place=same_place_s(seen))
            assert decide([finding], history, state, options) == [], (seed, finding)
            looks += 1
    assert looks > 50_000


def test_the_same_windows_with_a_real_hang_are_found() -> None:
    for seed in range(100):
        source = random.Random(seed)
        samples, _, pause_s = sound_window(source)
        last = samples[-1]
        samples = samples[-20:] + [replace(last, at_s=last.at_s + 5.0 * n) for n in range(1, 900)]
        history = History(longest_pause_s=min(pause_s, 1000.0))
        finding = finding_of(hang(2, 1000.0), HOSTS, int((1000.0 + samples[-1].at_s) * 1e9), still=still_s(samples))
        (order,) = decide([finding], history, job(), DEFAULTS)
        assert (order.action, order.hosts, order.reason) == (Action.PARK, ("h1",), "HUNG_OUT")


# ---------------------------------------------------------------- options


def test_options_come_from_the_rendezvous_configuration() -> None:
    given = {"timeout": 900, "host": "node7", "grow": "false", "expiry_seconds": "5", "retries": "7", "slow": "evict"}
    assert from_rendezvous(given) == SteeringOptions(
        host="node7", grow=False, expiry_seconds=5.0, retries=7, slow="evict"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"expiry_second": "5"}, 'did you mean "--rdzv-conf expiry_seconds"'),
        ({"expiry_seconds": "soon"}, "must be a number"),
        ({"expiry_seconds": "0"}, "positive"),
        ({"grow": "perhaps"}, "true or false"),
        ({"slow": "ignore"}, "one of log, evict"),
        ({"retries": "1.5"}, "a whole number"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_rendezvous(given)


def test_every_option_of_steering_is_documented() -> None:
    page = (REPO / "docs" / "guides" / "steering-options.md").read_text()
    assert [option.key for option in declarations(SteeringOptions) if f"| `{option.key}` |" not in page] == []
    assert transition(job(), Paused(), 5.0).phase is JobPhase.RUNNING
