"""Who is slow, on made-up records: steps of ranks that compute, wait for each other, and differ in what they have to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from unickpt.diagnosis.slowness import Step, Transfer, slow_links, steps_of, stragglers
from unickpt.diagnosis.verdicts import Syndrome
from unickpt.timing.records import RECORD, Op

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


def job(own: Callable[[int, int], float], world: int = 4, **of_rank: Any) -> dict[int, list[Step]]:
    """Steps of all ranks; the call of a step ends 1 ms after the last one has come."""
    computes = [[own(rank, step) for step in range(STEPS)] for rank in range(world)]
    ends, begin = [], 0.0
    for step in range(STEPS):
        begin += max(own[step] for own in computes) + 1.0
        ends.append(begin)
    return {
        rank: steps_of(rank_of_job(computes[rank], ends, **{name: value(rank) for name, value in of_rank.items()}))
        for rank in range(world)
    }


def noise(seed: int, sigma_ms: float) -> Callable[[], float]:
    random = np.random.default_rng(seed)
    return lambda: float(random.normal(0.0, sigma_ms))


def test_a_ranks_own_time_is_what_it_does_not_wait() -> None:
    steps = job(lambda rank, _: 10.0 + rank)
    assert [round(step.own_ns / MS, 3) for step in steps[2]] == [12.0] * (STEPS - 1)  # of the first, no beginning
    assert [step.number for step in steps[2]] == list(range(2, STEPS + 1))


@pytest.mark.parametrize("late_ms", [5.0, 20.0, 100.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_rank_that_is_late_is_named_and_no_other(late_ms: float, seed: int) -> None:
    more = noise(seed, 1.0)
    (verdict,) = stragglers(job(lambda rank, _: 30.0 + more() + (late_ms if rank == 2 else 0.0)))
    assert (verdict.syndrome, verdict.ranks) == (Syndrome.NON_COMMUNICATION_SLOW, (2,))
    assert "cause: compute" in verdict.evidence[0]


@pytest.mark.parametrize("seed", range(10))
def test_nobody_is_named_where_all_only_vary(seed: int) -> None:
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
def test_the_cause_is_told(op: Op, cause: str) -> None:
    steps = job(
        lambda rank, _: 30.0 + (12.0 if rank == 1 else 0.0),
        moments=lambda rank: [(op, step, 11.5) for step in range(STEPS)] if rank == 1 else [],
    )
    (verdict,) = stragglers(steps)
    assert f"cause: {cause}" in verdict.evidence[0]


def test_a_single_slow_step_is_no_straggler() -> None:
    assert stragglers(job(lambda rank, step: 30.0 + (500.0 if rank == 1 and step == 12 else 0.0))) == []


def test_few_steps_say_nothing() -> None:
    steps = job(lambda rank, _: 30.0 + 20.0 * rank)
    assert stragglers({rank: own[:5] for rank, own in steps.items()}) == []


def transfers(slow: Callable[[int, int], float], world: int = 4) -> list[Transfer]:
    random = np.random.default_rng(3)
    return [
        Transfer(a, b, 1 << 20, 1e6 * slow(a, b) * float(random.uniform(0.9, 1.1)))
        for a in range(world) for b in range(world) if a != b for _ in range(10)
    ]  # fmt: skip


def test_a_hot_cell_is_a_link_and_a_hot_row_a_rank() -> None:
    assert slow_links(transfers(lambda *_: 1.0)) == []
    (link,) = slow_links(transfers(lambda a, b: 5.0 if (a, b) == (1, 3) else 1.0))
    assert link.link == (1, 3)
    (row,) = slow_links(transfers(lambda a, _: 5.0 if a == 2 else 1.0))
    assert (row.ranks, row.link) == ((2,), None)
    assert "sends" in row.evidence[0]
    (column,) = slow_links(transfers(lambda _, b: 5.0 if b == 0 else 1.0))
    assert column.ranks == (0,)
    assert "receives" in column.evidence[0]
