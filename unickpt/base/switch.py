"""The switch ``UNICKPT`` of the environment, for jobs to which no JSON and no flag comes through.

Libraries such as verl or OpenRLHF call Megatron's and DeepSpeed's functions with arguments of their own. Their workers inherit
the environment, in Ray actors, too. What a framework's configuration says of unickpt counts more.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum
from types import NoneType
from typing import Any

from unickpt.base.errors import ConfigError
from unickpt.base.options.declared import KEY

VARIABLE = "UNICKPT"
REASON = f"{VARIABLE} in the environment"


class Switch(str, Enum):
    """What jobs do whose configuration does not name unickpt. Under each value but the last they load unickpt checkpoints."""

    UNSET = ""
    ON = "1"  # save unickpt checkpoints, and show them to libraries as theirs
    SAVE = "save"  # save unickpt checkpoints
    LOAD = "load"  # show unickpt checkpoints to libraries as theirs
    OFF = "off"  # as unset, for a job whose environment has the switch; DeepSpeed itself then loads, too

    @property
    def saves(self) -> bool:
        """Whether the job saves unickpt checkpoints."""
        return self in (Switch.ON, Switch.SAVE)


TIMING = "UNICKPT_TIMING"
_MEANINGS = {"0": Switch.OFF, "false": Switch.OFF, "no": Switch.OFF, "true": Switch.ON, "yes": Switch.ON, "on": Switch.ON}


def switch(environment: Mapping[str, str] | None = None) -> Switch:
    """Return what the environment says (default: that of this process).

    Raises:
        ConfigError: another value.
    """
    given = (os.environ if environment is None else environment).get(VARIABLE, "").strip().lower()
    try:
        return _MEANINGS[given] if given in _MEANINGS else Switch(given)
    except ValueError:
        values = ", ".join(each.value for each in Switch if each.value)
        raise ConfigError(f"{VARIABLE}={given!r} in the environment: expected one of {values}") from None


def section_of(config: Mapping[str, Any]) -> Any:
    """Return the ``unickpt`` section of a framework's configuration. Without one, what the environment stands for; or None.

    Raises:
        ConfigError: the environment has another value of a variable.
    """
    section = {"enabled": True} if KEY not in config and switch().saves else config.get(KEY)
    if not times() or not isinstance(section, (Mapping, NoneType)) or "timing" in (section or {}):
        return section
    return {**(section or {}), "timing": {"enabled": True}}


def times() -> bool:
    """Return whether the environment asks for the timing of collectives. It needs no switch, but ``UNICKPT=off`` ends it.

    Raises:
        ConfigError: the environment has another value of a variable.
    """
    given = os.environ.get(TIMING, "").strip().lower()
    if (asked := _MEANINGS.get(given, Switch.ON if given == "1" else Switch.UNSET)) is Switch.UNSET and given:
        raise ConfigError(f"{TIMING}={given!r} in the environment: expected 1 or 0")
    return asked is Switch.ON and switch() is not Switch.OFF


def recognises(config: Mapping[str, Any]) -> bool:
    """Return whether a job that saves its framework's own checkpoints loads those of unickpt: nothing switches unickpt off.

    Raises:
        ConfigError: the environment has another value of the switch.
    """
    return "enabled" not in (config.get(KEY) or {}) and switch() is not Switch.OFF


def asks(config: Mapping[str, Any]) -> bool:
    """Return whether a framework's configuration or the environment asks for unickpt."""
    return KEY in config or switch().saves or times()
