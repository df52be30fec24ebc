"""The ``unickpt`` key of a DeepSpeed configuration.

An invalid value makes ``deepspeed.initialize`` raise. No option is silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unickpt.base.errors import ConfigError
from unickpt.base.options.job import SECTIONS, Options
from unickpt.base.options.json_section import from_json
from unickpt.base.switch import asks, section_of


def read_options(config: Mapping[str, Any]) -> Options | None:
    """Return the options of a whole DeepSpeed configuration, or None if neither it nor the environment asks for unickpt.

    Raises:
        ConfigError: an unknown option (with the nearest valid one), or a value of the wrong type or out of bounds.
    """
    return from_json(section_of(config)) if asks(config) else None


def valid_options(config: Mapping[str, Any] | None) -> Options | None:
    """Return the options of a configuration; None without one, or if a value is invalid, which the engine then says."""
    try:
        return None if config is None else read_options(config)
    except ConfigError:
        return None


def unused_options(config: Mapping[str, Any]) -> list[str]:
    """Return the options of checkpoints that a configuration sets without ``"enabled"``, so that they have no effect.

    With ``"enabled": false`` the list is empty: the user has switched checkpoints off. Sections such as ``"timing"``, and
    ``"precision"``, work without it.
    """
    section = section_of(config)
    return [] if "enabled" in section else [key for key in section if key not in (*SECTIONS, "precision")]
