"""Jobs in which all ranks take longer than earlier, and jobs whose steps differ in length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.step_lengths import SOUND, STEP_S, looks, rows, steady, throttled
from unickpt.diagnosis.detectors.all_slower import slower_than_before
from unickpt.diagnosis.detectors.hints import AllSlower
from unickpt.diagnosis.detectors.observations import SlowerThanBefore
from unickpt.diagnosis.detectors.verdicts import Cause, Verdict
from unickpt.diagnosis.snapshot.snapshot import KEPT_STEPS, kept_steps

MS = 1e6
HOSTS = {rank: "n0" for rank in range(4)}
AT, COUNT = 150, 210  # step of a change, and steps, in these tests


def found_in(made: Any, waits: tuple[float, float] | None = (0.3, 0.3), at: int = AT) -> list[Verdict]:
    """Return verdicts on steps; ``waits``: share of time that ranks wait for processors before and after a step."""
    ends = np.unique(made["end_ns"]).tolist()
    return slower_than_before(made, HOSTS, [(end, waits[place >= at]) for place, end in enumerate(ends)] if waits else [])


def lengths(extra: Any = 0.0, *, at: int = AT, seed: int = 1, noise: float = 0.03, ranks: int = 4) -> Any:
    """Return steps of 80 ms, and from a step on so many more seconds."""
    chance = np.random.default_rng(seed)
    own = STEP_S * np.exp(chance.normal(0, noise, (ranks, COUNT)))
    return own + np.where(np.arange(COUNT) >= at, extra, 0.0)


def test_ranks_that_all_take_longer_than_before_have_a_price() -> None:
    (verdict,) = found_in(rows(lengths(0.070)))
    assert (verdict.ranks, verdict.cause) == ((0, 1, 2, 3), Cause.COMPUTE)
    (item,) = verdict.evidence
    assert isinstance(item, SlowerThanBefore)
    assert 68 * MS < item.excess_ns < 72 * MS
    assert item.before == (6, 6 + AT - 1), "all steps until the change"
    assert verdict.next == AllSlower(("n0",), 6 + COUNT - 32, 6 + COUNT - 1)


@pytest.mark.parametrize("seed", range(10))
def test_a_job_that_is_as_fast_as_before_is_not_slower(seed: int) -> None:
    assert not found_in(rows(lengths(noise=0.5, seed=seed)))
    assert not found_in(rows(lengths(0.010, noise=0.3, seed=seed)))
    assert not found_in(rows(lengths(0.030, noise=0.4, ranks=1, seed=seed))), "its steps differ by more"
    three = np.array([[0.07], [0.07], [0.07], [0.0]])
    assert not found_in(rows(lengths(three, seed=seed))), "one rank is as fast"
    assert not found_in(rows(lengths(0.070, at=190, seed=seed))), "not long enough"
    assert not found_in(rows(lengths(0.070, at=100, seed=seed))), "too little is known of the time before"
    assert not found_in(rows(lengths(0.3 * (np.arange(COUNT) % 4 == 0), seed=seed))), "not all of its steps"


def test_a_throttled_job_is_named_as_long_as_enough_steps_before_are_known() -> None:
    own = throttled(np.random.default_rng(1), steady(np.random.default_rng(2), 4, 600), 300, 1.5)
    named = [count for count, made in looks(own, KEPT_STEPS, 4) if found_in(made)]
    assert 332 <= named[0] <= 344
    assert named == list(range(named[0], named[-1] + 1, 4))
    assert named[-1] - named[0] > 64


def test_in_a_job_of_many_ranks_few_steps_are_kept() -> None:
    ranks = 2048
    own = throttled(np.random.default_rng(1), steady(np.random.default_rng(2), ranks, 96), 60, 1.5)
    (_, made), *_ = looks(own, kept_steps(ranks), 96)
    assert len(found_in(made)) == 1


@pytest.mark.parametrize("seed", range(10))
def test_uneven_batches_after_equal_ones_are_no_throttled_job(seed: int) -> None:
    """Two windows in a row, as a sound job of ``evidence.steering.sound_windows`` had them."""
    chance = np.random.default_rng(seed)
    own = np.where(np.arange(COUNT) < COUNT - 40, lengths(seed=seed) * 0.6, chance.uniform(0.05, 0.4, (4, COUNT)))
    assert not found_in(rows(own))


@pytest.mark.parametrize("kind", SOUND)
def test_steps_that_differ_in_length_are_no_throttled_job(kind: str) -> None:
    """``python -m evidence.diagnosis.slower_jobs`` takes more of them."""
    wrong = []
    for seed in range(4):
        chance = np.random.default_rng(seed)
        own = SOUND[kind](chance, int(chance.choice([1, 2, 4, 8])), 600)
        wrong += [(seed, count) for count, made in looks(own, KEPT_STEPS, 60) if found_in(made)]
    assert wrong == []


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("times", [1.3, 1.5, 3.0])
def test_a_throttled_job_is_found(times: float, seed: int) -> None:
    chance = np.random.default_rng(seed)
    own = throttled(chance, steady(chance, int(chance.choice([1, 2, 4, 8])), 300), 200, times)
    assert any(found_in(made) for _, made in looks(own, KEPT_STEPS, 20))


def test_other_calls_are_other_work() -> None:
    made = rows(lengths(0.070))
    made["calls"] = made["number"] >= 6 + AT
    assert not found_in(made)
    made["calls"] = made["number"] % 16 == 0  # now and then one more
    assert found_in(made)


def test_what_other_programs_take_is_no_loss_of_the_job() -> None:
    made = rows(lengths(0.070))
    assert not found_in(made, (0.2, 0.6))
    assert not found_in(made, None), "not known"
    assert found_in(made, (0.4, 0.25)), "the same waits, in longer steps"
