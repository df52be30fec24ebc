"""A host that returns, or was out for a fault, measures itself first; one that is too slow or wrong stays out."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.unit.steering.checked_events import AT_ONCE, arrive, connect, members, run, started
from tests.unit.steering.peers import KEY, Job, Slowly, hosts, until
from unickpt.steering.links import self_check, self_measure
from unickpt.steering.links.self_check import SelfCheck, partners
from unickpt.steering.state.hosts import host_rows
from unickpt.steering.state.limits import Limits
from unickpt.steering.state.membership import Admit, JobPhase, Joined, Lost, Measured, Membership, Park, Reached, Tick
from unickpt.steering.state.scores import Score, described, failure

USUAL = Score(100.0, 0.0, 20.0, 2.0, 1.0)


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (USUAL, ""),
        (USUAL._replace(compute=51.0, memory=10.1, loopback=1.1, link=0.11), ""),
        (USUAL._replace(compute=49.0), "compute: 49 GFLOP/s, and the median of 3 others is 100 GFLOP/s"),
        (USUAL._replace(memory=9.0), "memory: 9 GB/s, and the median of 3 others is 20 GB/s"),
        (USUAL._replace(loopback=0.5), "loop-back: 0.5 GB/s, and the median of 3 others is 2 GB/s"),
        (USUAL._replace(link=0.05), "link to another host: 0.05 GB/s, and the median of 3 others is 1 GB/s"),
        (USUAL._replace(wrong="memory: a pattern has changed"), "memory: a pattern has changed"),
        (Score(), ""),  # nothing could be measured
    ],
)
def test_a_host_is_compared_with_the_median_of_the_others(score: Score, reason: str) -> None:
    others = [USUAL, USUAL._replace(compute=1.0, memory=1.0), USUAL._replace(compute=1e6, link=900.0)]
    assert failure(score, others, 0.5) == reason


def test_without_others_only_what_is_wrong_counts() -> None:
    assert failure(Score(1e-9), [], 0.5) == failure(Score(1e-9), [Score()], 0.5) == ""
    assert failure(Score(wrong="x"), [], 0.5) == "x"


def test_a_host_that_has_lost_its_gpu_fails() -> None:
    gpus = [USUAL._replace(device=5e4)] * 2
    assert failure(USUAL, [*gpus, USUAL], 0.5) == "no GPU can be used, and other hosts have one"
    assert failure(USUAL, [gpus[0], USUAL, USUAL], 0.5) == ""
    assert described(gpus[0]).startswith("compute 100 GFLOP/s, GPU 5e+04 GFLOP/s, memory 20 GB/s, ")


def test_a_host_that_other_programs_use_does_not_fail_for_its_speed() -> None:
    slow = USUAL._replace(compute=10.0, memory=1.0, loopback=0.1)
    assert failure(slow._replace(busy=0.2), [USUAL], 0.5)
    busy = slow._replace(busy=0.9)
    assert failure(busy, [USUAL], 0.5) == ""
    assert described(busy).endswith("while other programs used 90% of the processors")
    assert failure(busy._replace(link=0.05), [USUAL], 0.5).startswith("link to another host")
    assert failure(busy._replace(wrong="memory: a pattern has changed"), [USUAL], 0.5) == "memory: a pattern has changed"


def test_random_scores_fail_only_below_the_share() -> None:
    source = random.Random(2)
    for _ in range(2000):
        own, *others = [
            Score(*(source.choice([0.0, 10 ** source.uniform(-3, 6)]) for _ in range(5))) for _ in range(source.randint(1, 6))
        ]
        if failure(own, others, 0.5) and not failure(own, others, 0.5).startswith("no GPU"):
            pairs = [(own[at], max(each[at] for each in others)) for at in range(5)]
            assert any(0 < one < 0.5 * best for one, best in pairs)
        assert failure(max([own, *others]), [max([own, *others])] * 3, 0.5) == ""


# ---------------------------------------------------------------- membership


def job(low: int = 1, **limits: Any) -> Membership:
    """Return a job of two hosts whose first measurements are known."""
    values: dict[str, Any] = {**AT_ONCE, "expiry_s": 1e9, "self_check": True, "out_s": 100.0, "longest_out_s": 1e9, **limits}
    state = replace(started(2, low, 2), limits=Limits(low, 2, **values))
    return run(state, Measured("h1", "1", 0, USUAL), Measured("h2", "1", 0, USUAL))


def back(state: Membership) -> Membership:
    """Let h2 die, and its agent be started again."""
    state = connect(arrive(run(state, Lost("h2", "1")), "h1")) if state.limits.min_nodes == 1 else run(state, Lost("h2", "1"))
    return arrive(state, "h2")


def test_a_host_that_returns_waits_for_its_self_check() -> None:
    state = back(job())
    assert (state.phase, state.suspects) == (JobPhase.RUNNING, {"h2": 1})
    assert next(row.reason for row in host_rows(state, 0.0) if row.host == "h2") == "measures itself before it is admitted"
    ignored = run(state, Measured("h2", "1", 0, USUAL), Measured("h2", "1", 9, USUAL), Measured("h2", "7", 1, USUAL))
    assert ignored.suspects == state.suspects
    state = run(state, Measured("h2", "1", 1, USUAL))
    assert (state.phase, state.reason, state.suspects) == (JobPhase.GATHERING, "h2 can be used", {})
    assert state.orders[-1].text.startswith("admit h2, which has passed its self-check: compute 100 GFLOP/s, memory 20 GB/s")


def test_a_host_that_fails_stays_out_longer_each_time_and_is_checked_again() -> None:
    state, now_s, waits = back(job()), 0.0, []
    for check in (1, 2, 3):
        assert state.suspects == {"h2": check}
        state = run(state, Measured("h2", "1", check, USUAL._replace(memory=2.0)), now_s=now_s)
        parking = state.parked["h2"]
        assert parking.reason == "SELF_CHECK: memory: 2 GB/s, and the median of 1 others is 20 GB/s"
        waits.append(parking.until_s - now_s)
        assert next(row for row in host_rows(state, now_s) if row.host == "h2").reason == parking.reason
        now_s = parking.until_s
        state = run(state, Tick(), now_s=now_s)
    assert waits == [100.0, 200.0, 400.0]
    assert state.orders[-1].text.startswith("park h2 for 400 s: SELF_CHECK: memory: 2 GB/s")
    assert run(state, Measured("h2", "1", 4, USUAL), now_s=now_s).reason == "h2 can be used"


def test_a_slow_host_that_is_needed_is_admitted_and_a_wrong_one_is_not() -> None:
    state = back(job(low=2))
    slow, wrong = USUAL._replace(memory=2.0), USUAL._replace(wrong="memory: a pattern has changed")
    assert run(state, Measured("h2", "1", 1, wrong)).parked["h2"].reason == "SELF_CHECK: memory: a pattern has changed"
    admitted = run(state, Measured("h2", "1", 1, slow))
    assert (admitted.parked, admitted.suspects) == ({}, {})
    assert "and is needed" in admitted.orders[-1].text


WRONG, SLOW = USUAL._replace(wrong="compute: a matrix product is wrong"), USUAL._replace(memory=2.0)


def starting(start_check: str, low: int = 3, high: int = 4, *, measured: int = 3) -> Membership:
    """A job of four hosts whose first round waits, and of which some have measured themselves."""
    limits: dict[str, Any] = {
        **AT_ONCE,
        "expiry_s": 1e9,
        "self_check": True,
        "out_s": 100.0,
        "start_check": start_check,
        "join_s": 30.0,
    }
    state = Membership(Limits(low, high, **limits), "h0", gathering_s=-30.0)
    for at in range(4):
        state = run(state, Joined(f"h{at}", "1", f"h{at}:1"))
    return run(state, *(Measured(f"h{at}", "1", 0, USUAL) for at in range(measured)))


def test_a_host_that_computes_wrong_is_refused_before_the_first_round() -> None:
    state = run(starting("refuse"), Measured("h3", "1", 0, WRONG))
    assert state.parked["h3"].reason == "START_CHECK: compute: a matrix product is wrong"
    assert members(run(arrive(state, "h0", "h1", "h2", "h3"), Tick(), now_s=30.0)) == ["h0", "h1", "h2"]
    logged = run(starting("log"), Measured("h3", "1", 0, WRONG))
    assert not logged.parked
    assert logged.orders[-1].text == "keep h3, see start_check: START_CHECK: compute: a matrix product is wrong"
    assert not run(starting("off"), Measured("h3", "1", 0, WRONG)).orders
    needed = run(starting("refuse", low=4), Measured("h3", "1", 0, WRONG))
    assert (needed.parked, needed.orders[-1].text.startswith("keep h3, it is needed: ")) == ({}, True)


def test_a_slow_host_is_refused_only_if_it_is_confirmed_beside_several_others() -> None:
    assert not run(starting("refuse"), Measured("h3", "1", 0, SLOW)).orders
    state = run(starting("refuse"), Measured("h3", "1", 0, SLOW), Measured("h3", "1", 0, SLOW, confirmed=True))
    assert state.parked["h3"].reason == "START_CHECK: memory: 2 GB/s, and the median of 3 others is 20 GB/s"
    assert "h3" not in state.scores
    few = run(starting("refuse", measured=1), Measured("h3", "1", 0, SLOW, confirmed=True))
    assert not few.orders
    busy = SLOW._replace(busy=0.9)
    assert not run(starting("refuse"), Measured("h3", "1", 0, busy, confirmed=True)).orders


def test_the_first_round_waits_for_the_measurements_only_if_asked_to_and_not_for_long() -> None:
    assert arrive(starting("log", measured=0), "h0", "h1", "h2", "h3").phase is JobPhase.OPENING
    state = arrive(starting("refuse"), "h0", "h1", "h2", "h3")
    assert state.phase is JobPhase.GATHERING
    assert run(state, Measured("h3", "1", 0, USUAL)).phase is JobPhase.OPENING
    assert run(state, Tick(), now_s=4.9).phase is JobPhase.GATHERING
    assert run(state, Tick(), now_s=5.0).phase is JobPhase.OPENING


def test_a_host_that_fails_after_the_first_round_has_begun_is_refused_before_a_first_step() -> None:
    state = connect(run(arrive(starting("refuse"), "h0", "h1", "h2", "h3"), Tick(), now_s=5.0), now_s=5.0)
    assert state.round is not None
    ended = run(state, Measured("h3", "1", 0, WRONG), now_s=6.0)
    assert (ended.phase, ended.reason) == (JobPhase.GATHERING, "h3 is parked: START_CHECK: compute: a matrix product is wrong")
    trains = run(state, Reached(state.round.epoch, 1), Measured("h3", "1", 0, WRONG), now_s=6.0)
    assert (trains.phase, trains.parked) == (JobPhase.RUNNING, {})
    assert trains.orders[-1].text.startswith("keep h3, it works already: START_CHECK: ")


def test_who_is_checked() -> None:
    assert not job().suspects  # at the start of the job
    assert not back(job(self_check=False)).suspects
    new = arrive(run(job(), Lost("h2", "1")), "h3")
    assert not new.suspects  # has never been in the job
    fault = run(job(), Park("h2", "HUNG_OUT", 50.0))
    assert run(fault, Tick(), now_s=50.0).suspects == {"h2": 1}
    assert run(fault, Admit("h2")).suspects == {"h2": 1}  # also if a person admits it early
    person = run(job(), Park("h2", "asked by me"))
    assert not run(person, Admit("h2")).suspects
    gone = run(fault, Lost("h2", "1"), Tick(), now_s=60.0)
    assert not gone.suspects
    assert run(gone, Lost("h2", "1")) == gone


def test_a_round_waits_a_moment_for_a_host_of_the_last_one() -> None:
    state = arrive(run(job(), Lost("h2", "1")), "h2")
    state = arrive(state, "h1")
    assert state.phase is JobPhase.GATHERING
    assert members(run(state, Measured("h2", "1", 1, USUAL))) == ["h1", "h2"]
    assert members(run(state, Tick(), now_s=10.0)) == ["h1"]


# ---------------------------------------------------------------- measurements


def test_a_process_measures_compute_and_memory_within_seconds() -> None:
    score = self_check._of_process(devices=True)
    assert score.wrong == ""
    assert score.compute > 0.1
    assert score.memory > 0.05
    assert (score.loopback, score.link) == (0, 0)


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("import os; os.kill(os.getpid(), 11)", "was ended by signal 11"),
        ("import time; time.sleep(60)", "could not be measured within 1 s"),
        ("print('[1, 0, 2, \"memory: a pattern has changed\", 0]')", "memory: a pattern has changed"),
    ],
)
def test_a_process_that_crashes_or_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch, code: str, wrong: str) -> None:
    def runs(*_: Any, **__: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)

    monkeypatch.setattr(self_check, "run_isolated", runs)
    monkeypatch.setattr(self_check, "LIMIT_S", 1.0 if "sleep" in code else 60.0)
    assert wrong in self_check._of_process(devices=True).wrong


def test_wrong_products_and_patterns_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_measure, "TIME_S", 0.0)
    assert (self_measure.compute()[1], self_measure.memory()[1]) == ("", "")
    monkeypatch.setattr(self_measure.np, "array_equal", lambda *_: False)
    assert self_measure.compute()[1] == "compute: a matrix product is wrong"
    empty = np.empty

    class Flips(np.ndarray[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key, value)
            super().__setitem__(1000, 7)

    monkeypatch.setattr(self_measure.np, "empty", lambda *given: empty(*given).view(Flips))
    assert self_measure.memory()[1] == "memory: a pattern has changed"


def burners(count: int) -> list[subprocess.Popen[bytes]]:
    """Start processes that use the processors at the lowest priority."""
    return [subprocess.Popen(["nice", "-n", "19", sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]


def test_the_processor_time_of_other_programs_is_measured() -> None:
    assert self_measure.others_share((1000.0, 100.0), (1400.0, 300.0)) == 0.5
    assert self_measure.others_share((0.0, 0.0), (0.0, 0.0)) == 0.0
    began = self_measure.ticks()
    running = burners(os.cpu_count() or 1)
    try:
        time.sleep(1.0)
    finally:
        for each in running:
            each.kill()
            each.wait()
    assert self_measure.others_share(began, self_measure.ticks()) > 0.5


def test_a_measurement_that_is_not_good_enough_is_repeated_and_the_best_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "REPEAT_S", 0.0)
    said = ['[30, 0, 20, "", 0]', '[40, 0, 9, "", 0]', '[90, 0, 8, "", 0]', '[1, 0, 1, "memory: a pattern has changed", 0]']
    given: list[str] = []

    def runs(*_: Any, **__: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["echo", given.pop(0)], stdout=subprocess.PIPE)

    def checked(attempt: int, *outputs: str) -> Score:
        done: list[Measured] = []
        given[:] = outputs
        state = back(job(start_check="off"))
        check = SelfCheck(KEY, lambda: ["127.0.0.1:1"], lambda: state, done.append)
        check._latest = attempt
        check._run("h2", "1", attempt)
        return done[0].score

    monkeypatch.setattr(self_check, "run_isolated", runs)
    monkeypatch.setattr(SelfCheck, "_speed", lambda *_: (1.0, ""))
    assert (checked(1, *said)[:3], given) == ((90.0, 0.0, 20.0), said[3:])
    assert (checked(1, *said[:2], said[0], said[3])[:3], given) == ((40.0, 0.0, 20.0), said[3:])
    assert (checked(1, said[0], said[3]).wrong, given) == ("memory: a pattern has changed", [])
    assert (checked(0, *said)[:3], given) == ((30.0, 0.0, 20.0), said[1:])  # the first one of a process parks no host


def test_a_first_measurement_is_repeated_before_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "REPEAT_S", 0.0)
    given: list[str] = []

    def checked(*outputs: str) -> list[Measured]:
        done: list[Measured] = []
        given[:] = outputs
        check = SelfCheck(KEY, lambda: ["127.0.0.1:1"], job, done.append)
        check._latest = 0
        check._run("h2", "1", 0)
        return done

    monkeypatch.setattr(self_check, "run_isolated", lambda *_, **__: subprocess.Popen(["echo", given.pop(0)], stdout=-1))
    monkeypatch.setattr(SelfCheck, "_speed", lambda *_: (1.0, ""))
    slow, sound = '[30, 0, 20, "", 0]', '[90, 0, 20, "", 0]'
    assert ([each.confirmed for each in checked(sound, slow)], given) == ([False], [slow])
    assert ([each.confirmed for each in checked(slow, sound, slow)], given) == ([False], [slow])
    first, second = checked(slow, '[40, 0, 8, "", 0]', slow)
    assert (first.confirmed, second.confirmed, second.check, second.score[:3]) == (False, True, 0, (40.0, 0.0, 20.0))
    *_, last = checked(slow, '[1, 0, 1, "memory: a pattern has changed", 0]')
    assert last.score.wrong == "memory: a pattern has changed"


def test_a_measurement_that_ends_late_does_not_take_the_place_of_the_one_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A host that starts finds a leader that does not last: its first measurement ends beside that for the real job."""
    ends, done, kept = {number: threading.Event() for number in (0, 1, 2)}, threading.Event(), []

    def measured(_check: SelfCheck, _name: str, attempt: int) -> Score:
        ends[attempt].wait(10)
        return USUAL

    def tell(event: Measured) -> None:
        kept[:] = [event]  # as the agent does: one event of each kind
        done.set()

    monkeypatch.setattr(SelfCheck, "_repeated", measured)
    check = SelfCheck(KEY, lambda: [], lambda: None, tell)
    alone = started(3, 1, 3)
    alone = replace(alone, limits=replace(alone.limits, self_check=True))
    check.follow(alone, "h2", "1")
    check.follow(replace(alone, suspects={"h2": 2}), "h2", "1")
    check.follow(alone, "h2", "1")  # nothing new
    ends[2].set()
    assert done.wait(10)
    ends[0].set()
    until(lambda: not any(each.name == "unickpt-self-check" for each in threading.enumerate()))
    assert [event.check for event in kept] == [2]
    done.clear()
    check.follow(replace(alone, suspects={"h2": 1}), "h2", "1")  # a new job of another leader counts anew
    ends[1].set()
    assert done.wait(10)
    assert [event.check for event in kept] == [1]


def test_gpus_are_compared_with_those_of_the_host_and_only_when_no_workers_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert self_measure.slowest([50e3, 48e3, 51e3]) == (48e3, "")
    assert self_measure.slowest([5e3]) == (5e3, "")
    assert self_measure.slowest([50e3, 48e3, 20e3, 51e3]) == (
        20e3, "GPU cuda:2: 2e+04 GFLOP/s, and the median of the host's is 4.9e+04 GFLOP/s",
    )  # fmt: skip
    given: list[list[str]] = []

    def runs(arguments: list[str], **_: Any) -> subprocess.Popen[bytes]:
        given.append(arguments)
        return subprocess.Popen(["echo", '[1, 0, 1, "", 0]'], stdout=subprocess.PIPE)

    monkeypatch.setattr(self_check, "run_isolated", runs)
    monkeypatch.setattr(self_check, "REPEATS", 1)
    check = SelfCheck(KEY, lambda: ["127.0.0.1:1"], job, lambda _: None)
    for attempt in (0, 3):
        check._run("h2", "1", attempt)
    assert given == [[], ["--devices"]]


def test_partners_are_running_members_and_another_one_each_time() -> None:
    state = started(3, 1, 3)
    assert [host.name for host in partners(state, "h2", 0)] == ["h3", "h1"]
    assert [host.name for host in partners(state, "h2", 1)] == ["h1", "h3"]
    outside = arrive(replace(state, limits=replace(state.limits, grow=False)), "h9")
    assert [next(host.name for host in partners(outside, "h9", attempt)) for attempt in range(3)] == ["h1", "h2", "h3"]
    assert partners(arrive(Membership(Limits(1, 1), "a"), "a"), "a", 0) == []


@pytest.fixture
def peers() -> Iterator[Job]:
    made = Job(Limits(1, 4, join_s=1.0, expiry_s=60.0, settle_s=0.1, check_share=0.02))
    yield made
    for peer in made.peers:
        peer.close()


@pytest.mark.parametrize("start_check", ["refuse", "log"])
def test_a_host_with_a_slow_network_stack_is_refused_when_the_job_starts(
    monkeypatch: pytest.MonkeyPatch, start_check: str
) -> None:
    """Real agents and measured connections. What a process measures would depend on what else this machine does."""
    monkeypatch.setattr(self_check, "run_isolated", lambda *_, **__: subprocess.Popen(["echo", '[9, 0, 9, "", 0]'], stdout=-1))
    monkeypatch.setattr(self_check, "LINK_S", 0.3)
    monkeypatch.setattr(self_check, "REPEAT_S", 0.0)
    job = Job(Limits(1, 3, join_s=60.0, expiry_s=60.0, check_share=0.2, start_check=start_check))
    try:
        peers = [job.start("a")]
        until(lambda: peers[0].leads)
        peers += [job.start(name) for name in ("b", "c")]
        until(lambda: all(hosts(peer) == {"a", "b", "c"} for peer in peers))
        slow = Slowly(peers[2].address, 5e6)
        for peer, addresses in zip(peers, (peers[0].loopbacks, peers[1].loopbacks, [slow.address]), strict=True):
            check = SelfCheck(KEY, lambda addresses=addresses: addresses, peer.read, peer.keep)  # type: ignore[misc]
            check.follow(peer.read(), peer.name, peer.incarnation)
        state: Any = until(lambda: (now := peers[1].read()) and now.orders and now)
        assert list(state.parked) == (["c"] if start_check == "refuse" else [])
        assert [order.text.partition("START_CHECK: ")[2].partition(":")[0] for order in state.orders] == ["loop-back"]
        slow.close()
    finally:
        for peer in job.peers:
            peer.close()


def test_an_agent_measures_itself_its_loop_back_and_a_link_when_the_job_starts(peers: Job) -> None:
    a = peers.start("a")
    until(lambda: a.leads)
    b = peers.start("b")
    until(lambda: hosts(b) == {"a", "b"})
    for peer in (a, b):
        check = SelfCheck(KEY, lambda peer=peer: peer.loopbacks, peer.read, peer.keep)  # type: ignore[misc]
        state: Any = peer.read()
        for _ in range(3):
            check.follow(state, peer.name, peer.incarnation)
    state = until(lambda: (now := b.read()) and len(now.scores) == 2 and now)
    for score in state.scores.values():
        assert min(score.compute, score.memory, score.loopback, score.link) > 0
        assert score.wrong == ""
    assert not state.orders
