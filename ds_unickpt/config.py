"""The ``unickpt`` key of the DeepSpeed JSON: read, checked, turned into a value.

A mistake here is an error at ``deepspeed.initialize``, never an option that is silently ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from unickpt.errors import ConfigError

KEY = "unickpt"


def _option(default: Any, doc: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"doc": doc, "choices": choices})


@dataclass(frozen=True, slots=True)
class Options:
    """What a user may write under ``"unickpt"``; defaults are what most runs want."""

    enabled: bool = _option(False, "switch universal checkpoints on")
    verify: str = _option("always", "check every fragment that is read against its checksum", ("always", "off"))
    restore_rng: bool = _option(True, "restore the python, numpy and torch generators of every rank")
    non_persistent_buffers: bool = _option(False, "also save and restore buffers registered with persistent=False")
    allow_pickle: bool = _option(False, "load opaque objects, which runs code from the checkpoint; only for your own ones")
    fall_back: bool = _option(True, "with no tag given, resume from the newest whole checkpoint if the latest is damaged")
    timeout_seconds: float = _option(1800.0, "how long a rank waits for the others before it gives up a save or load")


def read_options(config: Mapping[str, Any]) -> Options | None:
    """The options of a DeepSpeed config, or None if it has no such key.

    Args:
        config: the whole DeepSpeed configuration as a mapping.

    Raises:
        ConfigError: an unknown option (with the nearest valid one), or a value of the wrong type.
    """
    if KEY not in config:
        return None
    section = config[KEY]
    if not isinstance(section, Mapping):
        raise ConfigError(f'"{KEY}" must be an object such as {{"enabled": true}}, not {section!r}')
    known = {item.name: item for item in fields(Options)}
    values: dict[str, Any] = {}
    for name, value in section.items():
        if not isinstance(name, str) or name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)
            raise ConfigError(f'"{KEY}.{name}" is not an option; did you mean "{KEY}.{near[0]}"? Known: {", ".join(known)}')
        values[name] = _checked(name, value, type(known[name].default), known[name].metadata["choices"])
    return Options(**values)


def _checked(name: str, value: Any, kind: type[Any], choices: tuple[str, ...]) -> Any:
    where = f'"{KEY}.{name}"'
    if kind is float and type(value) in (int, float):
        if not value > 0:
            raise ConfigError(f"{where} must be a positive number, not {value!r}")
        return float(value)
    if type(value) is not kind:
        named = {bool: "true or false", str: "a string", float: "a number"}[kind]
        raise ConfigError(f"{where} must be {named}, not {value!r} ({type(value).__name__})")
    if choices and value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.0)
        raise ConfigError(f'{where} must be one of {", ".join(choices)}, not {value!r}; did you mean "{near[0]}"?')
    return value
