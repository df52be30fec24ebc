"""The advisor on jobs whose answer is known: hidden, exposed and slow communication, and cheap and dear codes."""

from __future__ import annotations

import itertools
import time

import pytest

from tests.unit.training.compression.advised_jobs import DEAR, FREE, GROUP, MEGABYTE, job
from unickpt.base.errors import FormatError
from unickpt.planning.replay.trace import Trace
from unickpt.training.compression.advisor import NO, BucketReplay, Candidate, LinkModel, advise


def test_hidden_communication_is_left_alone() -> None:
    advice = advise(job([3, 3, 3], after_ms=20), {"sign": FREE})
    assert not advice.pays
    assert advice.advised_s == advice.step_s
    assert [bucket.exposed_s for bucket in advice.buckets] == pytest.approx([0, 0, 0])
    assert "hidden" in advice.buckets[0].reason


def test_the_last_bucket_alone_is_exposed() -> None:
    """Earlier transfers end before the last gradients exist."""
    advice = advise(job([8, 8, 8]), {"sign": FREE})
    assert [bucket.scheme for bucket in advice.buckets] == [NO, NO, "sign"]
    assert advice.buckets[2].exposed_s == pytest.approx(8e-3)
    assert advice.step_s - advice.advised_s == pytest.approx(0.9 * 8e-3, rel=0.01)


def test_a_code_that_takes_longer_than_the_bytes_is_not_advised() -> None:
    advice = advise(job([8, 8, 8]), {"powersgd": DEAR})
    assert not advice.pays
    assert "longer" in advice.buckets[2].reason


def test_a_slow_link_makes_all_buckets_pay() -> None:
    advice = advise(job([40, 40, 40]), {"sign": FREE, "powersgd": DEAR})
    assert {bucket.scheme for bucket in advice.buckets} == {"sign"}


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("took", [[3, 9, 14], [12, 2, 6], [30, 30, 5], [8, 8, 8], [1, 1, 40]])
def test_the_advice_is_the_best_of_all_or_within_five_percent(took: list[int], blocks: bool) -> None:
    candidates = {"int8": Candidate(0.26, 2e-10), "sign": Candidate(0.04, 3e-9), "top-k": Candidate(0.02, 6e-9)}
    trace = job(took, blocks=blocks)
    advice = advise(trace, candidates)
    replay = BucketReplay(trace, GROUP, candidates, None)
    every = itertools.product([NO, *candidates], repeat=len(took))
    best = replay.steps_s([replay.with_schemes(names) for names in every]).min()
    assert advice.advised_s <= best * 1.05


def test_links_from_durations_of_several_sizes() -> None:
    trace = job([6, 10, 18], blocks=True, sizes=[MEGABYTE, 2 * MEGABYTE, 4 * MEGABYTE])
    link = advise(trace, {}).link
    assert link.alpha_s == pytest.approx(2e-3, rel=1e-3)
    assert link.beta_s * MEGABYTE == pytest.approx(4e-3, rel=1e-3)


def test_a_link_of_one_size_has_no_constant() -> None:
    assert advise(job([8, 8, 8], blocks=True), {}).link == LinkModel(0.0, pytest.approx(8e-3 / MEGABYTE))


def test_compression_of_small_buckets_costs_a_second_collective() -> None:
    """The constant of the link counts twice, so a small bucket does not pay although it is exposed."""
    sizes = [8 * MEGABYTE, 16 * MEGABYTE, MEGABYTE // 4]
    advice = advise(job([36, 68, 5], blocks=True, sizes=sizes), {"sign": FREE}, least_gain=0.001)
    assert [bucket.scheme for bucket in advice.buckets] == ["sign", "sign", NO]
    assert advice.buckets[2].exposed_s == pytest.approx(5e-3, rel=1e-3)


def test_the_decision_takes_milliseconds() -> None:
    trace = job([8] * 12)
    candidates = {f"c{number}": Candidate(0.5 / (number + 1), 1e-10 * number) for number in range(6)}
    begin = time.process_time()
    advise(trace, candidates)
    assert time.process_time() - begin < 2.0


def test_steps_with_other_numbers_of_reductions_are_refused() -> None:
    trace = job([8, 8])
    last = trace.calls[trace.calls["seq"] != trace.calls["seq"].max()]
    with pytest.raises(FormatError, match="different numbers"):
        advise(Trace(trace.ranks, trace.hosts, trace.places, trace.groups, last, trace.marks, trace.pauses), {})
