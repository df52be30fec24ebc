"""The choice of a scheme by the job itself, on jobs whose answer is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.training.compression.advised_jobs import DEAR, FREE, MEGABYTE, RANKS, STEPS, job
from unickpt.base.errors import ConfigError, FormatError
from unickpt.base.options.job import AUTO
from unickpt.base.options.json_section import from_json
from unickpt.training.compression.automatic import CONSIDERED, Choice, chosen, timed_candidates
from unickpt.training.compression.settings import NONE, Compression

SETTINGS = Compression(least_elements=64)


def test_hidden_communication_is_not_compressed() -> None:
    choice = chosen(job([3, 3, 3], after_ms=20), {"sign": FREE}, SETTINGS, step=STEPS, world=RANKS)
    assert choice.settings.scheme == NONE
    assert str(choice).startswith("compression: none: communication costs 0.0% of a step")


def test_the_shortest_step_wins_and_small_reductions_stay() -> None:
    trace = job([40, 40, 40], sizes=[MEGABYTE, MEGABYTE, 64])
    choice = chosen(trace, {"powersgd": DEAR, "sign": FREE}, SETTINGS, step=STEPS, world=RANKS)
    assert choice.settings == replace(SETTINGS, scheme="sign")
    assert "2 of 3 reductions" in choice.reason


def test_a_code_that_takes_longer_than_the_bytes_is_not_chosen() -> None:
    assert chosen(job([8, 8, 8]), {"powersgd": DEAR}, SETTINGS, step=STEPS, world=RANKS).settings.scheme == NONE


def test_records_of_some_ranks_are_no_answer() -> None:
    with pytest.raises(FormatError, match="4 of 8 ranks"):
        chosen(job([8]), {"sign": FREE}, SETTINGS, step=STEPS, world=2 * RANKS)


def test_a_choice_returns_from_a_checkpoint() -> None:
    choice = Choice(replace(SETTINGS, scheme="int8"), 20, "it pays")
    assert Choice.from_json(choice.as_json()) == choice
    for damaged in (None, {}, {**choice.as_json(), "settings": {"scheme": "zip"}}):
        with pytest.raises(FormatError):
            Choice.from_json(damaged)


def test_the_code_of_every_scheme_is_timed() -> None:
    found = timed_candidates(SETTINGS, [(64, 32), (32,)], 4, "cpu")
    assert list(found) == list(CONSIDERED)
    assert found["bf16"].ratio == pytest.approx(0.5, abs=0.02)
    assert all(each.code_s > 0 and each.ratio < 1 for each in found.values())


def test_a_name_stands_for_the_section() -> None:
    assert from_json({"compression": AUTO}).compression.scheme == AUTO
    with pytest.raises(ConfigError, match="sign"):
        from_json({"compression": "sing"})
