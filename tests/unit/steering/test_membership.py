"""Membership: what happens to hosts and rounds, event by event."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.steering.checked_events import arrive, connect, members, run, started
from unickpt.steering.agent.local_copy import LocalCopy
from unickpt.steering.state.limits import Limits
from unickpt.steering.state.membership import (
    Admit,
    Arrived,
    Close,
    GivenOrder,
    Heard,
    JobPhase,
    Joined,
    Left,
    Lost,
    Membership,
    Opened,
    Ordered,
    Park,
    Paused,
    Reached,
    Ready,
    Restart,
    Standing,
    Tick,
    TookOver,
    holds_name,
    must_stop,
    natural,
    standing,
    successors,
)
from unickpt.steering.state.quorum import may_lead, quorum


def test_natural_order_of_names() -> None:
    assert sorted(["n10", "n2", "a", "n2b", "2", "10"], key=natural) == ["2", "10", "a", "n2", "n2b", "n10"]


def test_the_first_round_waits_for_all_hosts_or_for_the_time_to_join() -> None:
    state = Membership(Limits(2, 3, join_s=30), "h1")
    state = arrive(state, "h2", "h1", now_s=1)
    for now_s in range(2, 31):
        state = run(state, Heard("h1", "1"), Heard("h2", "1"), now_s=now_s)
        assert state.phase is JobPhase.GATHERING
    assert members(run(state, Tick(), now_s=31)) == ["h1", "h2"]
    assert members(arrive(state, "h3", now_s=30)) == ["h1", "h2", "h3"]


def test_a_single_host_starts_at_once() -> None:
    state = arrive(Membership(Limits(1, 1), "h1"), "h1")
    assert members(state) == ["h1"]
    assert connect(state).phase is JobPhase.RUNNING


def test_a_crashed_worker_starts_a_new_round_with_the_same_ranks() -> None:
    state = started(3, 2, 3)
    epoch = state.round.epoch if state.round else (0, 0)
    state = arrive(state, "h2")
    assert must_stop(state, epoch)
    assert state.reason == "the workers of h2 have ended"
    assert [standing(state, name) for name in ("h1", "h2", "h3")] == [Standing.STOPPING, Standing.ARRIVED, Standing.STOPPING]
    state = run(state, Arrived("h3", "1", epoch), Arrived("h1", "1", epoch))
    assert members(state) == ["h1", "h2", "h3"]
    assert connect(state).round != started(3, 2, 3).round


def test_a_lost_host_leaves_a_smaller_round_and_returns_to_its_place() -> None:
    state = started(4, 2, 4)
    state = run(state, Lost("h2", "1"))
    assert state.reason == "h2 is gone"
    state = connect(arrive(state, "h1", "h3", "h4"))
    assert members(state) == ["h1", "h3", "h4"]
    state = run(state, Joined("h2", "2", "h2:9"), Arrived("h2", "2"))
    assert state.reason == "h2 can be used"
    state = connect(arrive(state, "h1", "h3", "h4"))
    assert members(state) == ["h1", "h2", "h3", "h4"]


def test_a_spare_takes_the_place_of_a_lost_host_and_nobody_else_moves() -> None:
    state = started(3, 3, 3)
    state = arrive(state, "spare")
    assert standing(state, "spare") is Standing.SPARE
    assert state.phase is JobPhase.RUNNING
    state = run(state, Lost("h2", "1"))
    state = connect(arrive(state, "h3", "h1"))
    assert members(state) == ["h1", "spare", "h3"]


def test_a_given_order_is_kept_and_spares_fill_its_gaps() -> None:
    order = ("h3", "h1", "absent", "h2")
    state = started(4, 3, 3, order=order)  # h4 has no place in the order
    assert members(state) == ["h3", "h1", "h2"]
    state = connect(arrive(run(state, Lost("h1", "1")), "h2", "h3", "h4"))
    assert members(state) == ["h3", "h4", "h2"]
    state = run(state, Lost("h4", "1"), Joined("h1", "2", "h1:9"), Arrived("h1", "2"))
    state = connect(arrive(state, "h2", "h3"))
    assert members(state) == ["h3", "h1", "h2"], "its own place is vacant again"
    state = run(state, Lost("h3", "1"), Joined("absent", "1", "absent:9"), Arrived("absent", "1"))
    state = connect(arrive(state, "h1", "h2"))
    assert members(state) == ["h1", "absent", "h2"]


def test_a_round_says_how_it_differs_from_the_order() -> None:
    limits = Limits(1, 3, order=("node2", "nodo1"))
    assert limits.out_of_order(["node2", "node1"]) == "not in this round: nodo1; not in the order: node1"
    assert limits.out_of_order(["node2"]) == "not in this round: nodo1"
    assert limits.out_of_order(["nodo1", "node2"]) == ""
    assert Limits(1, 3).out_of_order(["node1"]) == ""


def test_hosts_of_the_order_are_chosen_before_others() -> None:
    state = Membership(Limits(2, 2, join_s=30, order=("h4", "h3")), "h1")
    state = run(arrive(state, "h1", "h2", "h3", "h4"), Tick(), now_s=1.0)
    assert members(state) == ["h4", "h3"]
    assert standing(state, "h1") is Standing.SPARE


def test_a_round_takes_an_allowed_size_and_the_rest_wait() -> None:
    state = started(4, 2, 4, sizes=frozenset({2, 4}))
    state = connect(arrive(run(state, Lost("h1", "1")), "h2", "h3", "h4"))
    assert members(state) == ["h2", "h3"]
    assert standing(state, "h4") is Standing.SPARE


def test_a_silent_host_is_out_after_the_expiry() -> None:
    state = started(3, 1, 3)
    state = run(state, Heard("h1", "1"), Heard("h2", "1"), now_s=8)
    assert state.phase is JobPhase.RUNNING
    state = run(state, Tick(), now_s=11)
    assert state.reason == "h3 is gone"
    assert standing(state, "h3") is Standing.GONE


def test_silence_while_the_leader_did_not_run_proves_nothing() -> None:
    state = run(started(3, 1, 3), Paused(), now_s=1000)
    assert state.phase is JobPhase.RUNNING


def test_of_two_separated_groups_at_most_one_goes_on() -> None:
    for count in (2, 3, 4, 5):
        state = started(count, 1, count)
        names = members(state)
        for chosen in range(1, 2**count - 1):
            side = {name for bit, name in enumerate(names) if chosen >> bit & 1}
            parts = []
            for part in (side, set(names) - side):
                seen = run(state, *(Heard(name, "1") for name in sorted(part)), now_s=9)
                parts.append(quorum(run(seen, Tick(), now_s=15)))
                assert may_lead(state, frozenset(part), frozenset()) == parts[-1]
            assert sum(parts) == 1, side


def test_a_minority_whose_workers_have_ended_does_not_go_on_alone() -> None:
    for alone, goes_on in (("h3", False), ("h1", False), ("h1 h2", True), ("h2 h3", True)):
        state = arrive(started(3, 1, 3), *alone.split(), now_s=9)
        state = run(state, *(Heard(name, "1") for name in alone.split()), now_s=15)
        assert (state.phase is JobPhase.OPENING) is goes_on, alone
        assert members(state) == (alone.split() if goes_on else ["h1", "h2", "h3"])


def test_only_rank_0_of_this_round_opens_its_stores_and_once() -> None:
    state = arrive(started(2, 1, 2), "h1", "h2")
    assert run(state, Opened("h1", "1", (1, 1), "old:1", "old:2")).round == state.round
    assert run(state, Opened("h2", "1", (1, 2), "other:1", "other:2")).round == state.round
    state = run(
        state, Opened("h1", "1", (1, 2), "s:1", "m:1"), Opened("h1", "1", (1, 2), "t:1", "t:2"), Ready("h2", "1", (1, 1))
    )
    assert state.round is not None
    assert (state.round.store, state.round.master, state.phase) == ("s:1", "m:1", JobPhase.OPENING)


def test_without_a_quorum_a_running_round_is_left_alone() -> None:
    state = run(started(2, 1, 2), Heard("h2", "1"), now_s=9)
    state = run(state, Tick(), now_s=15)
    assert list(state.hosts) == ["h2"]
    assert state.phase is JobPhase.RUNNING
    assert members(connect(arrive(run(state, Lost("h1", "1"), now_s=15), "h2", now_s=15), 15)) == ["h2"]
    alone = run(replace(state, limits=replace(state.limits, lone=True)), Tick(), now_s=15)
    assert alone.reason == "h1 is gone"


def test_a_host_that_does_not_stop_its_workers_does_not_hold_up_the_others() -> None:
    state = arrive(run(started(3, 1, 3), Lost("h1", "1")), "h2")
    assert state.phase is JobPhase.GATHERING
    state = run(state, Heard("h2", "1"), Heard("h3", "1"), now_s=9)
    state = run(state, Heard("h2", "1"), Heard("h3", "1"), now_s=18)
    assert members(run(state, Tick(), now_s=21)) == ["h2"]


def test_a_finished_program_is_not_disturbed_and_starts_no_new_round() -> None:
    state = started(2, 1, 2)
    epoch = state.round.epoch if state.round else (0, 0)
    state = run(state, Left("h1", "1", finished=True))
    assert (state.finished, must_stop(state, epoch)) == (True, False)
    state = run(state, Left("h2", "1", finished=True), Joined("h3", "1", "h3:1"), Arrived("h3", "1"))
    assert state.closed == "the program has finished on h1"


def test_a_host_that_gives_up_ends_the_job_only_if_too_few_are_left() -> None:
    state = run(started(3, 2, 3), Left("h3", "1", failed="worker 2 exited with 1"))
    assert not state.closed
    state = connect(arrive(state, "h1", "h2"))
    state = run(state, Left("h1", "1", failed="worker 0 exited with 1"))
    assert state.closed == "h1 gave up (worker 0 exited with 1); 1 hosts are left, and 2 are needed"
    assert must_stop(state, (1, 2))


def test_a_preempted_host_does_not_close_the_job() -> None:
    state = run(started(2, 2, 2), Left("h2", "1"))
    assert not state.closed
    state = arrive(state, "h1")
    state = run(state, Joined("h2", "2", "h2:2"), Arrived("h2", "2"))
    assert members(state) == ["h1", "h2"]


def test_a_closed_job_closes_for_everybody() -> None:
    state = run(started(2, 1, 2), Close("asked"))
    assert must_stop(state, (1, 1))
    assert run(state, Close("again")).closed == "asked"


def test_a_parked_host_waits_until_it_is_admitted_also_after_its_restart() -> None:
    state = run(started(3, 1, 3), Park("h1", "slow"))
    state = connect(arrive(state, "h1", "h2", "h3"))
    assert members(state) == ["h2", "h3"]
    state = run(state, Lost("h1", "1"), Joined("h1", "2", "h1:2"), Arrived("h1", "2"))
    assert standing(state, "h1") is Standing.PARKED
    state = connect(arrive(run(state, Admit("h1")), "h1", "h2", "h3"))
    assert members(state) == ["h1", "h2", "h3"]


def test_parking_for_a_time_ends_by_itself() -> None:
    state = connect(arrive(run(started(2, 1, 2), Park("h2", "hung", 60)), "h1", "h2"))
    state = run(state, Paused(), now_s=59)
    assert members(state) == ["h1"]
    assert state.phase is JobPhase.RUNNING
    assert run(state, Tick(), now_s=60).reason == "h2 can be used"


def test_a_restart_is_of_one_round() -> None:
    state = started(2, 1, 2)
    assert run(state, Restart((1, 0), "old")) is state
    assert run(state, Restart((1, 1), "mismatch")).reason == "mismatch"


def test_two_processes_cannot_have_one_name() -> None:
    state = run(started(2, 1, 2), Joined("h2", "other", "h9:1"), Arrived("h2", "other"))
    assert holds_name(state, "h2", "1")
    assert state.phase is JobPhase.RUNNING


def test_an_opening_round_is_given_up_when_a_member_dies_or_never_connects() -> None:
    state = arrive(started(3, 1, 3), "h1", "h2", "h3")
    assert state.phase is JobPhase.OPENING
    state = run(state, Opened("h1", "1", (1, 2), "s:1", "m:1"))
    lost = run(state, Lost("h1", "1"))
    assert (members(lost), lost.phase, lost.round and lost.round.store) == (["h2", "h3"], JobPhase.OPENING, "")
    state = run(state, Paused(), Ready("h2", "1", (1, 2)), now_s=19)
    late = run(state, Paused(), now_s=21)
    assert late.reason == "h3 did not connect in time"


def test_a_new_leader_keeps_a_running_round_and_ends_an_opening_one() -> None:
    state = arrive(started(3, 1, 3), "spare")
    state = run(state, TookOver("h2", 2, frozenset({"spare"})), now_s=500)
    assert (state.phase, state.leader, state.term) == (JobPhase.RUNNING, "h2", 2)
    assert set(state.hosts) == {"h1", "h2", "h3"}
    lost = run(state, TookOver("h3", 3, frozenset({"h2"})), now_s=900)
    assert lost.reason == "h2 is gone"
    lost = arrive(lost, "h1", "h3", now_s=900)
    assert lost.round is not None
    assert lost.round.epoch == (3, 2)
    assert run(lost, TookOver("h1", 4), now_s=50).round.epoch == (4, 3)  # type: ignore[union-attr]
    assert successors(lost) == ["h1", "h3"]


def test_a_leader_of_several_hosts_waits_a_moment_before_the_first_round() -> None:
    """Another leader of the same job, which has moved, can object."""
    state = arrive(Membership(Limits(2, 2, join_s=30), "h1"), "h1", "h2")
    assert run(state, Tick(), now_s=0.9).phase is JobPhase.GATHERING
    assert run(state, Tick(), now_s=1.0).phase is JobPhase.OPENING


def test_an_agent_that_has_become_the_leader_has_another_address() -> None:
    state = run(started(2, 1, 2), Joined("h1", "1", "endpoint:29400"))
    assert state.hosts["h1"].address == "endpoint:29400"
    assert state.phase is JobPhase.RUNNING


def test_silence_does_not_end_a_round_that_could_not_begin_again() -> None:
    state = run(started(3, 3, 3), Heard("h1", "1"), Heard("h2", "1"), now_s=9)
    state = run(state, Tick(), now_s=15)
    assert (list(state.hosts), state.phase) == (["h1", "h2"], JobPhase.RUNNING)
    assert run(state, Lost("h3", "1"), now_s=15).phase is JobPhase.GATHERING  # its workers have ended as well


def test_of_several_spares_the_one_that_has_not_failed_is_taken() -> None:
    state = arrive(started(2, 2, 2), "a")
    for incarnation in ("1", "2"):
        state = run(state, Lost("a", incarnation), Joined("a", str(int(incarnation) + 1), "a:1"))
    state = arrive(state, "a", "b")
    state = run(state, Lost("h2", "1"))
    assert members(connect(arrive(state, "h1"))) == ["h1", "b"]


def test_a_round_grows_after_the_time_to_settle_and_only_if_it_may() -> None:
    for grow in (True, False):
        state = started(2, 1, 2)
        limits = Limits(1, 4, settle_s=5.0, grow=grow)
        state = run(replace(state, limits=limits), Joined("h3", "1", "h3:1"), Arrived("h3", "1"))
        assert run(state, Tick(), now_s=4.9).phase is JobPhase.RUNNING
        state = run(state, Joined("h4", "1", "h4:1"), Arrived("h4", "1"), now_s=4.9)
        assert run(state, Tick(), now_s=5.0).phase is JobPhase.RUNNING  # h4 has just come
        late = run(state, Tick(), now_s=9.9)
        assert late.phase is (JobPhase.GATHERING if grow else JobPhase.RUNNING)
        assert not grow or late.reason == "h3, h4 can be used"


def test_a_spare_that_ends_says_nothing_about_the_program() -> None:
    state = run(arrive(started(2, 2, 2), "spare"), Left("spare", "1", finished=True))
    assert (state.closed, state.finished, state.phase) == ("", False, JobPhase.RUNNING)


def test_only_orders_for_a_time_count_as_evictions_and_each_once() -> None:
    state = run(started(3, 1, 3), Park("h1", "asked"), Park("h2", "hung", 60), Park("h2", "hung", 60))
    assert state.evictions == {"h2": 1}


def test_an_order_is_logged_once_and_old_ones_are_forgotten() -> None:
    state = run(started(2, 1, 2), *(Ordered(str(number), f"order {number}", (1,)) for number in range(40)))
    assert [order.number for order in state.orders] == list(range(25, 41))
    assert state.orders[-1] == GivenOrder(40, "39", (1, 1), (1,), "order 39")
    assert run(state, Ordered("39", "again")).orders == state.orders


def test_progress_is_of_the_running_round() -> None:
    state = run(started(2, 1, 2), Reached((1, 1), 7, 2.0), Reached((1, 1), 5, 1.0), Reached((1, 2), 99, 9.0))
    assert (state.reached, state.pause_s, state.furthest) == (7, 2.0, -1)
    state = connect(arrive(state, "h1", "h2"))
    assert (state.reached, state.furthest, state.fruitless) == (0, 7, 0)
    state = connect(arrive(run(state, Reached((1, 2), 7)), "h1", "h2"))
    assert (state.furthest, state.fruitless) == (7, 1)
    state = connect(arrive(run(state, Lost("h2", "1")), "h1"))
    assert state.fruitless == 1, "the program has not failed"


def test_the_silence_of_a_lost_leader_counts_before_and_after_the_take_over() -> None:
    state = run(replace(started(3, 2, 3), leader="h1 (1)"), Heard("h2", "1"), Heard("h3", "1"), now_s=8)
    for silent_s, gone_s in ((0.0, 18.5), (8.0, 10.5)):
        after = run(state, TookOver("h2 (1)", 2, silent_s=silent_s), now_s=8)
        after = run(after, Heard("h2", "1"), Heard("h3", "1"), now_s=gone_s - 1)
        assert "h1" in after.hosts, "expiry is 10 s"
        assert sorted(run(after, Tick(), now_s=gone_s).hosts) == ["h2", "h3"]


def failing(retries: int | None, *steps: int) -> Membership:
    """Return a job whose workers on h1 fail again and again, after these steps in each round."""
    state = started(2, 1, 2)
    state = replace(state, limits=replace(state.limits, retries=retries))
    for number, step in enumerate(steps, 1):
        state = run(state, Reached((1, number), step)) if step else state
        state = arrive(state, "h1", "h2")
        state = state if state.closed else connect(state)
    return state


def test_a_program_that_fails_again_and_again_without_progress_ends_the_job() -> None:
    assert failing(2, 7, 7).closed == ""
    closed = failing(2, 7, 7, 7)
    assert (closed.phase, closed.finished, closed.fruitless) == (JobPhase.GATHERING, False, 2)
    assert closed.closed.startswith(
        "2 rounds in a row have failed without progress: the workers of h1 have ended again, and the"
    )
    assert "has not passed step 7" in closed.closed
    assert must_stop(closed, (1, 3)), "the workers of all other hosts end as well"
    assert failing(2, 7, 7, 8, 8).closed == "", "progress begins the count again"
    assert failing(None, 7, 7, 7, 7, 7).closed == ""
    assert failing(2, 0, 0, 0, 0, 0).closed == "", "without timing no step is known"


def test_a_parked_host_does_not_count_when_a_round_could_begin_again() -> None:
    state = run(arrive(started(2, 2, 2), "s"), Park("s", "asked"), Heard("h1", "1"), Heard("s", "1"), now_s=9)
    silent = run(state, Tick(), now_s=15)
    assert (sorted(silent.hosts), silent.phase) == (["h1", "s"], JobPhase.RUNNING)
    failed = run(state, Left("h2", "1", failed="no restarts"), now_s=9)
    assert failed.closed == "h2 gave up (no restarts); 1 hosts are left, and 2 are needed"


def test_a_member_that_ends_before_its_workers_have_started_has_not_finished_the_program() -> None:
    for low, closed in ((1, ""), (2, "the program has finished on h1; 1 hosts are left, and 2 are needed")):
        state = arrive(started(2, low, 2), "h1", "h2")
        state = run(state, Left("h1", "1", finished=True))
        assert (state.finished, state.closed) == (False, closed)


def test_a_host_that_has_never_taken_part_does_not_hold_up_the_others() -> None:
    state = run(started(2, 1, 2), Joined("slow", "1", "slow:1"), Lost("h2", "1"))
    assert members(arrive(state, "h1")) == ["h1"]


def test_nobody_is_ready_before_the_stores_are_open() -> None:
    state = arrive(started(2, 1, 2), "h1", "h2")
    assert run(state, Ready("h2", "1", (1, 2))).round == state.round


def test_an_opening_round_is_given_up_when_a_member_is_silent_even_without_a_quorum() -> None:
    state = run(arrive(started(2, 1, 2), "h1", "h2"), Heard("h2", "1"), now_s=9)
    state = run(state, Tick(), now_s=15)
    assert (state.phase, state.reason, list(state.hosts)) == (JobPhase.GATHERING, "h1 is gone", ["h2"])


def test_the_end_of_a_later_process_proves_nothing_about_the_workers_of_an_earlier_one() -> None:
    state = run(started(3, 1, 3), Heard("h1", "1"), Heard("h3", "1"), now_s=9)
    gone = run(state, Tick(), now_s=15)
    assert run(gone, TookOver("h3", 2, frozenset({"h2"})), now_s=15).electorate == (("h1", "1"), ("h3", "1"))
    state = run(gone, Joined("h2", "2", "h2:1"), now_s=15)
    state = run(state, TookOver("h3", 2, frozenset({"h2"})), now_s=15)
    assert state.electorate == (("h1", "1"), ("h2", "1"), ("h3", "1"))


def test_a_process_that_took_no_part_in_the_round_takes_over_last() -> None:
    state = run(started(3, 1, 3), Heard("h1", "1"), Heard("h3", "1"), now_s=9)
    state = run(state, Tick(), now_s=15)
    assert successors(state) == ["h1", "h3"]
    assert successors(run(state, Joined("h2", "2", "h2:1"), now_s=15)) == ["h1", "h3", "h2"]


@pytest.mark.parametrize("told", [False, True])
def test_an_agent_that_led_a_job_of_its_own_logs_no_orders_of_the_past(caplog: pytest.LogCaptureFixture, told: bool) -> None:
    """The agent at the endpoint returns, and leads for a moment before it finds the job, or the leader of the job finds it."""
    copy, joined = LocalCopy("1"), Joined("h1", "1", "h1:1")
    job = run(started(3, 1, 3), *(Ordered(str(number), f"order {number}", (1,)) for number in range(3)))
    copy.lead(Membership(Limits(1, 3), "h1 (1)"), joined)
    if told:
        copy.step_down(7, "h2:1")
        assert copy.state is None
    else:
        copy.follow("h2:1")
    copy.adopt(replace(job, term=7), "h2:1")
    assert not [record for record in caplog.records if "order" in record.getMessage()]
    copy.adopt(replace(run(job, Ordered("new", "order new", (1,))), term=7), "h2:1")
    (said,) = (record.getMessage() for record in caplog.records if "order" in record.getMessage())
    assert said.endswith("steering: order: order new")
