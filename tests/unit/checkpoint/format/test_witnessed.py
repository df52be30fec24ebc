"""What a checkpoint says of the checks, and which one a roll-back needs."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unickpt.base.errors import FormatError
from unickpt.training.witness.record import Passed, needed, passed_by_all, passed_of, roll_back

FOUND = [(10, "a"), (20, "b"), (30, "c")]


@pytest.mark.parametrize(("until", "expected"), [(9, None), (10, "a"), (19, "a"), (20, "b"), (99, "c")])
def test_the_newest_checkpoint_before_the_last_passed_step_is_needed(until: int, expected: str | None) -> None:
    assert needed(FOUND, until) == expected
    assert needed(FOUND[::-1], until) == expected


@given(st.sets(st.integers(1, 40)), st.lists(st.integers(0, 45)))
def test_what_retention_must_keep_is_what_a_later_roll_back_takes(steps: set[int], passed: list[int]) -> None:
    """A retention that removes every other old checkpoint as the passed step grows still leaves one to roll back to."""
    kept: list[tuple[int, str]] = []
    until = 0
    for step in sorted({*steps, *passed}):
        if step in steps:
            kept.append((step, str(step)))
        until = step if step in passed else until
        must = needed(kept, until)
        expected = max((each for each in steps if each <= until), default=None)
        assert must == (None if expected is None else str(expected))
        kept = [each for each in kept if each[1] == must or each is kept[-1] or each[0] > until]


def test_a_job_has_passed_what_its_slowest_rank_passed() -> None:
    of_ranks = {0: {"rest": 40, "replicas": 50}, 1: {"rest": 50, "replicas": 50}}
    assert passed_by_all(of_ranks, ["replicas", "rest"]) == Passed(40, ("replicas", "rest"))
    assert passed_by_all(of_ranks | {2: {"rest": 50}}, ["replicas"]) == Passed(0, ("replicas",))
    assert passed_by_all({}, []) == Passed(0, ())


def test_a_roll_back_goes_before_the_last_passed_step_of_each_accused_host() -> None:
    passed = {"x": 25, "y": 15, "z": 35}
    assert roll_back(FOUND, passed, ["x"]) == "b"
    assert roll_back(FOUND, passed, ["x", "y"]) == "a"
    assert roll_back(FOUND, passed, ["unknown"]) is None


def test_a_record_survives_json() -> None:
    record = Passed(50, ("replicas", "rest"))
    assert passed_of(json.loads(json.dumps(record.as_json())), where="m") == record
    assert passed_of(None, where="m") is None


@pytest.mark.parametrize(
    "value",
    [3, [], {}, {"passed_until": 1}, {"checks": []}, {"passed_until": -1, "checks": []}, {"passed_until": True, "checks": []},
     {"passed_until": 1, "checks": [1]}, {"passed_until": 2**62, "checks": []}],
)  # fmt: skip
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(FormatError, match="m: member 'witness' must have"):
        passed_of(value, where="m")
