"""The dialects that come with the package: ``configs/dialects`` of the project."""

from __future__ import annotations

import functools
from importlib import resources
from pathlib import Path

from unickpt.errors import LanguageError
from unickpt.language.dialect import Dialect, parse


@functools.cache
def dialects() -> tuple[Dialect, ...]:
    """All of them, by the names of their files."""
    package = resources.files("unickpt") / "dialects"
    folder = package if package.is_dir() else Path(__file__).resolve().parents[2] / "configs" / "dialects"  # from a source tree
    files = sorted((each for each in folder.iterdir() if each.name.endswith(".toml")), key=lambda each: each.name)
    return tuple(parse(each.read_text(encoding="utf-8"), where=each.name) for each in files)


def dialect(name: str, family: str, *, other: str = "huggingface") -> Dialect:
    """That of a framework for a family of models.

    Raises:
        LanguageError: there is none; names those that there are.
    """
    for each in dialects():
        if (each.name, each.other) == (name, other) and family in each.families:
            return each
    known = sorted({family for each in dialects() if (each.name, each.other) == (name, other) for family in each.families})
    raise LanguageError(
        f"no dialect {name!r} of {other!r} models is known for the family {family!r}; there are {', '.join(known) or 'none'}. "
        "docs/language.md tells how to write one"
    )
