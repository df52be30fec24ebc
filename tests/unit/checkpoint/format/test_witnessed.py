"""What a checkpoint says of the checks, and which one a roll-back needs."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.handmade import WRITER
from unickpt.base.errors import FormatError
from unickpt.checkpoint.format.manifest import FileRecord, Manifest, from_bytes, to_bytes
from unickpt.checkpoint.format.witnessed import Passed, WitnessFault, needed, passed_of, passed_until, suspicion_in_memory

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


def test_a_checkpoint_in_memory_is_suspect_until_a_job_has_gone_back() -> None:
    faults = [WitnessFault(9, 10, "a", gone_back=True), WitnessFault(15, 20, "b")]
    assert [suspicion_in_memory(step, faults) for step in (10, 15, 16)] == [None, None, faults[1]]


def test_a_record_survives_json() -> None:
    record = Passed(50, ("replicas", "rest"))
    assert passed_of(json.loads(json.dumps(record.as_json())), where="m") == record
    assert passed_of(None, where="m") is None


@pytest.mark.parametrize(
    "value",
    [3, [], {}, {"passed_until": 1}, {"checks": []}, {"passed_until": -1, "checks": []}, {"passed_until": True, "checks": []},
     {"passed_until": 1, "checks": [1]}, {"passed_until": 1, "checks": [], "faults": -1},
     {"passed_until": 2**62, "checks": []}],
)  # fmt: skip
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(FormatError, match="m: member 'witness' must have"):
        passed_of(value, where="m")


@pytest.mark.parametrize("record", [None, Passed(7, ("rest",))])
def test_a_manifest_has_the_record_of_a_witness_and_no_member_without_one(record: Passed | None) -> None:
    file = FileRecord("index.safetensors", 8, "xxh3_128:0", 8, "xxh3_128:0")
    data = to_bytes(Manifest(9, "now", WRITER, (file,), file.path, witness=record))
    assert from_bytes(data, where="m").witness == record
    assert (b"witness" in data) == (record is not None)


def test_the_last_passed_step_of_a_folder_is_the_latest_one() -> None:
    assert passed_until([None, Passed(7, ("rest",)), Passed(3, ())]) == 7
    assert passed_until([None]) == 0
