"""Templates of tensor names with holes: ``model.layers.{layer}.mlp.experts.{expert}.w1.weight``.

A hole is a whole number ``{layer}``, a number with an offset ``{layer + 2}``, or any text ``{*rest}``. ``{= layers + 2}`` is
not a hole but a formula of facts about the model, and becomes a plain number when the facts are known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from unickpt.base.errors import LanguageError
from unickpt.transform.dialects.sizes import evaluate, names_in

_HOLE = re.compile(
    r"\{(?:=(?P<formula>[^{}]*)|(?P<star>\*?)(?P<name>[A-Za-z_][A-Za-z0-9_]*)\s*(?:(?P<sign>[+-])\s*(?P<more>[0-9]{1,9}))?)\}"
)
_LONGEST = 1000
_NUMBER = r"(0|[1-9][0-9]{0,8})"  # without leading zeros
_NOTHING = r"(?!)"
Values = Mapping[str, int | str]


@dataclass(frozen=True, slots=True)
class Hole:
    """A hole.

    Attributes:
        name: name of the hole.
        more: offset of the number in the tensor name.
        text: whether any text matches, instead of a number.
    """

    name: str
    more: int = 0
    text: bool = False

    def __str__(self) -> str:
        sign = "+" if self.more > 0 else "-"
        return f"{{{'*' if self.text else ''}{self.name}{f' {sign} {abs(self.more)}' if self.more else ''}}}"


@dataclass(frozen=True, slots=True)
class FactNumber:
    """A number given by a formula of facts."""

    formula: str

    def __str__(self) -> str:
        return f"{{= {self.formula}}}"


@dataclass(frozen=True, slots=True)
class Template:
    """A name with holes.

    Attributes:
        parts: texts, holes and formulas in order.
        pattern: regular expression of the matching names. With a formula it matches nothing.
    """

    parts: tuple[str | Hole | FactNumber, ...]
    pattern: re.Pattern[str]

    @classmethod
    def parse(cls, text: str, *, texts: int = 1) -> Template:
        """Parse a template.

        Args:
            text: a name with holes.
            texts: maximum number of holes for any text. With several, the split of a name among them is ambiguous.

        Raises:
            LanguageError: the text is not a template.
        """
        if not text or len(text) > _LONGEST:
            raise LanguageError(f"a name has {len(text)} characters, expected 1 to {_LONGEST}")
        parts: list[str | Hole | FactNumber] = []
        at = 0
        for match in _HOLE.finditer(text):
            parts += [text[at : match.start()], _part(match, text)]
            at = match.end()
        parts.append(text[at:])
        if any(isinstance(part, str) and ("{" in part or "}" in part) for part in parts):
            raise LanguageError(
                f"{text!r}: a hole is {{name}}, {{name + 1}} or {{*name}}, and a formula of facts is {{= layers + 1}}"
            )
        holes = [part for part in parts if isinstance(part, Hole)]
        if len({hole.name for hole in holes}) < len(holes):
            raise LanguageError(f"{text!r}: a hole appears twice")
        if any(isinstance(part, str) and not re.search(r"[^0-9]", part) for part in parts[2:-1:2]):
            raise LanguageError(f"{text!r}: two holes must be separated by a character that is not a digit")
        if sum(hole.text for hole in holes) > texts:
            raise LanguageError(f"{text!r}: at most {'one hole' if texts == 1 else f'{texts} holes'} can match any text")
        return cls(tuple(part for part in parts if part), re.compile("".join(map(_pattern, parts))))

    def __str__(self) -> str:
        return "".join(map(str, self.parts))

    @property
    def holes(self) -> tuple[Hole, ...]:
        return tuple(part for part in self.parts if isinstance(part, Hole))

    @property
    def facts(self) -> set[str]:
        """Names of the facts in its formulas."""
        return {name for part in self.parts if isinstance(part, FactNumber) for name in names_in(part.formula)}

    def with_facts(self, facts: Mapping[str, int]) -> Template:
        """Return the template with the values of its formulas.

        Raises:
            LanguageError: a fact is unknown, or a value is not a valid number.
        """
        parts = [str(evaluate(part.formula, facts)) if isinstance(part, FactNumber) else str(part) for part in self.parts]
        return Template.parse("".join(parts), texts=max(sum(hole.text for hole in self.holes), 1))

    def match(self, name: str) -> dict[str, int | str] | None:
        """Return the values of the holes in a name, or None if the name does not match."""
        found = self.pattern.fullmatch(name)
        if found is None:
            return None
        values: dict[str, int | str] = {}
        for hole, text in zip(self.holes, found.groups(), strict=True):
            values[hole.name] = text if hole.text else int(text) - hole.more
        return None if any(isinstance(value, int) and value < 0 for value in values.values()) else values

    def fill(self, values: Values) -> str:
        """Return the name with values for all holes.

        Raises:
            LanguageError: the template has a formula without a value.
        """
        return "".join(_filled(part, values) for part in self.parts)


def _part(match: re.Match[str], text: str) -> Hole | FactNumber:
    formula, star, name, sign, more = match.groups()
    if formula is not None:
        if not names_in(formula):
            raise LanguageError(f"{text!r}: {{={formula}}} is not a formula of facts")
        return FactNumber(formula.strip())
    if star and more:
        raise LanguageError(f"{text!r}: the text {{*{name}}} cannot have an offset")
    return Hole(name, int(f"{sign}{more}") if more else 0, bool(star))


def _pattern(part: str | Hole | FactNumber) -> str:
    if isinstance(part, FactNumber):
        return _NOTHING
    if isinstance(part, Hole):
        return "(.+)" if part.text else _NUMBER
    return re.escape(part)


def _filled(part: str | Hole | FactNumber, values: Values) -> str:
    if isinstance(part, FactNumber):
        raise LanguageError(f"{part}: the facts of this formula are unknown")
    if isinstance(part, Hole):
        return str(values[part.name]) if part.text else str(int(values[part.name]) + part.more)
    return part
