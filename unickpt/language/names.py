"""Names of tensors with holes: ``model.layers.{layer}.mlp.experts.{expert}.w1.weight``.

A hole is a whole number, ``{layer}``, or one that is larger by so much, ``{layer + 2}``; or any text, ``{*rest}``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from unickpt.errors import LanguageError

_HOLE = re.compile(r"\{(\*?)([A-Za-z_][A-Za-z0-9_]*)\s*(?:([+-])\s*([0-9]{1,9}))?\}")
_LONGEST = 1000
_NUMBER = r"(0|[1-9][0-9]{0,8})"  # as frameworks write them: no zeros in front
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
class Template:
    """A name with holes.

    Attributes:
        parts: texts and holes, one after the other.
        pattern: that all names that it stands for match, and no others.
    """

    parts: tuple[str | Hole, ...]
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
        parts: list[str | Hole] = []
        at = 0
        for match in _HOLE.finditer(text):
            parts.append(text[at : match.start()])
            star, name, sign, more = match.groups()
            if star and more:
                raise LanguageError(f"{text!r}: nothing can be added to the text {{*{name}}}")
            parts.append(Hole(name, int(f"{sign}{more}") if more else 0, bool(star)))
            at = match.end()
        parts.append(text[at:])
        if any(isinstance(part, str) and ("{" in part or "}" in part) for part in parts):
            raise LanguageError(f"{text!r}: a hole is {{name}}, {{name + 1}} or {{*name}}")
        holes = [part for part in parts if isinstance(part, Hole)]
        if len({hole.name for hole in holes}) < len(holes):
            raise LanguageError(f"{text!r}: a hole is in it twice")
        between = [part for before, part, after in zip(parts, parts[1:], parts[2:], strict=False)
                   if isinstance(before, Hole) and isinstance(after, Hole)]  # fmt: skip
        if any(isinstance(part, str) and not re.search(r"[^0-9]", part) for part in between):
            raise LanguageError(f"{text!r}: between two holes there has to be something that is no number")
        if sum(hole.text for hole in holes) > texts:
            raise LanguageError(f"{text!r}: only {'one hole' if texts == 1 else f'{texts} holes'} can be any text")
        pattern = "".join(re.escape(part) if isinstance(part, str) else "(.+)" if part.text else _NUMBER for part in parts)
        return cls(tuple(part for part in parts if part), re.compile(pattern))

    def __str__(self) -> str:
        return "".join(map(str, self.parts))

    @property
    def holes(self) -> tuple[Hole, ...]:
        return tuple(part for part in self.parts if isinstance(part, Hole))

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
        """The name with these values in its holes; they are all there."""
        return "".join(
            part if isinstance(part, str)
            else str(values[part.name]) if part.text else str(int(values[part.name]) + part.more)
            for part in self.parts
        )  # fmt: skip
