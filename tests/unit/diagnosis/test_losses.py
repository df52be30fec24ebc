"""Time that is lost in some steps only, and the order of calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from unickpt.diagnosis.detectors.call_order import usual_after
from unickpt.diagnosis.detectors.losses import losses
from unickpt.diagnosis.detectors.observations import LongStepsNowAndThen, RotatingPauses
from unickpt.diagnosis.detectors.verdicts import Cause
from unickpt.diagnosis.snapshot.steps import STEP

MS = 1e6
Extra = Callable[[int, int], float]  # nanoseconds of a rank in a step


def nothing(_rank: int, _step: int) -> float:
    return 0.0


def steps(
    ranks: int, count: int, extra: Extra = nothing, garbage: Extra = nothing, noise_ns: float = 2 * MS, seed: int = 1
) -> Any:
    """Steps of 80 ms in which each rank waits for the last one."""
    chance, out, now = np.random.default_rng(seed), np.zeros((count, ranks), STEP), 0.0
    for step in range(count):
        pauses = [garbage(rank, step) for rank in range(ranks)]
        own = [80 * MS + abs(chance.normal(0, noise_ns)) + extra(rank, step) + pauses[rank] for rank in range(ranks)]
        out["rank"][step], out["number"][step], out["garbage_ns"][step] = np.arange(ranks), step + 6, pauses
        out["own_ns"][step], out["begin_ns"][step], out["end_ns"][step] = own, now, now + max(own)
        now += max(own)
    return out.ravel()


def test_a_rank_that_is_late_in_every_seventh_step_is_named() -> None:
    (verdict,) = losses(steps(4, 56, lambda rank, step: 250 * MS * (rank == 2 and step % 7 == 0)))
    assert (verdict.ranks, verdict.cause) == ((2,), Cause.COMPUTE)
    (item,) = verdict.evidence
    assert isinstance(item, LongStepsNowAndThen)
    assert (item.slow, item.steps, item.every) == (8, 56, 7)


def test_steps_with_a_save_are_not_judged() -> None:
    found = steps(4, 56, lambda rank, step: 250 * MS * (rank == 0 and step % 7 == 0))
    found["long"] = (found["number"] - 6) % 7 == 0
    assert losses(found) == []


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("slow", [range(16, 64), range(48)])
def test_nobody_is_late_in_steps_in_which_a_slow_rank_is_not_slow(ranks: int, slow: range) -> None:
    """A rank that is slow in most steps is usually slow, and fast in the rest."""
    assert losses(steps(ranks, 64, lambda rank, step: 200 * MS * (rank == 1 and step in slow))) == []


@pytest.mark.parametrize("count", [64, 256])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_that_are_late_by_chance_are_not_named(ranks: int, count: int) -> None:
    hosts = {rank: f"n{rank % 2}" for rank in range(ranks)}
    assert not any(losses(steps(ranks, count, noise_ns=60 * MS, seed=seed), hosts) for seed in range(50))


@pytest.mark.parametrize(("every", "count"), [(3, 64), (7, 48), (13, 64), (30, 256), (60, 256)])
def test_late_steps_at_equal_distances_need_not_be_many(every: int, count: int) -> None:
    (verdict,) = losses(steps(4, count, lambda rank, step: every * 25 * MS * (rank == 1 and step % every == 2)))
    assert verdict.ranks == (1,)
    (item,) = verdict.evidence
    assert isinstance(item, LongStepsNowAndThen)
    assert item.every == every


def test_late_steps_at_varying_distances_are_found_in_more_steps() -> None:
    late = np.random.default_rng(3).choice(256, 20, replace=False)
    (verdict,) = losses(steps(4, 256, lambda rank, step: 250 * MS * (rank == 3 and step in late)))
    assert verdict.ranks == (3,)


def test_the_ranks_of_a_host_may_be_late_together() -> None:
    found = steps(6, 64, lambda rank, step: 250 * MS * (rank in (2, 3) and step % 7 == 0))
    assert losses(found) == []  # hosts unknown: no rank is alone
    (verdict,) = losses(found, {rank: f"n{rank // 2}" for rank in range(6)})
    assert (verdict.ranks, verdict.victims) == ((2, 3), 4)


def test_collections_in_turn_have_a_price_and_no_rank_is_slow() -> None:
    (verdict,) = losses(steps(4, 64, garbage=lambda rank, step: 50 * MS * (step % 8 == 2 * rank)))
    assert (verdict.ranks, verdict.cause) == ((0, 1, 2, 3), Cause.GARBAGE)
    (item,) = verdict.evidence
    assert isinstance(item, RotatingPauses)
    assert (item.steps, item.collecting) == (64, 32)
    assert losses(steps(4, 64, garbage=lambda _, step: 50 * MS * (step % 8 == 0))) == []  # at the same step


def test_collections_that_a_device_hides_cost_nothing() -> None:
    found = steps(8, 64, garbage=lambda rank, step: 12 * MS * (step % 8 == rank))
    hidden = np.sort(found, order=["number", "rank"])
    hidden["own_ns"], hidden["end_ns"] = 80 * MS, hidden["begin_ns"] + 80 * MS
    assert losses(found)
    assert losses(hidden) == []


def test_collections_in_a_save_or_an_evaluation_cost_nothing() -> None:
    found = steps(4, 64, garbage=lambda rank, step: 50 * MS * (step % 8 == 2 * rank))
    found["long"] = (found["number"] - 6) % 8 % 2 == 0
    assert losses(found) == []


@pytest.mark.parametrize(("column", "cause"), [("data_ns", Cause.DATA), ("garbage_ns", Cause.GARBAGE)])
def test_the_cause_of_late_steps_explains_most_of_them(column: str, cause: Cause) -> None:
    found = steps(4, 56, lambda rank, step: 250 * MS * (rank == 2 and step % 7 == 0))
    late = (found["rank"] == 2) & ((found["number"] - 6) % 7 == 0)
    found[column][late] = 200 * MS
    assert [verdict.cause for verdict in losses(found)] == [cause]
    found[column] = 200 * MS  # always: not the cause of late steps
    assert [verdict.cause for verdict in losses(found)] == [Cause.COMPUTE]


def test_what_usually_comes_next_is_read_from_earlier_steps() -> None:
    one, two, three = (1,), (2,), (3,)
    step = [one, two, two, three]
    assert usual_after([*step, *step, one, two])[:3] == [two, three, one]
    assert usual_after([one, two]) == []
