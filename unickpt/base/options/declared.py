"""What an option is: a field of a dataclass whose metadata is the whole declaration.

The validation of JSON and flags, the JSON Schema and the tables of the documentation come from there.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from unickpt.base.errors import ConfigError

KEY = "unickpt"
UNLIMITED = math.inf

_NAMED: Mapping[type[Any], str] = {bool: "true or false", str: "a string", float: "a number", int: "a whole number"}


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of one option.

    Attributes:
        key: name in the JSON section, and of the field.
        section: JSON section inside ``unickpt``; '' for ``unickpt`` itself.
        default: default value, whose type (bool, int, float or str) is the type of the option. ``UNLIMITED``: no limit.
        help: one sentence without a full stop.
        unit: unit of a number, or ''.
        choices: accepted values; empty for any.
        least, most: bounds of a whole number. A float must be positive.
        several: the value is a list with commas. JSON has a list of strings, and a flag takes its words one by one.
    """

    key: str
    section: str
    default: Any
    help: str
    unit: str
    choices: tuple[str, ...]
    least: int
    most: int | None
    several: bool

    @property
    def kind(self) -> type[Any]:
        return type(self.default)

    @property
    def path(self) -> str:
        """Section and key, as in ``timing.records``."""
        return f"{self.section}.{self.key}" if self.section else self.key

    @property
    def text(self) -> str:
        """The help sentence with the unit."""
        return f"{self.help} ({self.unit})" if self.unit else self.help

    def checked(self, value: Any, where: str) -> Any:
        """Validate a value from JSON or from a command line, and return it. A whole number becomes a float if one is expected.

        Raises:
            ConfigError: the type is wrong, or the value is out of bounds or not one of ``choices``. It begins with ``where``.
        """
        if self.several and isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value):
            value = ",".join(value)
        if self.kind is float and type(value) is int:
            value = float(value)
        if type(value) is not self.kind:
            named = "a list of strings" if self.several else _NAMED[self.kind]
            raise ConfigError(f"{where} must be {named}, not {value!r} ({type(value).__name__})")
        if self.kind is float and not value > 0:
            raise ConfigError(f"{where} must be a positive number, not {value!r}")
        if self.kind is int and not self.least <= value <= (value if self.most is None else self.most):
            bounds = f"at least {self.least}" if self.most is None else f"from {self.least} to {self.most}"
            raise ConfigError(f"{where} must be {bounds}, not {value!r}")
        if self.choices and value not in self.choices:
            near = difflib.get_close_matches(str(value), self.choices, n=1, cutoff=0.0)
            raise ConfigError(f'{where} must be one of {", ".join(self.choices)}, not {value!r}; did you mean "{near[0]}"?')
        return value


def option(
    default: Any,
    help: str,
    *,
    unit: str = "",
    choices: tuple[str, ...] = (),
    least: int = 0,
    most: int | None = None,
    several: bool = False,
) -> Any:
    """Return the dataclass field of an option (``Option`` has the arguments)."""
    declared = {"help": help, "unit": unit, "choices": choices, "least": least, "most": most, "several": several}
    return field(default=default, metadata=declared)


def declarations(kind: type[Any], section: str = "") -> Iterator[Option]:
    """Yield the declarations of a dataclass in order. ``section``: of all of them."""
    for item in fields(kind):
        if item.metadata:
            yield Option(key=item.name, section=section, default=item.default, **item.metadata)


def settle(options: Any) -> None:
    """Validate the options of a dataclass that a program has made, in its ``__post_init__``. Paths become strings.

    Raises:
        ConfigError: as for ``Option.checked``. It names class and field.
    """
    for each in declarations(type(options)):
        value = getattr(options, each.key)
        plain = os.fspath(value) if isinstance(value, os.PathLike) else value
        object.__setattr__(options, each.key, each.checked(plain, f"{type(options).__name__}: {each.key}"))


def unknown(key: Any, names: Sequence[str], path: str) -> ConfigError:
    """Return the error of a key that is not an option. It names the nearest valid one. Both begin with ``path``."""
    near = difflib.get_close_matches(str(key), names, n=1, cutoff=0.0)
    return ConfigError(f'"{path}{key}" is not an option; did you mean "{path}{near[0]}"? Known: {", ".join(names)}')
