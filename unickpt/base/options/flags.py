"""Options of a job from the command line of a program that parses its arguments with ``argparse``."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from unickpt.base.errors import ConfigError
from unickpt.base.options.declared import KEY, Option
from unickpt.base.options.job import SECTIONS, Options

T = TypeVar("T", bound=Options)


def flag_of(option: Option) -> str:
    """Return the flag of an option, which sets the opposite of the default of a bool."""
    words = [KEY, option.section, "no" if option.default is True else "", "" if option.key == "enabled" else option.key]
    return "--" + "-".join(filter(None, words)).replace("_", "-")


def attribute_of(option: Option) -> str:
    """Return the attribute of the parsed arguments that has the value of an option."""
    return "_".join(filter(None, [KEY, option.section, "" if option.key == "enabled" else option.key]))


def help_of(option: Option) -> str:
    """Return the help sentence of a flag, which disables an option that is on by default."""
    return f"disable: {option.text}" if option.default is True else option.text


def add_flags(group: Any, flags: Mapping[str, Option]) -> None:
    """Add flags to an ``argparse.ArgumentParser``, or to what its ``add_argument_group`` returns. ``flags``: option by flag."""
    for flag, option in flags.items():
        how: dict[str, Any] = {"type": _parsed(option, flag), "metavar": option.kind.__name__.upper()}
        if option.kind is bool:
            how = {"action": "store_false" if option.default else "store_true"}
        elif option.choices:
            how = {"choices": option.choices}
        elif option.several:
            how |= {"nargs": "+", "metavar": "NAME"}
        words = help_of(option).replace("%", "%%")
        group.add_argument(flag, dest=attribute_of(option), default=option.default, help=words, **how)


def name_the_nearest(parser: argparse.ArgumentParser, flags: Mapping[str, Option]) -> None:
    """Let the parser's error about an unknown flag of this package name the known flag that is most like it."""
    error = parser.error

    def hinted(message: str) -> NoReturn:
        given = [word.partition("=")[0] for word in message.split() if word.startswith(f"--{KEY}")]
        near = [difflib.get_close_matches(flag, flags, n=1, cutoff=0.0)[0] for flag in given if flag not in flags]
        error(f"{message}; did you mean {', '.join(near)}?" if near else message)

    parser.error = hinted  # type: ignore[method-assign]


def _parsed(option: Option, flag: str) -> Any:
    def parse(text: str) -> Any:
        try:
            return option.checked(option.kind(text), flag)
        except ConfigError as err:
            raise argparse.ArgumentTypeError(str(err)) from None

    parse.__name__ = option.kind.__name__  # argparse shows this name in its error message
    return parse


def from_flags(kind: type[T], arguments: Any, flags: Mapping[str, Option]) -> T:
    """Return the options of a parsed command line: ``Options``, or a class that adds options.

    Those without a flag have their defaults. So have all without a namespace of ``argparse``.
    """
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for option in flags.values():
        value = getattr(arguments, attribute_of(option), option.default)
        values[option.section][option.key] = ",".join(value) if option.several and not isinstance(value, str) else value
    return kind(**values.pop(""), **{name: SECTIONS[name](**found) for name, found in values.items()})
