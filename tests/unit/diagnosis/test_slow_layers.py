"""Who is slow before twenty steps exist, and without peers: steps of ranks beside the times of their layers in earlier jobs."""

from __future__ import annotations

import numpy as np
import pytest

from unickpt.diagnosis.detectors.examine import examine
from unickpt.diagnosis.detectors.observations import LongSteps, SlowLayers
from unickpt.diagnosis.detectors.slow_layers import slow_layers
from unickpt.diagnosis.detectors.verdicts import Cause, Syndrome
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.reports.verdict_text import render
from unickpt.diagnosis.snapshot.progress import PROGRESS
from unickpt.diagnosis.snapshot.snapshot import CALL, LayerSample, RankSnapshot, Snapshot
from unickpt.diagnosis.snapshot.steps import STEP

MS, EXPECTED_MS = 1_000_000, 100.0


def job(
    own_ms: list[float], *, steps: int, ratios: list[float], kinds: list[int] | None = None, samples: int = 3,
    error: float = 0.0, noise_ms: float = 0.5, data_ms: float = 0.0,
) -> Snapshot:  # fmt: skip
    """A job whose ranks compute for so long in each step.

    Args:
        own_ms: own time of each rank.
        steps: steps so far.
        ratios: measured to expected time of the layers of each rank; 0 if unknown.
        kinds: ranks with the same number are peers; default: all are.
        samples: sampled steps.
        error: spread of the expected time.
        noise_ms: standard deviation of the own time.
        data_ms: wait for data of the slowest rank.
    """
    random, rows = np.random.default_rng(1), []
    for rank, own in enumerate(own_ms):
        for number in range(2, steps + 1):  # of the first, no beginning is known
            row = np.zeros(1, STEP)
            row["rank"], row["number"], row["begin_ns"], row["end_ns"] = (
                rank,
                number,
                number * 300 * MS,
                (number + 1) * 300 * MS,
            )
            row["own_ns"] = (own + random.normal(0, noise_ms)) * MS
            row["data_ns"] = data_ms * MS * (own == max(own_ms))
            row["calls"] = 7 + (kinds[rank] if kinds else 0)
            rows.append(row)
    layers = [LayerSample(each * EXPECTED_MS / 1e3, EXPECTED_MS / 1e3, error, samples) if each else None for each in ratios]
    ranks = {
        rank: RankSnapshot(100 + rank, "host", State.RUNNING, False, steps, 0, layers=each) for rank, each in enumerate(layers)
    }
    table = np.concatenate(rows) if rows else np.zeros(0, STEP)
    return Snapshot((steps + 2) * 300 * MS, ranks, [], np.zeros(0, PROGRESS), table, np.zeros(0, CALL))


def test_a_slow_rank_is_known_after_six_steps() -> None:
    snapshot = job([110, 110, 210, 110], steps=6, ratios=[1.0, 1.0, 2.0, 1.0])
    (verdict,) = examine(snapshot).verdicts
    assert (verdict.syndrome, verdict.ranks, verdict.cause) == (Syndrome.NON_COMMUNICATION_SLOW, (2,), Cause.COMPUTE)
    long, layers = verdict.evidence
    assert isinstance(long, LongSteps)
    assert long.steps == 4
    assert long.excess_ns == pytest.approx(100 * MS, rel=0.02)
    assert layers == SlowLayers(0.2, 0.1, 1.0)
    assert examine(job([110, 110, 210, 110], steps=5, ratios=[1.0, 1.0, 2.0, 1.0])).verdicts == []


def test_peers_may_wait_in_their_layers() -> None:
    """Under tensor parallelism all layers take as long as those of the slowest rank; own times have no waits."""
    (verdict,) = slow_layers(job([110, 110, 210, 110], steps=8, ratios=[2.0, 2.0, 2.0, 2.0]))
    assert verdict.ranks == (2,)


def test_the_sentence_tells_both_comparisons() -> None:
    snapshot = job([110, 110, 210, 110], steps=6, ratios=[1.1, 1.1, 2.0, 1.1])
    text = render(examine(snapshot).verdicts[0], snapshot).sentence
    assert "longer than the 3 that make the same calls, in 100% of 4 steps" in text
    assert "the layers of rank 2 take 200.0 ms of each step, 2.0 times as long as in earlier jobs on such a device" in text
    assert "those of the other ranks take 1.1 times as long" in text


@pytest.mark.parametrize(
    ("own_ms", "ratios", "more"),
    [
        ([110, 110, 210, 110], [0, 0, 0, 0], {}),  # nothing is known of earlier jobs
        ([110, 110, 210, 110], [1.0, 1.0, 1.2, 1.0], {}),  # its layers are as fast as ever: something else takes the time
        ([110, 110, 210, 110], [1.0, 1.0, 2.0, 1.0], {"samples": 2}),
        ([110, 110, 210, 110], [1.0, 1.0, 2.0, 1.0], {"error": 0.3}),  # such layers took up to twice as long before
        ([110, 110, 210, 110], [1.0, 1.0, 2.0, 1.0], {"data_ms": 90.0}),  # it waits for data
        ([110, 110, 111, 110], [2.0, 2.0, 2.0, 2.0], {}),  # a slower device, or another dtype: all alike
    ],
)
def test_one_comparison_is_not_enough(own_ms: list[float], ratios: list[float], more: dict[str, float]) -> None:
    assert slow_layers(job(own_ms, steps=8, ratios=ratios, **more)) == []  # type: ignore[arg-type]


def test_ranks_with_twenty_steps_are_judged_by_these_alone() -> None:
    snapshot = job([110, 110, 112, 110], steps=30, ratios=[1.0, 1.0, 2.0, 1.0])  # less than the limit for so few peers
    assert slow_layers(snapshot) == examine(snapshot).verdicts == []
    lately = (snapshot.steps["rank"] == 2) & (snapshot.steps["number"] > 22)
    snapshot.steps["own_ns"][lately] += 100 * MS  # for 8 of the last 20 steps
    assert slow_layers(snapshot) == examine(snapshot).verdicts == []


@pytest.mark.parametrize("steps", [7, 40])
def test_a_stage_without_peers_is_known(steps: int) -> None:
    snapshot = job([110, 230, 110], steps=steps, ratios=[1.0, 2.0, 1.1], kinds=[0, 1, 2])
    (verdict,) = examine(snapshot).verdicts
    assert (verdict.syndrome, verdict.ranks, verdict.victims) == (Syndrome.NON_COMMUNICATION_SLOW, (1,), 2)
    assert verdict.evidence == (SlowLayers(0.2, 0.1, 1.05),)
    assert "the layers of rank 1 take 200.0 ms of each step" in render(verdict, snapshot).sentence


@pytest.mark.parametrize(
    ("own_ms", "ratios", "error"),
    [
        ([230, 230, 230], [2.0, 2.0, 2.0], 0.0),  # another device or dtype: all alike
        ([230, 230, 230], [1.7, 2.0, 1.7], 0.0),
        ([110, 230, 110], [0, 2.0, 0], 0.0),  # nothing to compare it with
        ([110, 230, 110], [1.0, 2.0, 1.0], 0.3),
        ([110, 140, 110], [1.0, 2.0, 1.0], 0.0),  # the sampled steps were slow, and the ones after them are not
    ],
)
def test_a_stage_without_peers_is_not_blamed_by_chance(own_ms: list[float], ratios: list[float], error: float) -> None:
    assert slow_layers(job(own_ms, steps=8, ratios=ratios, kinds=[0, 1, 2], error=error)) == []


def test_a_job_of_one_rank_has_no_slow_rank() -> None:
    assert slow_layers(job([230], steps=8, ratios=[2.0])) == []


def test_the_slowest_comes_first() -> None:
    found = slow_layers(job([110, 180, 230, 110], steps=8, ratios=[1.0, 1.6, 2.0, 1.0], kinds=[0, 1, 2, 3]))
    assert [verdict.ranks for verdict in found] == [(2,), (1,)]


def test_sound_ranks_are_not_blamed_in_many_short_jobs() -> None:
    """Layers sampled on a busy machine, and steps with noise: a thousand jobs in their first steps."""
    random, blamed = np.random.default_rng(3), 0
    for _ in range(1000):
        own = (110 * np.exp(random.normal(0, 0.05, 8))).tolist()
        ratios = np.exp(random.normal(0, 0.15, 8)).tolist()
        blamed += bool(slow_layers(job(own, steps=int(random.integers(5, 12)), ratios=ratios, noise_ms=5.0)))
    assert blamed == 0
