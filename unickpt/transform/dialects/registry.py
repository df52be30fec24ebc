"""Dialects of the package (``configs/dialects``), and the choice of one."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

from unickpt.base.errors import LanguageError
from unickpt.base.installation import shipped_file
from unickpt.transform.dialects.dialect import MAX_BYTES, Dialect, parse


@functools.cache
def dialects() -> tuple[Dialect, ...]:
    """Return all dialects of the package, sorted by file name."""
    files = sorted(each for each in shipped_file("configs/dialects").iterdir() if each.suffix == ".toml")
    return tuple(parse(each.read_text(encoding="utf-8"), where=each.name) for each in files)


def is_unread(name: str, tensor: str) -> bool:
    """Whether no model of a dialect reads a tensor.

    Args:
        name: name of the dialect.
        tensor: name of the tensor.
    """
    templates = (template for each in dialects() if each.name == name for template in each.unread)
    return any(template.match(tensor) is not None for template in templates)


def growth_of(family: str) -> Dialect:
    """Return the dialect with the growth rules of a model family, with the tensors of the files that it includes.

    Raises:
        LanguageError: there is none; the message lists the known families.
    """
    files = {each.where: each.growth for each in dialects() if each.growth is not None}
    for each in dialects():
        if each.growth is not None and family in each.families:
            more = [flow for name in each.growth.include if (other := files.get(name)) is not None for flow in other.flows]
            return replace(each, growth=replace(each.growth, flows=(*each.growth.flows, *more)))
    known = sorted(
        {name for each in dialects() if each.growth is not None and not each.growth.refuse for name in each.families}
    )
    raise LanguageError(
        f"no growth rules for the family {family!r}; known are {', '.join(known)}. docs/guides/growing.md describes how to "
        "add one"
    )


def choose(name: str, other: str, chosen: str, family: str, *, where: str, option: str = "", config: str = "") -> Dialect:
    """Return the dialect for reading a checkpoint.

    Args:
        name, other: names of both sides, as in a dialect.
        chosen: choice of the user: a model family, or the path of a dialect file; '' for none.
        family: family of the model or of the checkpoint; never used as a path.
        where: name of the checkpoint in messages.
        option: option for the choice, in messages; '' if there is none.
        config: option for the folder of a model, in messages; '' if there is none.

    Raises:
        LanguageError: the family is unknown, there is no such dialect, or the file is not a dialect.
    """
    if chosen.endswith(".toml"):
        try:
            with Path(chosen).open("rb") as file:
                return parse(file.read(MAX_BYTES + 1).decode(), where=chosen)
        except (OSError, UnicodeDecodeError) as err:
            raise LanguageError(f"{option}: cannot read {chosen} ({err})") from err
    if not (chosen or family):
        folder = f"{config} to the folder of a model of the same kind" if config else ""
        own = f'{option} to a family such as "llama" or to the path of a dialect file' if option else ""
        ways = ", or ".join(filter(None, (folder, own)))
        raise LanguageError(
            f"{where}: needs a translation between {name} and {other}, but the model family is unknown; set {ways}"
        )
    return dialect(name, chosen or family, other=other)


def dialect(name: str, family: str, *, other: str = "huggingface") -> Dialect:
    """Return the dialect of a framework for a model family.

    Raises:
        LanguageError: there is none; the message lists the known families.
    """
    for each in dialects():
        if (each.name, each.other) == (name, other) and family in each.families:
            return each
    known = sorted({family for each in dialects() if (each.name, each.other) == (name, other) for family in each.families})
    raise LanguageError(
        f"no dialect between {name!r} and {other!r} for the family {family!r}; known are {', '.join(known) or 'none'}. "
        "docs/reference/dialect-language.md describes how to write one"
    )
