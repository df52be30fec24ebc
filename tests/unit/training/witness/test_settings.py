"""What a job may ask of the witness."""

from __future__ import annotations

from typing import Any

import pytest

from unickpt.base.errors import ConfigError
from unickpt.base.options.job import WitnessOptions
from unickpt.training.witness.settings import DEFAULT, Settings, settings_from, settings_of


def test_it_is_off_by_default() -> None:
    assert settings_of(None) is None
    assert settings_of({}) == Settings(50, DEFAULT, False)


def test_the_options_of_a_job_need_a_number_of_steps() -> None:
    assert settings_from(WitnessOptions()) is None
    assert settings_from(WitnessOptions(every=7)) == Settings(7, DEFAULT)
    assert settings_from(WitnessOptions(every=7, checks="rest,buddy")) == Settings(7, ("rest", "buddy"))
    with pytest.raises(ConfigError, match="there is no check 'rests'"):
        settings_from(WitnessOptions(every=7, checks="rests"))


def test_settings_survive_json() -> None:
    settings = Settings(every=7, checks=("rest",))
    assert settings_of(settings.as_json()) == settings


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (True, 'must be an object such as {"every": 50}, not True'),
        ({"evry": 3}, '"witness.evry" is not an option; did you mean "witness.every"?'),
        ({"every": 0}, "at least 1, not 0"),
        ({"every": 2.5}, "must be a whole number of steps"),
        ({"every": True}, "must be a whole number of steps"),
        ({"checks": []}, "must be a list of checks"),
        ({"checks": "rest"}, "must be a list of checks"),
        ({"batches": 3}, "must be the name of a folder"),
        ({"checks": ["rests"]}, "there is no check 'rests'"),
        ({"checks": [3]}, "there is no check 3"),
        ({"act": 1}, "must be true or false"),
    ],
)
def test_wrong_settings_are_refused(section: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings_of(section)
    assert message in str(refused.value)
