"""The file of a precision plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unickpt.base.errors import ConfigError
from unickpt.training.precision.policy import Policy, policy_of, read_policy

PLAN: dict[str, Any] = {"schema": 1, "device": "", "ranks": [1], "world": 2, "dtypes": {"layers.0": "bf16"}}


def test_a_policy_survives_its_file(tmp_path: Path) -> None:
    policy = Policy({"layers.0": "bf16", "layers.3": "fp32"}, ranks=(1, 3), world=4)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(policy.as_json() | {"step_s": 1.5, "groups": []}))
    assert read_policy(path) == policy


def test_ranks_and_devices_choose_who_has_it() -> None:
    by_rank, by_device = Policy({}, ranks=(1,), world=2), Policy({}, device="L4")
    assert [by_rank.has(rank, "any") for rank in (0, 1)] == [False, True]
    assert [by_device.has(0, device) for device in ("L4", "A100")] == [True, False]
    assert by_device.mismatch(7) == ""
    assert by_rank.mismatch(2) == ""
    assert "a job of 2, and this job has 3 ranks" in by_rank.mismatch(3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, '"schema": 1'),
        ({"dtypes": ["layers.0"]}, '"dtypes"'),
        ({"dtypes": {"layers.0": "fp16"}}, "the dtype of layer \"layers.0\" must be one of bf16, fp32, not 'fp16'"),
        ({"dtypes": {"layers.0": 1}}, "must be one of bf16, fp32, not 1"),
        ({"device": 3}, '"device" must be a string'),
        ({"ranks": "1"}, '"ranks" must be a list'),
        ({"ranks": [True]}, '"ranks" must be a list'),
        ({"ranks": [-1]}, '"ranks" must be a list'),
        ({"ranks": [2]}, 'rank 2 of "ranks" is not one of the 2 ranks'),
        ({"world": 0}, "rank 1 of"),
    ],
)
def test_other_documents_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        policy_of(PLAN | change, "plan.json")
    assert message in str(caught.value)
    assert str(caught.value).startswith("plan.json: ")


@pytest.mark.parametrize("text", ["", "[", "[" * 100_000, "7"])
def test_files_of_other_content_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"plan\.json"):
        read_policy(path)
    with pytest.raises(ConfigError, match=r"none\.json"):
        read_policy(tmp_path / "none.json")
