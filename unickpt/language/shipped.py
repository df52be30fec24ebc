"""The dialects that come with the package: ``configs/dialects`` of the project."""

from __future__ import annotations

import functools
from importlib import resources
from pathlib import Path

from unickpt.errors import LanguageError
from unickpt.language.dialect import MAX_BYTES, Dialect, parse


@functools.cache
def dialects() -> tuple[Dialect, ...]:
    """All of them, by the names of their files."""
    package = resources.files("unickpt") / "dialects"
    folder = package if package.is_dir() else Path(__file__).resolve().parents[2] / "configs" / "dialects"  # from a source tree
    files = sorted((each for each in folder.iterdir() if each.name.endswith(".toml")), key=lambda each: each.name)
    return tuple(parse(each.read_text(encoding="utf-8"), where=each.name) for each in files)


def choose(name: str, other: str, chosen: str, family: str, *, where: str, option: str) -> Dialect:
    """The dialect by which a checkpoint is read.

    Args:
        name, other: of the two sides, as a dialect has them.
        chosen: by the user: a family of models, or the path of a dialect's file; '' if nothing was.
        family: of the model, as it or the checkpoint tells; never a path.
        where: the checkpoint is, for messages.
        option: by which a user can choose, for messages.

    Raises:
        LanguageError: nothing is chosen, there is no such dialect, or the file is none.
    """
    if chosen.endswith(".toml"):
        try:
            with Path(chosen).open("rb") as file:
                return parse(file.read(MAX_BYTES + 1).decode(), where=chosen)
        except (OSError, UnicodeDecodeError) as err:
            raise LanguageError(f"{option}: {chosen} cannot be read ({err})") from err
    if not (chosen or family):
        raise LanguageError(
            f"{where} has names of another dialect ({name} and {other}), and nothing tells of which family its model is; "
            f'{option} can say it: a family such as "llama", or the path of a dialect\'s file'
        )
    return dialect(name, chosen or family, other=other)


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
