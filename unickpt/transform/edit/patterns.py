"""Selection of tensors by a pattern: a name template, and a state.

    model.layers.{layer}.mlp.*           all states of the matching parameters
    *:exp_avg                            the first moments of all parameters
    lm_head.weight:master                one tensor

``*`` is short for ``{*any}``, one character or more. The text after the last colon is a state, which may contain ``*``. For a
name with a colon, write ``name:*``. Any name of a tied parameter selects it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from unickpt.base.errors import LanguageError, MismatchError
from unickpt.base.listing import some
from unickpt.transform.dialects.name_templates import Template
from unickpt.transform.edit.table import Table, TableEntry

_STARS = 8


def template_of(text: str, *, stars: int = _STARS) -> Template:
    """Parse a name template in which ``*`` is short for ``{*any}``. Raises LanguageError.

    Args:
        text: text of the user.
        stars: maximum number of holes for any text.
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
    """A pattern that selects tensors.

    Attributes:
        text: text of the user.
        name: template of the name.
        state: template of the state, or None for all states.
    """

    text: str
    name: Template
    state: Template | None

    @classmethod
    def parse(cls, text: str) -> Selection:
        """Parse a pattern. Raises LanguageError."""
        name, colon, state = text.rpartition(":")
        if not colon:
            name, state = text, "*"
        if not name or not state:
            raise LanguageError(f"{text!r}: is not a pattern; expected NAME or NAME:STATE, such as *:exp_avg")
        return cls(text, template_of(name), None if state == "*" else template_of(state))

    def names(self, names: Iterable[str]) -> bool:
        """Return whether the pattern matches one of these names."""
        return any(self.name.match(name) is not None for name in names)

    def states(self, state: str) -> bool:
        """Return whether the pattern matches a state."""
        return self.state is None or self.state.match(state) is not None

    def among(self, table: Table) -> list[TableEntry]:
        """Return the selected tensors of a table.

        Raises:
            MismatchError: the pattern selects nothing.
        """
        names = table.names_of()
        found = [entry for entry in table.tensors() if self.states(entry.info.state) and self.names(names[entry.info.name])]
        if not found:
            raise no_match(
                self.text, table, None if self.state is None or not any(map(self.names, names.values())) else "state"
            )
        return found


def no_match(text: str, table: Table, kind: str | None = None) -> MismatchError:
    """Return the error of a pattern that selects nothing."""
    what = sorted({entry.info.state for entry in table.tensors()} if kind == "state" else table.names_of())
    return MismatchError(f"{table.where}: {text!r} matches no tensor; the {kind or 'name'}s are {some(what, 4)}")
