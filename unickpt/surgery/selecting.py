"""Tensors by a pattern: a name of the language with holes, and a state.

    model.layers.{layer}.mlp.*           all states of these parameters
    *:exp_avg                            the first moments of all
    lm_head.weight:master                one tensor

``*`` stands for ``{*any}``: one character or more. What is behind the last colon is a state, which may have stars, too; of a
name with a colon, write ``name:*``. A tied parameter is selected by any of its names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from unickpt.errors import LanguageError, MismatchError
from unickpt.language.names import Template
from unickpt.surgery.table import Entry, Table, some_of

_STARS = 8


def template_of(text: str, *, stars: int = _STARS) -> Template:
    """A name with holes, in which ``*`` is short for ``{*any}``. Raises LanguageError.

    Args:
        text: as the user wrote it.
        stars: holes of any text, at most.
    """
    parts, depth, count = [], 0, 0
    for character in text:
        depth += (character == "{") - (character == "}")
        if character == "*" and not depth:
            parts.append(f"{{*any{count or ''}}}")
            count += 1
        else:
            parts.append(character)
    return Template.parse("".join(parts), texts=stars)


@dataclass(frozen=True, slots=True)
class Selection:
    """Attributes: text, as it was written; name; state, None for all of them."""

    text: str
    name: Template
    state: Template | None

    @classmethod
    def parse(cls, text: str) -> Selection:
        """Read one. Raises LanguageError."""
        name, colon, state = text.rpartition(":")
        if not colon:
            name, state = text, "*"
        if not name or not state:
            raise LanguageError(f"{text!r}: is no pattern; NAME, or NAME:STATE, such as *:exp_avg")
        return cls(text, template_of(name), None if state == "*" else template_of(state))

    def names(self, names: Iterable[str]) -> bool:
        """Whether it knows one of these names."""
        return any(self.name.match(name) is not None for name in names)

    def states(self, state: str) -> bool:
        """Whether it knows a state."""
        return self.state is None or self.state.match(state) is not None

    def among(self, table: Table) -> list[Entry]:
        """The tensors of a table that it selects.

        Raises:
            MismatchError: none.
        """
        names = table.names_of()
        found = [entry for entry in table.tensors() if self.states(entry.info.state) and self.names(names[entry.info.name])]
        if not found:
            raise nothing(self.text, table, None if self.state is None or not any(map(self.names, names.values())) else "state")
        return found


def nothing(text: str, table: Table, kind: str | None = None) -> MismatchError:
    """The error of a pattern that no tensor has."""
    what = sorted({entry.info.state for entry in table.tensors()} if kind == "state" else table.names_of())
    return MismatchError(f"{table.where}: {text!r} is the pattern of no tensor; {kind or 'name'}s there are {some_of(what, 4)}")
