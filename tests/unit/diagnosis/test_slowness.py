"""Who is slow, on made-up records: steps of ranks that compute, wait for each other, and differ in what they have to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from unickpt.diagnosis.detectors.examine import examine
from unickpt.diagnosis.detectors.hangs import BEFORE_S, deadline_s
from unickpt.diagnosis.detectors.medians import grouped_quantiles, medians_of_others, row_medians
from unickpt.diagnosis.detectors.observations import Direction, LongSteps, SlowTransfers
from unickpt.diagnosis.detectors.p2p_links import TRANSFER, TransferRows, by_hosts, slow_links
from unickpt.diagnosis.detectors.stragglers import stragglers
from unickpt.diagnosis.detectors.verdicts import Cause, Syndrome
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.recording.records import RECORD, Flag, Op
from unickpt.diagnosis.reports.verdict_text import render
from unickpt.diagnosis.snapshot.progress import PROGRESS
from unickpt.diagnosis.snapshot.snapshot import CALL, GroupInfo, RankSnapshot, Snapshot
from unickpt.diagnosis.snapshot.steps import STEP, StepRows, steps_of

MS = 1_000_000
STEPS = 30


def rank_of_job(computes: list[float], ends: list[float], *, elements: int = 8, moments: Any = ()) -> Any:
    """Records of a rank that computes for so long and then calls once, in every step.

    Args:
        computes: milliseconds of own time, step by step.
        ends: when the call of each step ends on all ranks.
        elements: of the call: what makes ranks alike.
        moments: ``(operation, step, milliseconds)`` within the computing.
    """
    rows, begin = [], 0.0
    for number, (own, end) in enumerate(zip(computes, ends, strict=True)):
        for op, step, took in moments:
            if step == number:
                rows.append(record(len(rows) + 1, op, begin + 0.1, begin + 0.1 + took, number, 0))
        rows.append(record(len(rows) + 1, Op.ALL_REDUCE, begin + own, end, number, elements))
        rows.append(record(len(rows) + 1, Op.STEP, begin, end, number + 1, 0))
        begin = end
    return np.array(rows, RECORD)


def record(number: int, op: Op, begin_ms: float, end_ms: float, step: int, elements: int) -> tuple[Any, ...]:
    begin, end = int(begin_ms * MS), int(end_ms * MS)
    return (number, begin, 0, begin, end, number, elements, elements, 0, int(op), 2, 0, 0, 0, -1, 0, step, 0, number)


def job(own: Callable[[int, int], float], world: int = 4, **of_rank: Any) -> StepRows:
    """Steps of all ranks; the call of a step ends 1 ms after the last one has come."""
    computes = [[own(rank, step) for step in range(STEPS)] for rank in range(world)]
    ends, begin = [], 0.0
    for step in range(STEPS):
        begin += max(own[step] for own in computes) + 1.0
        ends.append(begin)
    return np.concatenate(
        [
            steps_of(rank, rank_of_job(computes[rank], ends, **{name: value(rank) for name, value in of_rank.items()}))
            for rank in range(world)
        ]
    )


def noise(seed: int, sigma_ms: float) -> Callable[[], float]:
    random = np.random.default_rng(seed)
    return lambda: float(random.normal(0.0, sigma_ms))


def test_own_time_excludes_waiting() -> None:
    steps = job(lambda rank, _: 10.0 + rank)
    own = steps[steps["rank"] == 2]
    np.testing.assert_allclose(own["own_ns"] / MS, [12.0] * (STEPS - 1))  # of the first, no beginning
    assert own["number"].tolist() == list(range(2, STEPS + 1))
    assert (own["end_ns"] - own["begin_ns"] == 14 * MS).all()


def test_waits_that_overlap_or_reach_over_a_step_count_once() -> None:
    waits = [(1, 10), (2, 4), (3, 12), (18, 25), (24, 26), (31, 32)]
    rows = [record(at + 1, Op.ALL_REDUCE, begin, end, 1, 8) for at, (begin, end) in enumerate(waits)]
    rows += [record(7, Op.STEP, 1, 20, 1, 0), record(8, Op.STEP, 20, 35, 2, 0)]
    assert (steps_of(0, np.array(rows, RECORD))["own_ns"] / MS).tolist() == [19 - 13, 15 - 7]


def _by_the_reducer(rows: Any) -> Any:
    """Calls as the reducer of DDP makes them: nothing tells when the rank waits for them."""
    calls = rows["op"] == Op.ALL_REDUCE
    rows["wait_ns"][calls], rows["flags"][calls] = 0, int(Flag.ASYNC | Flag.FROM_NATIVE)
    return rows


def test_the_wait_for_the_last_call_of_ddps_reducer_is_no_own_time() -> None:
    """Between the first and the last call, the backward pass goes on."""
    rows = [record(1, Op.ALL_REDUCE, 3, 5, 1, 8), record(2, Op.ALL_REDUCE, 8, 20, 1, 8), record(3, Op.STEP, 3, 21, 1, 0)]
    rows += [record(4, Op.ALL_REDUCE, 22, 30, 1, 8), record(5, Op.STEP, 21, 31, 2, 0)]
    found = _by_the_reducer(np.array(rows, RECORD))
    assert (steps_of(0, found)["own_ns"] / MS).tolist() == [18 - 12, 10 - 8]
    assert found["wait_ns"][0] == 0  # the records are not changed
    found["flags"] = int(Flag.ASYNC)  # by the program, which may wait much later
    assert (steps_of(0, found)["own_ns"] / MS).tolist() == [18, 10]
    assert len(steps_of(0, found[found["op"] == Op.STEP])) == 1


def test_a_late_rank_under_ddp_is_named() -> None:
    spread = noise(1, 0.3)
    computes = [[10.0 + spread() + 20.0 * (rank == 2) for _ in range(STEPS)] for rank in range(4)]
    ends = np.cumsum([max(own[step] for own in computes) + 1.0 for step in range(STEPS)]).tolist()
    steps = np.concatenate([steps_of(rank, _by_the_reducer(rank_of_job(own, ends))) for rank, own in enumerate(computes)])
    assert [verdict.ranks for verdict in stragglers(steps)] == [(2,)]


def test_a_step_that_began_before_the_oldest_record_is_left_out() -> None:
    rows = np.array([record(at + 1, Op.STEP, 10 * at, 10 * at + 10, at + 1, 0) for at in range(3)], RECORD)
    assert steps_of(0, rows)["number"].tolist() == [2, 3]


def test_ranks_with_the_same_calls_are_known_by_it_in_whatever_order_they_came() -> None:
    def calls(*elements: int) -> int:
        rows = [record(at + 1, Op.ALL_REDUCE, at, at + 1, 1, size) for at, size in enumerate(elements)]
        rows.append(record(len(rows) + 1, Op.STEP, 0, 50, 1, 0))
        return int(steps_of(0, np.array(rows, RECORD))["calls"][0])

    assert calls(3, 4, 5) == calls(5, 3, 4)
    assert len({calls(3, 4, 5), calls(3, 4), calls(4, 4, 4), calls(3, 3, 6)}) == 4
    assert calls(3, 4, 5) == 0x424C8BAEEA397547  # on every host


@pytest.mark.parametrize("late_ms", [5.0, 20.0, 100.0])
@pytest.mark.parametrize("seed", range(5))
def test_only_the_late_rank_is_named(late_ms: float, seed: int) -> None:
    more = noise(seed, 1.0)
    (verdict,) = stragglers(job(lambda rank, _: 30.0 + more() + (late_ms if rank == 2 else 0.0)))
    assert (verdict.syndrome, verdict.ranks) == (Syndrome.NON_COMMUNICATION_SLOW, (2,))
    assert verdict.cause is Cause.COMPUTE


@pytest.mark.parametrize("seed", range(10))
def test_random_variation_names_no_rank(seed: int) -> None:
    more = noise(seed, 3.0)
    assert stragglers(job(lambda *_: 30.0 + abs(more()), world=8)) == []


def test_a_stage_that_has_more_to_do_is_compared_with_its_like() -> None:
    """Ranks 0 and 1 are the last pipeline stage: twice the work, and other calls. Rank 3 is slow among the others."""
    steps = job(
        lambda rank, _: 60.0 if rank < 2 else 45.0 if rank == 3 else 30.0, world=6, elements=lambda rank: 9 if rank < 2 else 8
    )
    (verdict,) = stragglers(steps)
    assert verdict.ranks == (3,)


@pytest.mark.parametrize(("op", "cause"), [(Op.DATA, "data"), (Op.GARBAGE, "garbage collection")])
def test_the_verdict_names_the_cause(op: Op, cause: str) -> None:
    steps = job(
        lambda rank, _: 30.0 + (12.0 if rank == 1 else 0.0),
        moments=lambda rank: [(op, step, 11.5) for step in range(STEPS)] if rank == 1 else [],
    )
    (verdict,) = stragglers(steps)
    assert verdict.cause is not None
    assert verdict.cause.value == cause


@pytest.mark.parametrize(("seen", "named"), [(True, [(1,)]), (False, [])])
def test_with_few_peers_a_known_cause_counts_sooner(seen: bool, named: list[Any]) -> None:
    """Two ranks differ by 10 % of a step: by chance, for all one knows; but not if one of them has waited for data."""
    steps = job(
        lambda rank, _: 350.0 + (35.0 if rank == 1 else 0.0),
        world=2,
        moments=lambda rank: [(Op.DATA, step, 34.0) for step in range(STEPS)] if rank == 1 and seen else [],
    )
    assert [verdict.ranks for verdict in stragglers(steps)] == named


def test_a_single_slow_step_is_no_straggler() -> None:
    assert stragglers(job(lambda rank, step: 30.0 + (500.0 if rank == 1 and step == 12 else 0.0))) == []


def test_few_steps_give_no_verdict() -> None:
    steps = job(lambda rank, _: 30.0 + (20.0 if rank == 1 else 0.0))
    assert stragglers(steps[steps["number"] < 12]) == []
    assert stragglers(steps[:0]) == []


def test_a_rank_with_few_records_does_not_hide_others() -> None:
    steps = job(lambda rank, _: 30.0 + (20.0 if rank in (1, 3) else 0.0), world=8)
    (verdict,) = stragglers(steps[(steps["rank"] != 3) | (steps["number"] > STEPS - 10)])
    assert verdict.ranks == (1,)
    assert isinstance(verdict.evidence[0], LongSteps)
    assert verdict.evidence[0].steps == 20


def test_differences_among_healthy_ranks_give_no_verdict() -> None:
    """Some processors are always a little faster than others: by 2 ms, where a step may vary by 0.1 ms."""
    of_rank, more = noise(1, 2.0), noise(2, 0.1)
    always = [of_rank() for _ in range(48)]
    assert stragglers(job(lambda rank, _: 30.0 + always[rank] + more(), world=48)) == []
    (verdict,) = stragglers(job(lambda rank, _: 30.0 + always[rank] + more() + (25.0 if rank == 7 else 0.0), world=48))
    assert verdict.ranks == (7,)


def test_pauses_that_all_have_now_and_then_are_nobodys_fault() -> None:
    """In a third of the steps, whoever it hits: some are hit in most of their last twenty."""

    def paused(seed: int, always: int = -1) -> StepRows:
        random = np.random.default_rng(seed)
        return job(lambda rank, _: 40.0 if rank == always or random.random() < 0.35 else 30.0, world=100)

    assert [stragglers(paused(seed)) for seed in range(4)] == [[]] * 4
    (verdict,) = stragglers(paused(9, always=5))
    assert verdict.ranks == (5,)


def test_the_slowest_comes_first() -> None:
    verdicts = stragglers(job(lambda rank, _: 30.0 + {2: 20.0, 5: 50.0}.get(rank, 0.0), world=8))
    assert [verdict.ranks for verdict in verdicts] == [(5,), (2,)]


def test_the_deadline_is_three_times_the_duration_of_the_job() -> None:
    steps = job(lambda *_: 5_000.0)
    assert deadline_s(steps, [0.0] * 4) == pytest.approx(15.003)
    assert deadline_s(steps, [0.0, 9e9, 0.0, 0.0]) == 27.0
    assert deadline_s(steps, [0.0] * 5) == BEFORE_S  # of one of the ranks there is no step
    assert deadline_s(steps[:0], []) == BEFORE_S


def test_medians_of_others_exclude_the_element_itself() -> None:
    random = np.random.default_rng(5)
    for count in (2, 3, 4, 7, 8):
        table = random.integers(0, 5, (count, 60)).astype(float)
        table[random.random(table.shape) < 0.2] = np.nan
        expected = np.array([[middle(np.delete(column, row)) for column in table.T] for row in range(count)])
        np.testing.assert_array_equal(medians_of_others(table), expected)
        np.testing.assert_array_equal(row_medians(table), [middle(row) for row in table])


def middle(values: Any) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else np.nan


def test_middles_of_groups() -> None:
    keys, (middle,), counts = grouped_quantiles(np.array([7, 3, 7, 7, 3]), np.array([1, 4, 9, 5, 8]))
    assert (keys.tolist(), middle.tolist(), counts.tolist()) == ([3, 7], [6.0, 5.0], [2, 3])
    assert grouped_quantiles(np.array([7, 3, 7, 7, 3]), np.array([1, 4, 9, 5, 8]), 0.25, 1.0)[1].tolist() == [
        [5.0, 3.0],
        [8.0, 9.0],
    ]
    assert len(grouped_quantiles(np.zeros(0, np.int64), np.zeros(0))[0]) == 0


def transfers(slow: Callable[[int, int], float], world: int = 4) -> TransferRows:
    random = np.random.default_rng(3)
    rows = [
        (a, b, 1 << 20, 1e6 * slow(a, b) * float(random.uniform(0.9, 1.1)))
        for a in range(world) for b in range(world) if a != b for _ in range(10)
    ]  # fmt: skip
    return np.array(rows, TRANSFER)


def test_a_hot_cell_is_a_link_and_a_hot_row_a_rank() -> None:
    assert slow_links(transfers(lambda *_: 1.0)) == []
    (link,) = slow_links(transfers(lambda a, b: 5.0 if (a, b) == (1, 3) else 1.0))
    assert link.link == (1, 3)
    (row,) = slow_links(transfers(lambda a, _: 5.0 if a == 2 else 1.0))
    assert (row.ranks, row.link) == ((2,), None)
    assert isinstance(row.evidence[0], SlowTransfers)
    assert row.evidence[0].direction is Direction.SENDS
    (column,) = slow_links(transfers(lambda _, b: 5.0 if b == 0 else 1.0))
    assert column.ranks == (0,)
    assert isinstance(column.evidence[0], SlowTransfers)
    assert column.evidence[0].direction is Direction.RECEIVES


def test_all_slow_links_from_one_host_to_another_are_one_verdict() -> None:
    """Two ranks to a host. All links from the first to the second are slow, and one within the third."""
    times = {(0, 2): 5.0, (0, 3): 5.0, (1, 2): 5.0, (1, 3): 50.0, (4, 5): 5.0}
    every = transfers(lambda a, b: times.get((a, b), 1.0), world=8)
    hosts = {rank: f"h{rank // 2}" for rank in range(8)}
    between, within = by_hosts(slow_links(every), hosts)
    assert (between.link, within.link) == ((1, 3), (4, 5))
    assert (between.links[0], sorted(between.links)) == ((1, 3), [(0, 2), (0, 3), (1, 2), (1, 3)])
    assert (between.victims, within.links) == (2, ((4, 5),))
    text = render(between, with_a_slow_link(40)).sentence
    assert "4 links from h0 to h1, such as from rank 1 to rank 3, take up to 5" in text
    times[1, 3] = 1.0  # in this look it carries nothing
    other, _ = by_hosts(slow_links(transfers(lambda a, b: times.get((a, b), 1.0), world=8)), hosts)
    assert other.link != between.link
    assert other.key == between.key
    assert len({each.key for each in by_hosts(slow_links(every), {})}) == 5


def test_a_link_that_is_slow_now_and_then_is_none() -> None:
    every = transfers(lambda *_: 1.0)
    here = np.flatnonzero((every["source"] == 1) & (every["destination"] == 2))
    every["ns"][here[:6]] *= 10
    assert slow_links(every) == []
    every["ns"][here[6:9]] *= 10
    (link,) = slow_links(every)
    assert link.link == (1, 2)


def test_links_are_compared_with_those_that_carry_as_much_as_far() -> None:
    """Two ranks to a host, and between hosts it takes ten times as long; within a host, from 4 to 5, four times."""
    hosts = np.arange(6) // 2
    every = transfers(lambda a, b: (1.0 if a // 2 == b // 2 else 10.0) * (4.0 if (a, b) == (4, 5) else 1.0), world=6)
    (link,) = slow_links(every, hosts=hosts)
    assert link.link == (4, 5)
    larger = every.copy()
    larger["bytes"] *= 64
    larger["ns"] *= 64
    (link,) = slow_links(np.concatenate([larger[larger["source"] == 2], every[every["source"] != 2]]), hosts=hosts)
    assert link.link == (4, 5)


def test_differences_within_the_clock_error_are_not_slowness() -> None:
    every = transfers(lambda a, b: 5.0 if (a, b) == (1, 3) else 1.0)
    assert len(slow_links(every, clock_error_ns=1e6)) == 1
    assert slow_links(every, clock_error_ns=4e6) == []


def test_few_transfers_give_no_verdict_on_a_link() -> None:
    every = transfers(lambda a, b: 5.0 if (a, b) == (1, 3) else 1.0)
    here = (every["source"] == 1) & (every["destination"] == 3)
    assert slow_links(np.concatenate([every[~here], every[here][:7]])) == []
    assert slow_links(every[:0]) == []


def with_a_slow_link(step: int) -> Snapshot:
    """Point-to-point calls of four ranks, ten on each link; one link takes five times as long."""
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b for _ in range(10)]
    calls = np.zeros(2 * len(pairs), CALL)
    calls["op"] = [int(Op.SEND), int(Op.RECEIVE)] * len(pairs)
    calls["source"], calls["destination"] = np.repeat(pairs, 2, axis=0).T
    calls["rank"] = np.where(calls["op"] == int(Op.SEND), calls["source"], calls["destination"])
    calls["seq"] = np.repeat(np.tile(np.arange(1, 11), len(pairs) // 10), 2)
    calls["bytes"], calls["call_ns"] = 1 << 16, 1_000
    took = np.where((calls["source"] == 0) & (calls["destination"] == 2), 5_000_000, 1_000_000)
    calls["end_ns"] = np.where(calls["op"] == int(Op.RECEIVE), calls["call_ns"] + took, 0)
    ranks = {at: RankSnapshot(9, "a", State.RUNNING, False, step, 0) for at in range(4)}
    return Snapshot(10_000_000, ranks, [GroupInfo("g", "", ((0, 1, 4),))], np.zeros(0, PROGRESS), np.zeros(0, STEP), calls)


@pytest.mark.parametrize(("step", "count"), [(3, 0), (12, 0), (13, 1)])
def test_the_first_steps_give_no_verdict_on_links(step: int, count: int) -> None:
    assert [verdict.link for verdict in examine(with_a_slow_link(step)).verdicts] == [(0, 2)] * count


def test_collections_in_turn_do_not_hide_a_slow_link() -> None:
    view = with_a_slow_link(40)
    pauses = job(lambda rank, step: 80.0 + 50.0 * (step % 4 == rank), moments=_collections)
    assert [verdict.cause for verdict in examine(replace(view, steps=pauses)).verdicts] == [Cause.COMMUNICATION, Cause.GARBAGE]


def _collections(rank: int) -> list[tuple[Op, int, float]]:
    return [(Op.GARBAGE, step, 50.0) for step in range(STEPS) if step % 4 == rank]
