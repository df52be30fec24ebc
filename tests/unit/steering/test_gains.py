"""Predictions of gains are asked rarely, and reach the policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from unickpt.base.errors import FormatError
from unickpt.diagnosis.detectors.observations import LongSteps
from unickpt.diagnosis.detectors.verdicts import Syndrome, Verdict
from unickpt.diagnosis.snapshot.progress import PROGRESS
from unickpt.diagnosis.snapshot.snapshot import CALL, Snapshot
from unickpt.diagnosis.snapshot.steps import STEP
from unickpt.steering.host import gains
from unickpt.steering.host.gains import Gains
from unickpt.steering.policy.policy import finding_of

NOTHING = Snapshot(0, {}, [], np.zeros(0, PROGRESS), np.zeros(0, STEP), np.zeros(0, CALL))


class Clock:
    """Seconds that a test sets. Each prediction takes ``costs_s``."""

    def __init__(self, costs_s: float = 0.0) -> None:
        self.now, self.costs_s, self.asked = 0.0, costs_s, 0

    def __call__(self) -> float:
        return self.now

    def predict(self, _snapshot: Snapshot, ranks: Sequence[int], links: Sequence[tuple[int, int]]) -> float:
        self.asked += 1
        self.now += self.costs_s
        if links:
            raise FormatError("nothing to compare with")
        return 0.1 * len(ranks)


def slow(*ranks: int, link: tuple[int, int] | None = None) -> Verdict:
    return Verdict(Syndrome.NON_COMMUNICATION_SLOW, ranks, since_ns=0, link=link)


def test_one_verdict_is_asked_about_rarely() -> None:
    clock = Clock()
    known = Gains(clock.predict, clock)
    for _ in range(100):
        assert known.of(slow(1, 2), NOTHING) == pytest.approx(0.2)
        clock.now += 1.0
    assert clock.asked == 100 / gains.ASK_S


def test_a_slow_prediction_takes_a_small_part_of_the_time() -> None:
    clock = Clock(costs_s=2.0)
    known = Gains(clock.predict, clock)
    while clock.now < 1000:
        known.of(slow(int(clock.now) % 7), NOTHING)
        clock.now += 1.0
    assert clock.asked * clock.costs_s < 1000 / gains.SHARE + 2


def test_an_unknown_gain_leaves_the_evidence_to_the_policy() -> None:
    clock = Clock()
    assert Gains(clock.predict, clock).of(slow(1, link=(0, 1)), NOTHING) is None
    assert Gains(None).of(slow(1), NOTHING) is None


@pytest.mark.parametrize(("predicted", "gain"), [(None, 0.5), (0.125, 0.125), (0.0, 0.0), (3.0, 1.0)])
def test_a_predicted_gain_replaces_the_excess_of_the_steps(predicted: float | None, gain: float) -> None:
    evidence: Any = LongSteps(step_ns=100, excess_ns=50, **_rest(LongSteps, "step_ns", "excess_ns"))
    verdict = Verdict(Syndrome.NON_COMMUNICATION_SLOW, (1,), since_ns=0, evidence=(evidence,))
    assert finding_of(verdict, {1: "b"}, 10, predicted=predicted).gain == gain


def _rest(kind: Any, *known: str) -> dict[str, Any]:
    """Return zeros for the other fields of a dataclass."""
    return {name: 0 for name in kind.__slots__ if name not in known}
