"""The switch ``UNICKPT`` of the environment, and what it stands for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.needs import needs
from unickpt.base.errors import ConfigError
from unickpt.base.role import role
from unickpt.base.switch import Switch, asks, recognises, section_of, switch
from unickpt.diagnosis import parse_line
from unickpt.diagnosis.agent.telling import with_role


@pytest.mark.parametrize(
    ("value", "expected", "saves"),
    [("", Switch.UNSET, False), ("1", Switch.ON, True), ("True", Switch.ON, True), (" save ", Switch.SAVE, True),
     ("load", Switch.LOAD, False), ("off", Switch.OFF, False), ("0", Switch.OFF, False)],
)  # fmt: skip
def test_values(value: str, expected: Switch, saves: bool) -> None:
    found = switch({"UNICKPT": value})
    assert (found, found.saves) == (expected, saves)


def test_another_value_is_an_error_that_lists_the_values() -> None:
    with pytest.raises(ConfigError, match=r"UNICKPT='always' in the environment: expected one of 1, save, load, off"):
        switch({"UNICKPT": "always"})


def test_a_configuration_counts_more_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    off = {"unickpt": {"enabled": False}}
    assert (section_of({}), asks({}), section_of(off)) == (None, False, off["unickpt"])
    monkeypatch.setenv("UNICKPT", "1")
    assert (section_of({})["enabled"], asks({}), section_of(off)) == (True, True, off["unickpt"])


def test_loads_recognise_unickpt_checkpoints_unless_a_job_switches_unickpt_off(monkeypatch: pytest.MonkeyPatch) -> None:
    off, timed = {"unickpt": {"enabled": False}}, {"unickpt": {"timing": {"enabled": True}}}
    assert [recognises(config) for config in ({}, timed, off)] == [True, True, False]
    monkeypatch.setenv("UNICKPT", "off")
    assert not recognises({})


def test_timing_needs_no_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    timed, untimed = {"timing": {"enabled": True}}, {"unickpt": {"timing": {"enabled": False}}}
    monkeypatch.setenv("UNICKPT_TIMING", "1")
    assert (section_of({}), asks({}), recognises({})) == (timed, True, True)
    assert section_of({"unickpt": {"enabled": False}}) == {"enabled": False, **timed}
    assert section_of(untimed) == untimed["unickpt"], "the configuration counts more"
    assert section_of({"unickpt": True}) is True, "which the options refuse"
    monkeypatch.setenv("UNICKPT", "off")
    assert (section_of({}), asks({})) == (None, False)
    monkeypatch.setenv("UNICKPT", "1")
    assert section_of({}) == {"enabled": True, **timed}
    monkeypatch.setenv("UNICKPT_TIMING", "0")
    assert section_of({}) == {"enabled": True}
    monkeypatch.setenv("UNICKPT_TIMING", "all")
    with pytest.raises(ConfigError, match="UNICKPT_TIMING='all' in the environment: expected 1 or 0"):
        section_of({})


@needs("deepspeed")
def test_a_deepspeed_job_without_the_key_has_the_options_of_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_unickpt.batch.config import read_options

    assert read_options({}) is None
    monkeypatch.setenv("UNICKPT", "save")
    monkeypatch.setenv("UNICKPT_TIMING", "1")
    options = read_options({})
    assert options is not None
    assert (options.enabled, options.timing.enabled) == (True, True)
    assert not read_options({"unickpt": {"enabled": False}}).enabled  # type: ignore[union-attr]
    monkeypatch.delenv("UNICKPT")
    options = read_options({})
    assert options is not None
    assert (options.enabled, options.timing.enabled) == (False, True)


_LIBRARY = """
import torch.distributed as dist
from megatron.core import parallel_state
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
from unickpt.diagnosis import session
print(session.folder())
"""


@needs("megatron")
def test_a_library_on_megatron_core_has_its_collectives_timed() -> None:
    environment = {**os.environ, "UNICKPT_TIMING": "1", "UNICKPT_ROLE": "critic"}
    ran = subprocess.run([sys.executable, "-c", _LIBRARY], env=environment, capture_output=True, text=True, timeout=200)
    assert "-critic" in ran.stdout, ran.stderr


def test_the_role_is_what_the_environment_says_or_the_class_of_the_ray_actor() -> None:
    assert role({"UNICKPT_ROLE": "reward"}, "ray::CriticWorker.step") == "reward"
    assert [role({}, title) for title in ("ray::CriticWorker.step", "ray::CriticWorker", "ray::Critic(pid=1)", "python")] == [
        "CriticWorker",
        "CriticWorker",
        "Critic",
        "",
    ]


def test_lines_of_an_agent_name_the_role() -> None:
    assert with_role("unickpt: rank 2 waits", "critic") == "unickpt (critic): rank 2 waits"
    line = with_role("unickpt HANG rank=2", role({"UNICKPT_ROLE": "two words"}))
    assert (line, parse_line(line).role) == ("unickpt HANG rank=2 role=two-words", "two-words")
    assert with_role("unickpt: rank 2 waits", "") == "unickpt: rank 2 waits"
