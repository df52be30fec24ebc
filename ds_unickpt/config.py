"""The ``unickpt`` key of the DeepSpeed JSON: read, checked, turned into a value.

A mistake here is an error at ``deepspeed.initialize``, never an option that is silently ignored.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

from unickpt.errors import ConfigError
from unickpt.reading import VERIFY
from unickpt.retention import Retention
from unickpt.saves import ON_BUSY, SaveOptions
from unickpt.timing.options import TimingOptions

KEY = "unickpt"
T = TypeVar("T")


def _option(default: Any, doc: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"doc": doc, "choices": choices})


@dataclass(frozen=True, slots=True)
class Options:
    """What a user may write under ``"unickpt"``; defaults are what most runs want."""

    enabled: bool = _option(False, "switch universal checkpoints on")
    verify: str = _option(
        "always", "check what is read against its checksum; sampled: rarely what is wanted in part only", VERIFY
    )
    read_once_per_host: bool = _option(True, "what several ranks of a host need is read by one and handed over in memory")
    restore_rng: bool = _option(True, "restore the python, numpy and torch generators of every rank")
    non_persistent_buffers: bool = _option(False, "also save and restore buffers registered with persistent=False")
    allow_pickle: bool = _option(False, "load opaque objects, which runs code from the checkpoint; only for your own ones")
    fall_back: bool = _option(True, "with no tag given, resume from the newest whole checkpoint if the latest is damaged")
    async_save: bool = _option(False, "return from a save after one copy in host memory, and write in the background")
    on_busy: str = _option("wait", "a save that begins while the last one is still being written", ON_BUSY)
    staging_gigabytes: float = _option(math.inf, "host memory for that copy, per rank; what exceeds it is written at once")
    write_megabytes_per_second: float = _option(math.inf, "bandwidth of writing, per rank")
    direct_io: bool = _option(True, "write data past the page cache, where the file system takes it")
    keep_last: int = _option(0, "after a save, remove all but so many of the newest checkpoints in its folder; 0 keeps all")
    keep_every: int = _option(0, "of these, keep those whose step is a multiple of this")
    upload_to: str = _option("", "a URL (or path) where every checkpoint is copied to as well, behind training")
    grace_seconds: float = _option(25.0, "how long SIGTERM waits for a save that was begun")
    load_dialect: str = _option(
        "", "of a checkpoint of another framework, if its model does not tell: family, or file of a dialect"
    )
    timeout_seconds: float = _option(1800.0, "how long a rank waits for the others before it gives up a save or load")
    timing: TimingOptions = field(default=TimingOptions(), metadata={"doc": "of collectives", "choices": ()})


def save_options(options: Options) -> SaveOptions:
    """What the options say about saving."""
    staging, bandwidth = options.staging_gigabytes * 1e9, options.write_megabytes_per_second * 1e6
    return SaveOptions(
        asynchronous=options.async_save,
        on_busy=options.on_busy,
        staging_bytes=None if math.isinf(staging) else int(staging),
        bandwidth_bytes_per_s=None if math.isinf(bandwidth) else bandwidth,
        direct_io=options.direct_io,
        grace_s=options.grace_seconds,
        retention=Retention(options.keep_last, options.keep_every),
        upload_to=options.upload_to,
    )


def read_options(config: Mapping[str, Any]) -> Options | None:
    """The options of a DeepSpeed config, or None if it has no such key.

    Args:
        config: the whole DeepSpeed configuration as a mapping.

    Raises:
        ConfigError: an unknown option (with the nearest valid one), or a value of the wrong type.
    """
    if KEY not in config:
        return None
    return _section(Options, KEY, config[KEY])


def _section(kind: type[T], key: str, section: Any) -> T:
    """The options of one object in the configuration."""
    if not isinstance(section, Mapping):
        raise ConfigError(f'"{key}" must be an object such as {{"enabled": true}}, not {section!r}')
    known = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, value in section.items():
        if not isinstance(name, str) or name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)
            raise ConfigError(f'"{key}.{name}" is not an option; did you mean "{key}.{near[0]}"? Known: {", ".join(known)}')
        default = known[name].default
        if is_dataclass(default):
            values[name] = _section(type(default), f"{key}.{name}", value)
        else:
            values[name] = _checked(f'"{key}.{name}"', value, type(default), known[name].metadata["choices"])
    return kind(**values)


def _checked(where: str, value: Any, kind: type[Any], choices: tuple[str, ...]) -> Any:
    if kind is float and type(value) in (int, float):
        if not value > 0:
            raise ConfigError(f"{where} must be a positive number, not {value!r}")
        return float(value)
    if type(value) is not kind:
        named = {bool: "true or false", str: "a string", float: "a number", int: "a whole number"}[kind]
        raise ConfigError(f"{where} must be {named}, not {value!r} ({type(value).__name__})")
    if kind is int and value < 0:
        raise ConfigError(f"{where} must not be negative, not {value!r}")
    if choices and value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.0)
        raise ConfigError(f'{where} must be one of {", ".join(choices)}, not {value!r}; did you mean "{near[0]}"?')
    return value
