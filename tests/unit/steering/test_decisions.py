"""From a report of the running round to events: the leader's decisions, and reports from a process that may send anything."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.unit.steering.made import running
from unickpt.base.options.steering import SteeringOptions
from unickpt.steering.agent.local_copy import LocalCopy
from unickpt.steering.policy.decisions import AGAIN_S, Decisions
from unickpt.steering.policy.policy import Fault, Finding
from unickpt.steering.policy.reports import HubReport, report_as_json, report_from_json
from unickpt.steering.state.limits import Limits
from unickpt.steering.state.link_verdicts import Blame, LinkFinding, Pair
from unickpt.steering.state.membership import Arrived, JobPhase, Joined, Left, Membership, Opened, Ordered, Reached, Ready
from unickpt.steering.state.transitions import transition
from unickpt.steering.wire.codec import SteeringError

DEFAULTS = SteeringOptions()
STOPPED = Finding(Fault.STOPPED, ("h1",), 60.0, text="rank 1 is stopped", ranks=(1,))
MISMATCH = Finding(Fault.MISMATCH, ("h1",), 1.0, text="rank 1 calls all_gather", ranks=(1,))


def report(*findings: Finding, step: int = 0, pause_s: float = 0.0, epoch: tuple[int, int] = (1, 1)) -> HubReport:
    return HubReport(epoch, step, pause_s, findings)


def after(state: Membership, given: HubReport, options: SteeringOptions = DEFAULTS, now_s: float = 0.0) -> Membership:
    """Return the state after the leader has taken a report."""
    for event in Decisions(options).take(given, state, now_s):
        state = transition(state, event, now_s)
    return state


def again(state: Membership, now_s: float = 0.0) -> Membership:
    """Let all hosts come to the next round, and connect."""
    assert state.round is not None
    last = state.round.epoch
    for name in list(state.hosts):
        state = transition(state, Arrived(name, "1", last), now_s)
    epoch, (first, *others) = state.round.epoch, state.round.members  # type: ignore[union-attr]
    assert epoch > last
    state = transition(state, Opened(*first, epoch, "s:1", "m:1"), now_s)
    for name, incarnation in others:
        state = transition(state, Ready(name, incarnation, epoch), now_s)
    assert state.phase is JobPhase.RUNNING
    return state


def test_an_order_changes_the_membership_and_every_host_can_log_it() -> None:
    state = after(running(4), report(STOPPED, step=7))
    assert state.parked["h1"].reason == "STOPPED_OUT: rank 1 is stopped"
    assert (state.phase, state.evictions, state.reached) == (JobPhase.GATHERING, {"h1": 1}, 7)
    (order,) = state.orders
    assert (order.number, order.epoch, order.ranks) == (1, (1, 1), (1,))
    assert order.text == "park h1 for 300 s: STOPPED_OUT: rank 1 is stopped"


@pytest.mark.parametrize(
    ("state", "given"),
    [
        (running(4), report(STOPPED, epoch=(1, 2))),
        (running(4), report(STOPPED, epoch=(0, 1))),
        (after(running(4), report(MISMATCH)), report(STOPPED)),  # the round has ended
        (replace(running(4), closed="done"), report(STOPPED)),
        (replace(running(4), round=None), report(STOPPED)),
    ],
    ids=["next", "past", "over", "closed", "none"],
)
def test_a_report_about_another_round_changes_nothing(state: Membership, given: HubReport) -> None:
    assert Decisions(DEFAULTS).take(given, state, 0.0) == []


def test_without_leave_to_act_an_order_is_only_logged_and_once() -> None:
    decisions, state = Decisions(SteeringOptions(act=False)), running(4)
    (event,) = decisions.take(report(STOPPED), state, 0.0)
    assert isinstance(event, Ordered)
    assert event.text == "not executed (act=false): park h1 for 300 s: STOPPED_OUT: rank 1 is stopped"
    assert event.ranks == ()
    assert not [each for each in decisions.take(report(STOPPED), state, 1.0) if isinstance(each, Ordered)]


def test_a_link_is_checked_once_and_then_the_end_at_fault_is_out() -> None:
    decisions, state = Decisions(DEFAULTS), running(4)
    link = Finding(Fault.DEAD_LINK, ("h2", "h1"), 9.0, text="dead")
    (event,) = decisions.take(report(link), state, 0.0)
    assert isinstance(event, Ordered)
    assert event.text == "check h1, h2: LINK_CHECK: dead"
    assert decisions.take(report(link), state, 1.0) == []
    assert decisions.wanted.get_nowait() == (("h1", "h2"), 20.0)
    assert decisions.wanted.empty()
    (event,) = decisions.checked(("h1", "h2"), LinkFinding(Blame.ONE_END, "h2", "h2 is at fault"), state)
    assert event == Ordered(event.identifier, "check of h1 and h2: h2 is at fault")  # type: ignore[union-attr]
    for event in decisions.take(report(link), state, 2.0):
        state = transition(state, event, 2.0)
    assert state.parked["h2"].reason == "LINK_OUT: dead"


@pytest.mark.parametrize(("bad_link", "out"), [("log", {}), ("park", {"h2"})])
def test_if_only_the_link_is_bad_a_host_is_out_only_with_the_option(bad_link: str, out: set[str]) -> None:
    decisions, state = Decisions(SteeringOptions(bad_link=bad_link)), running(4)
    link = Finding(Fault.DEAD_LINK, ("h2", "h1"), 9.0, text="dead")
    decisions.take(report(link), state, 0.0)
    decisions.checked(("h1", "h2"), LinkFinding(Blame.LINK, "", "only this link"), state)
    for event in decisions.take(report(link), state, 2.0):
        state = transition(state, event, 2.0)
    assert set(state.parked) == set(out)


def test_a_link_is_checked_again_after_a_while() -> None:
    decisions, state = Decisions(DEFAULTS), running(4)
    link = Finding(Fault.SLOW_LINK, ("h1", "h2"), 9.0, text="slow")
    for now_s in (0.0, 1.0, 599.0, 601.0, 700.0):
        decisions.take(report(link), state, now_s)
    assert [decisions.wanted.get_nowait()[0] for _ in range(decisions.wanted.qsize())] == [("h1", "h2")] * 2


@pytest.mark.parametrize("seed", range(20))
def test_late_lost_and_repeated_results_of_checks_put_only_blamed_hosts_out(seed: int) -> None:
    """Reports and results come in any order. A link is checked once in ten minutes. Only a host that a check blames is out."""
    source, decisions, options = random.Random(seed), Decisions(DEFAULTS), [Fault.DEAD_LINK, Fault.SLOW_LINK]
    state, now_s, parked = running(5, low=1), 0.0, 0
    asked: dict[Pair, list[float]] = {}
    blamed: dict[str, float] = {}
    for _ in range(300):
        now_s += source.choice([0.5, 1.0, 5.0, 50.0])
        state = replace(running(5, low=1), evictions=state.evictions)
        ends = source.sample(sorted(state.hosts), source.choice([2, 2, 2, 1]))
        hangs_s = 1.0 if len(ends) == 1 else source.choice([1.0, 99.0])
        given = report(Finding(source.choice(options), tuple(ends), hangs_s, text="link"))
        for event in decisions.take(given, state, now_s):
            state = transition(state, event, now_s)
        for host in state.parked:
            parked += 1
            assert now_s - blamed[host] <= AGAIN_S, (seed, host)
        while not decisions.wanted.empty():
            wanted, _ = decisions.wanted.get()
            asked.setdefault(wanted, []).append(now_s)
        for wanted in [each for each in asked if source.random() < 0.3]:
            kind = source.choice(list(Blame))
            host = source.choice(wanted) if kind is Blame.ONE_END else ""
            decisions.checked(wanted, LinkFinding(kind, host, "text"), state)
            blamed |= {host: now_s} if host else {}
    assert all(later - before >= AGAIN_S for times in asked.values() for before, later in pairwise(times))
    assert parked > 0


def test_restarts_without_progress_stop_the_job_and_progress_resets_the_count() -> None:
    """The count is in the state, so a new leader goes on with it: each report here is taken by a leader without memory."""
    state, stops = running(4), SteeringOptions(retries=2)
    state = again(after(state, report(MISMATCH, step=50), stops))  # the first round has come to step 50
    state = again(after(state, report(MISMATCH, step=50, epoch=(1, 2)), stops))
    assert state.fruitless == 1
    state = again(after(state, report(MISMATCH, step=51, epoch=(1, 3)), stops))
    assert state.fruitless == 0
    state = again(after(state, report(MISMATCH, step=49, epoch=(1, 4)), stops))
    assert (state.furthest, state.fruitless) == (51, 1)
    state = after(state, report(MISMATCH, step=51, epoch=(1, 5)), stops)
    assert state.closed.startswith("NO_PROGRESS: 2 restarts without progress; PROGRAM: rank 1 calls")


def test_a_long_round_is_progress_whatever_its_steps_are() -> None:
    """The counter of a program may begin again in every process."""
    state = again(after(running(4), report(MISMATCH, step=500)))
    for number in range(2, 9):
        now_s = 1800.0 * (number - 1)
        state = replace(state, heard=dict.fromkeys(state.hosts, now_s))
        state = again(after(state, report(MISMATCH, step=3, epoch=(1, number)), now_s=now_s), now_s)
    assert (state.closed, state.fruitless) == ("", 0)


def test_crashes_of_workers_count_as_rounds_without_progress() -> None:
    state = running(4)
    for _ in range(3):
        state = again(state)
    assert state.fruitless == 2  # the first round has nothing behind it
    state = transition(state, Left("h3", "1"), 0.0)
    assert state.fruitless == 2, "a host that leaves says nothing about the program"


def test_the_step_and_the_longest_pause_are_noted_rarely() -> None:
    """Every change of the state is sent to all hosts."""
    decisions, state, changes = Decisions(DEFAULTS), again(running(4)), 0
    for second in range(300):
        given = report(step=second, pause_s=min(second, 3.0), epoch=(1, 2))
        for event in decisions.take(given, state, float(second)):
            assert isinstance(event, Reached)
            state, changes = transition(state, event, 0.0), changes + 1
    assert 4 <= changes <= 8
    assert (state.reached >= 240, state.pause_s) == (True, 3.0)


def test_a_policy_that_raises_gives_no_order_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Decisions):
        def take(self, *_: Any) -> Any:
            raise ZeroDivisionError("in the policy")

    copy = LocalCopy("1", Broken(DEFAULTS))
    copy.lead(Membership(Limits(1, 1), "a"), Joined("a", "1", "a:1"))
    for _ in range(3):
        copy.found(report(STOPPED))
    assert caplog.text.count("Training is not affected (ZeroDivisionError: in the policy)") == 1
    state = copy.read()
    assert state is not None
    assert not state.parked


# ---------------------------------------------------------------- reports


def test_a_report_arrives_as_it_was_sent() -> None:
    given = report(STOPPED, replace(MISMATCH, still_s=2.5, gain=0.5, at_work=True, blamed="h2"), step=9, pause_s=1.5)
    assert report_from_json(json.loads(json.dumps(report_as_json(given)))) == given


def test_a_damaged_report_is_refused_or_read() -> None:
    text = json.dumps(report_as_json(report(STOPPED, MISMATCH, step=9)))
    source, refused = random.Random(1), 0
    for _ in range(2000):
        value = json.loads(text)
        place: Any = value
        while True:
            key = source.choice(list(place) if isinstance(place, dict) else list(range(len(place))))
            if isinstance(place[key], (dict, list)) and place[key] and source.random() < 0.7:
                place = place[key]
                continue
            place[key] = source.choice([None, -1, "x", [], {}, [1, 2], float("nan"), float("inf"), 1e300, "x" * 5000, True])
            break
        try:
            Decisions(DEFAULTS).take(report_from_json(value), running(4), 0.0)
        except SteeringError:
            refused += 1
    assert refused > 1000


@pytest.mark.parametrize("value", [None, [], {}, "x", {"epoch": [1, 1], "step": 1, "pause_s": 0, "findings": [{}] * 65}])
def test_what_is_no_report_is_refused(value: Any) -> None:
    with pytest.raises(SteeringError):
        report_from_json(value)
