"""Rules: a tensor of one dialect, and the tensors of another dialect with the same elements.

    here   "decoder.layers.{layer}.self_attention.linear_qkv.weight [(group (query | 1 | 1) head) hidden]"
    there  "model.layers.{layer}.self_attn.q_proj.weight [(group query head) hidden]"
           "model.layers.{layer}.self_attn.k_proj.weight [(group head) hidden]"
           "model.layers.{layer}.self_attn.v_proj.weight [(group head) hidden]"

The options of the concatenation ``(query | 1 | 1)`` correspond, in order, to the tensors on the other side (or to the options
of a concatenation there). An axis on one side can be a hole of the name on the other side; this is how experts are stacked.
Without brackets both tensors have the same shape and order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from unickpt.base.errors import LanguageError
from unickpt.transform.dialects.arrangement import PADDING, Arrangement, Axis
from unickpt.transform.dialects.name_templates import Template

Repeat = Literal["same", "mean", "sum"]
_ITEM = re.compile(r"\s*(\S+)\s*(?:\[(.*)\])?\s*", re.DOTALL)
_NAME_WITH_BLANKS = re.compile(r"\{[^{}]*\}")


@dataclass(frozen=True, slots=True)
class TensorPattern:
    """A tensor, or one tensor for each value of the holes in its name. Arrangement None: the same as on the other side."""

    name: Template
    arrangement: Arrangement | None

    @classmethod
    def parse(cls, text: str) -> TensorPattern:
        """Parse ``name`` or ``name [arrangement]``.

        Raises:
            LanguageError: the text does not have this form.
        """
        match = _ITEM.fullmatch(_NAME_WITH_BLANKS.sub(lambda hole: hole.group().replace(" ", ""), text))
        if match is None:
            raise LanguageError(f"{text!r}: expected NAME or NAME [ARRANGEMENT]")
        name, arrangement = match.groups()
        return cls(Template.parse(name), None if arrangement is None else Arrangement.parse(arrangement))

    def __str__(self) -> str:
        return f"{self.name}" + (f" [{self.arrangement}]" if self.arrangement else "")

    @property
    def padded(self) -> bool:
        """Whether it has padding, which has no elements on the other side."""
        return self.arrangement is not None and Axis(PADDING) in self.arrangement.options

    @property
    def options(self) -> list[int]:
        """Numbers of the options with elements on the other side."""
        choice = self.arrangement.options if self.arrangement else ()
        return [at for at, node in enumerate(choice) if node != Axis(PADDING)] or [0]

    def indices(self, option: int) -> set[str]:
        """Return the indices of the elements of an option: number holes and axes."""
        return {hole.name for hole in self.name.holes if not hole.text} | set(self.axes(option))

    def axes(self, option: int) -> list[str]:
        """Return the axes of the elements of an option."""
        if self.arrangement is None:
            return []
        zero = dict.fromkeys(self.arrangement.axes(), 1)
        return [name for digits in self.arrangement.digits(zero, option) for name in digits.steps]


@dataclass(frozen=True, slots=True)
class Side:
    """One option of a tensor pattern."""

    item: TensorPattern
    option: int


@dataclass(frozen=True, slots=True)
class Rule:
    """One tensor *here*, and its tensors *there*.

    Attributes:
        here, there: both sides.
        repeat: indices that only one side has, with their meaning: all are the ``same``, or the other side is their
            ``mean`` or ``sum``.

    Raises:
        LanguageError: the sides cannot have the same elements.
    """

    here: TensorPattern
    there: tuple[TensorPattern, ...]
    repeat: Mapping[str, Repeat] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ours, theirs = self.here.options, [Side(item, option) for item in self.there for option in item.options]
        if not self.there:
            raise LanguageError(f"{self}: 'there' is empty")
        if (self.here.arrangement is None) != any(item.arrangement is None for item in self.there) or (
            self.here.arrangement is None and len(self.there) > 1
        ):
            raise LanguageError(f"{self}: needs an arrangement on both sides, or on neither for one tensor on each side")
        if len(ours) != len(theirs):
            raise LanguageError(f"{self}: 'here' has {len(ours)} options, 'there' has {len(theirs)} tensors or options")
        texts = {hole.name for hole in self.here.name.holes if hole.text}
        if len({str(item.name) for item in self.there}) < len(self.there):
            raise LanguageError(f"{self}: 'there' has a tensor twice")
        for mine, other in self.pairs():
            if {hole.name for hole in other.item.name.holes if hole.text} != texts:
                raise LanguageError(f"{self}: a hole for any text must be in the names on both sides")
            left, right = mine.item.indices(mine.option), other.item.indices(other.option)
            alone = {name for name in left ^ right if name not in self.repeat}
            if alone:
                where, names = ("here", alone & left) if alone & left else ("there", alone)
                raise LanguageError(
                    f"{self}: {', '.join(sorted(map(repr, names)))} is an index only {where}. Define its meaning with repeat = "
                    "same, mean or sum"
                )
            for side in (mine, other):
                both = {hole.name for hole in side.item.name.holes} & set(side.item.axes(side.option))
                if both:
                    raise LanguageError(f"{self}: {min(both)!r} is both a hole and an axis of one tensor")
        unknown = {name for name, how in self.repeat.items() if how not in ("same", "mean", "sum")}
        unknown |= {
            name
            for name in self.repeat
            if not any((name in a.item.indices(a.option)) != (name in b.item.indices(b.option)) for a, b in self.pairs())
        }
        if unknown:
            raise LanguageError(
                f"{self}: repeat has {min(unknown)!r}, which is not an index of only one side, or a wrong value"
            )

    @classmethod
    def parse(cls, here: str, there: str | Sequence[str], *, repeat: Mapping[str, Repeat] | None = None) -> Rule:
        """Parse a rule from its texts. Raises LanguageError."""
        items = (there,) if isinstance(there, str) else tuple(there)
        return cls(TensorPattern.parse(here), tuple(TensorPattern.parse(each) for each in items), repeat or {})

    def __str__(self) -> str:
        return f"rule {self.here} = {' + '.join(map(str, self.there))}"

    def with_facts(self, facts: Mapping[str, int]) -> Rule:
        """Return the rule with the values of the formulas in its names.

        Raises:
            LanguageError: a fact is unknown.
        """
        if not any(item.name.facts for item in (self.here, *self.there)):
            return self
        try:
            here, *there = (TensorPattern(item.name.with_facts(facts), item.arrangement) for item in (self.here, *self.there))
        except LanguageError as err:
            raise LanguageError(f"{self}: {err}") from None
        return Rule(here, tuple(there), self.repeat)

    def pairs(self) -> Iterator[tuple[Side, Side]]:
        """Yield each option *here* with its counterpart *there*."""
        theirs = (Side(item, option) for item in self.there for option in item.options)
        return zip((Side(self.here, option) for option in self.here.options), theirs, strict=True)
