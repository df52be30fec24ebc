"""Every option exists once: the JSON, the flags, the JSON Schema and the tables of the docs say the same."""

from __future__ import annotations

import argparse
import json
import math
import re

import pytest

from megatron_unickpt.framework.flags import (
    FLAG_ONLY,
    FLAGS,
    SCRIPT_OPTIONS,
    ScriptOptions,
    add_flags,
    options_of,
    reason_without_flag,
)
from tests.support.repository import REPO
from unickpt.base.errors import ConfigError
from unickpt.base.options.declared import UNLIMITED, Option
from unickpt.base.options.flags import help_of
from unickpt.base.options.job import Options, declared
from unickpt.base.options.json_section import from_json
from unickpt.checkpoint.save.requests import SaveOptions, save_options

PAGE = (REPO / "docs" / "reference" / "options.md").read_text()
ALL = [*declared(), *SCRIPT_OPTIONS]
SCHEMA = json.loads((REPO / "configs" / "unickpt.schema.json").read_text())["properties"]["unickpt"]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_flags(made)
    return made


def row_of(option: Option) -> str:
    """Return the cells ``| key | flag |`` of an option in docs/reference/options.md, then type, default, unit and meaning."""
    unit = re.escape(option.unit or "-")
    (row,) = re.findall(rf"^(\|.*\| {unit} \| {re.escape(option.help)} \|)$", PAGE, re.M)
    return str(row)


@pytest.mark.parametrize("option", ALL, ids=lambda option: f"{option.section}.{option.key}")
def test_both_adapters_have_every_option_or_the_docs_give_a_reason(option: Option) -> None:
    properties = (SCHEMA["properties"][option.section] if option.section else SCHEMA)["properties"]
    if option.path in FLAG_ONLY:
        assert option.key not in properties
        assert row_of(option).startswith(f"| none: {FLAG_ONLY[option.path]} |")
    else:
        about = properties[option.key]
        assert about["description"] == option.text
        assert about.get("default", UNLIMITED) == (option.default.split(",") if option.several else option.default)
        assert row_of(option).startswith(f"| `{option.key}` |")
    actions = {flag: action for action in parser()._actions for flag in action.option_strings}
    flags = [flag for flag in actions if FLAGS.get(flag) == option]
    if reason := reason_without_flag(option):
        assert flags == []
        assert f"| none: {reason} |" in row_of(option)
    else:
        assert actions[flags[0]].default == option.default
        assert actions[flags[0]].help == help_of(option)
        assert re.search(rf"\| `{flags[0]}[` ]", row_of(option))
    assert not (option.path in FLAG_ONLY and reason)


def test_the_defaults_are_the_same_everywhere() -> None:
    assert from_json({}) == from_json({"timing": {}}) == Options()
    assert options_of(parser().parse_args([])) == options_of(None) == ScriptOptions()
    assert save_options(Options(), asynchronous=False) == SaveOptions()


def test_a_flag_has_the_meaning_of_its_key() -> None:
    words = "--unickpt-no-direct-io --unickpt-keep-last 3 --unickpt-staging-gigabytes 2 --unickpt-no-fall-back"
    words += " --unickpt-timing --unickpt-timing-no-watch --unickpt-timing-records 9 --unickpt-verify off"
    words += " --unickpt-witness-every 50 --unickpt-witness-checks rest nonfinite --unickpt-witness-act"
    section = {
        "direct_io": False, "keep_last": 3, "staging_gigabytes": 2, "fall_back": False, "verify": "off",
        "timing": {"enabled": True, "watch": False, "records": 9},
        "witness": {"every": 50, "checks": ["rest", "nonfinite"], "act": True},
    }  # fmt: skip
    found, expected = options_of(parser().parse_args(words.split())), from_json(section)
    assert {name: getattr(found, name) for name in Options.__slots__} == {
        name: getattr(expected, name) for name in Options.__slots__
    }


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"keep_lost": 3}, 'did you mean "unickpt.keep_last"'),
        ({"timing": {"record": 3}}, 'did you mean "unickpt.timing.records"'),
        ({"timming": {}}, 'did you mean "unickpt.timing"'),
        ({"sync_save": True}, 'did you mean "unickpt.async_save"'),
        ({"keep_last": -1}, '"unickpt.keep_last" must be at least 0'),
        ({"timing": {"metrics_port": 65536}}, '"unickpt.timing.metrics_port" must be from 0 to 65535'),
        ({"timing": {"records": 0}}, '"unickpt.timing.records" must be at least 1'),
        ({"grace_seconds": 0}, "must be a positive number"),
        ({"grace_seconds": math.nan}, "must be a positive number"),
        ({"on_busy": "skips"}, 'did you mean "skip"'),
        ({"enabled": 1}, "must be true or false"),
        ({"witness": {"checks": [1]}}, '"unickpt.witness.checks" must be a list of strings'),
        ({"witness": {"every": -1}}, '"unickpt.witness.every" must be at least 0'),
        ([], "must be an object"),
    ],
    ids=str,
)
def test_a_mistake_in_the_json_is_named(section: object, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        from_json(section)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--unickpt-keep-last -1", "argument --unickpt-keep-last: --unickpt-keep-last must be at least 0, not -1"),
        ("--unickpt-keep-last many", "argument --unickpt-keep-last: invalid int value: 'many'"),
        ("--unickpt-grace-seconds 0", "must be a positive number, not 0.0"),
        ("--unickpt-on-busy skips", "invalid choice: 'skips'"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(words.split())
    assert said in capsys.readouterr().err


def test_an_unknown_flag_names_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--unickpt-keep-lst=3", "--unickpt-timing"])
    assert "unrecognized arguments: --unickpt-keep-lst=3; did you mean --unickpt-keep-last?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parser().parse_args(["--other"])
    assert "did you mean" not in capsys.readouterr().err
