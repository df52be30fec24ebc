"""Names of tensors with holes: ``model.layers.{layer}.mlp.experts.{expert}.w1.weight``.

A hole is a whole number, ``{layer}``, or one that is larger by so much, ``{layer + 2}``; or any text, ``{*rest}``. No hole is
what the facts of a model tell: ``{= layers + 2}``, which is a plain number as soon as they are known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from unickpt.errors import LanguageError
from unickpt.language.sizes import evaluate, names_in

_HOLE = re.compile(
    r"\{(?:=(?P<formula>[^{}]*)|(?P<star>\*?)(?P<name>[A-Za-z_][A-Za-z0-9_]*)\s*(?:(?P<sign>[+-])\s*(?P<more>[0-9]{1,9}))?)\}"
)
_LONGEST = 1000
_NUMBER = r"(0|[1-9][0-9]{0,8})"  # as frameworks write them: no zeros in front
_NOTHING = r"(?!)"
Values = Mapping[str, int | str]


@dataclass(frozen=True, slots=True)
class Hole:
    """Attributes: name; what the number in the name is larger by; whether any text may be there."""

    name: str
    more: int = 0
    text: bool = False

    def __str__(self) -> str:
        sign = "+" if self.more > 0 else "-"
        return f"{{{'*' if self.text else ''}{self.name}{f' {sign} {abs(self.more)}' if self.more else ''}}}"


@dataclass(frozen=True, slots=True)
class Told:
    """A number that facts of a model tell. Attributes: formula, of these facts."""

    formula: str

    def __str__(self) -> str:
        return f"{{= {self.formula}}}"


@dataclass(frozen=True, slots=True)
class Template:
    """A name with holes.

    Attributes:
        parts: texts, holes, and what facts tell, one after the other.
        pattern: that all names that it stands for match, and no others; none as long as facts are to tell something.
    """

    parts: tuple[str | Hole | Told, ...]
    pattern: re.Pattern[str]

    @classmethod
    def parse(cls, text: str, *, texts: int = 1) -> Template:
        """Read one.

        Args:
            text: a name with holes.
            texts: holes of any text that it may have; with more than one, which of them has what is a matter of luck.

        Raises:
            LanguageError: this is none.
        """
        if not text or len(text) > _LONGEST:
            raise LanguageError(f"a name of {len(text)} characters")
        parts: list[str | Hole | Told] = []
        at = 0
        for match in _HOLE.finditer(text):
            parts += [text[at : match.start()], _part(match, text)]
            at = match.end()
        parts.append(text[at:])
        if any(isinstance(part, str) and ("{" in part or "}" in part) for part in parts):
            raise LanguageError(f"{text!r}: a hole is {{name}}, {{name + 1}} or {{*name}}; what facts tell is {{= layers + 1}}")
        holes = [part for part in parts if isinstance(part, Hole)]
        if len({hole.name for hole in holes}) < len(holes):
            raise LanguageError(f"{text!r}: a hole is in it twice")
        if any(isinstance(part, str) and not re.search(r"[^0-9]", part) for part in parts[2:-1:2]):
            raise LanguageError(f"{text!r}: between two holes there has to be something that is no number")
        if sum(hole.text for hole in holes) > texts:
            raise LanguageError(f"{text!r}: only {'one hole' if texts == 1 else f'{texts} holes'} can be any text")
        return cls(tuple(part for part in parts if part), re.compile("".join(map(_pattern, parts))))

    def __str__(self) -> str:
        return "".join(map(str, self.parts))

    @property
    def holes(self) -> tuple[Hole, ...]:
        return tuple(part for part in self.parts if isinstance(part, Hole))

    @property
    def facts(self) -> set[str]:
        """Names of the facts that it wants."""
        return {name for part in self.parts if isinstance(part, Told) for name in names_in(part.formula)}

    def with_facts(self, facts: Mapping[str, int]) -> Template:
        """The same with the numbers that facts tell.

        Raises:
            LanguageError: one of them is not known, or the number is none.
        """
        parts = [str(evaluate(part.formula, facts)) if isinstance(part, Told) else str(part) for part in self.parts]
        return Template.parse("".join(parts), texts=max(sum(hole.text for hole in self.holes), 1))

    def match(self, name: str) -> dict[str, int | str] | None:
        """What is in the holes of a name, or None if it is not one of these."""
        found = self.pattern.fullmatch(name)
        if found is None:
            return None
        values: dict[str, int | str] = {}
        for hole, text in zip(self.holes, found.groups(), strict=True):
            values[hole.name] = text if hole.text else int(text) - hole.more
        return None if any(isinstance(value, int) and value < 0 for value in values.values()) else values

    def fill(self, values: Values) -> str:
        """The name with these values in its holes; they are all there.

        Raises:
            LanguageError: facts have to tell something of it first.
        """
        return "".join(_filled(part, values) for part in self.parts)


def _part(match: re.Match[str], text: str) -> Hole | Told:
    formula, star, name, sign, more = match.groups()
    if formula is not None:
        if not names_in(formula):
            raise LanguageError(f"{text!r}: {{={formula}}} is no formula of facts")
        return Told(formula.strip())
    if star and more:
        raise LanguageError(f"{text!r}: nothing can be added to the text {{*{name}}}")
    return Hole(name, int(f"{sign}{more}") if more else 0, bool(star))


def _pattern(part: str | Hole | Told) -> str:
    if isinstance(part, Told):
        return _NOTHING
    if isinstance(part, Hole):
        return "(.+)" if part.text else _NUMBER
    return re.escape(part)


def _filled(part: str | Hole | Told, values: Values) -> str:
    if isinstance(part, Told):
        raise LanguageError(f"{part}: nothing has told it yet")
    if isinstance(part, Hole):
        return str(values[part.name]) if part.text else str(int(values[part.name]) + part.more)
    return part
