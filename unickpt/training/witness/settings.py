"""What a job asks of the witness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from unickpt.base.errors import ConfigError
from unickpt.base.options.declared import unknown
from unickpt.base.options.job import WitnessOptions

REST = "rest"
REPLICAS = "replicas"
NONFINITE = "nonfinite"
OUTLIER = "outlier"
BUDDY = "buddy"
SELF = "self"
UPDATE = "update"
CHECKS = (REST, REPLICAS, NONFINITE, OUTLIER, BUDDY, SELF, UPDATE)
DEFAULT = (REST, REPLICAS, NONFINITE)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the witness. They are equal on all ranks.

    Attributes:
        every: steps from one check to the next. ``nonfinite`` and ``outlier`` look at every step.
        checks: some of ``CHECKS``.
        act: go back to a checkpoint that passed, and under ``--rdzv-backend unickpt`` take a host out.
        batches: folder for micro-batches with such values; '': that of the checkpoints, or of the round.
    """

    every: int = 50
    checks: tuple[str, ...] = DEFAULT
    act: bool = False
    batches: str = ""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: a value is unknown, has a wrong type, or is out of bounds.
        """
        if type(self.every) is not int or self.every < 1:
            raise ConfigError(f'"witness.every" must be a whole number of steps, at least 1, not {self.every!r}')
        if not isinstance(self.checks, tuple) or not self.checks:
            raise ConfigError(f'"witness.checks" must be a list of checks, some of {", ".join(CHECKS)}, not {self.checks!r}')
        for check in self.checks:
            if check not in CHECKS:
                raise ConfigError(f'"witness.checks": there is no check {check!r}; there are {", ".join(CHECKS)}')
        if not isinstance(self.batches, str):
            raise ConfigError(f'"witness.batches" must be the name of a folder, not {self.batches!r}')
        if type(self.act) is not bool:
            raise ConfigError(f'"witness.act" must be true or false, not {self.act!r}')

    def as_json(self) -> dict[str, Any]:
        """Return the settings as JSON types."""
        return asdict(self) | {"checks": list(self.checks)}


def settings_from(options: WitnessOptions) -> Settings | None:
    """Return the settings of a job's options; None: no witness.

    Raises:
        ConfigError: there is no such check.
    """
    checks = tuple(filter(None, options.checks.split(",")))
    return Settings(options.every, checks, options.act, options.batches) if options.every else None


def settings_of(section: Any) -> Settings | None:
    """Return the settings of a JSON value: an object such as ``{"every": 50}``. None, which is the default: no witness.

    Raises:
        ConfigError: it is no such object, or a value is wrong.
    """
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise ConfigError(f'"witness" must be an object such as {{"every": 50}}, not {section!r}')
    names = tuple(Settings.__dataclass_fields__)
    for key in section:
        if key not in names:
            raise unknown(key, names, "witness.")
    values = dict(section)
    if isinstance(values.get("checks"), list):
        values["checks"] = tuple(values["checks"])
    return Settings(**values)
