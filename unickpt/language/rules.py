"""Rules: a tensor of a dialect, and the tensors of another one that have the same elements.

    here   "decoder.layers.{layer}.self_attention.linear_qkv.weight [(group (query | 1 | 1) head) hidden]"
    there  "model.layers.{layer}.self_attn.q_proj.weight [(group query head) hidden]"
           "model.layers.{layer}.self_attn.k_proj.weight [(group head) hidden]"
           "model.layers.{layer}.self_attn.v_proj.weight [(group head) hidden]"

The options of the choice ``(query | 1 | 1)`` are, in their order, the tensors on the other side (or the options of a choice
there). What is an axis on one side may be a hole of the name on the other: so experts are stacked. Without brackets the
two are alike in shape and order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from unickpt.errors import LanguageError
from unickpt.language.arrangement import PADDING, Arrangement, Axis
from unickpt.language.names import Template

Repeat = Literal["same", "mean", "sum"]
_ITEM = re.compile(r"\s*(\S+)\s*(?:\[(.*)\])?\s*", re.DOTALL)
_NAME_WITH_BLANKS = re.compile(r"\{[^{}]*\}")


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor, or one for each value of the holes in its name, and how it is arranged; None: as the other side is."""

    name: Template
    arrangement: Arrangement | None

    @classmethod
    def parse(cls, text: str) -> Item:
        """Read ``name`` or ``name [arrangement]``.

        Raises:
            LanguageError: this is none.
        """
        match = _ITEM.fullmatch(_NAME_WITH_BLANKS.sub(lambda hole: hole.group().replace(" ", ""), text))
        if match is None:
            raise LanguageError(f"{text!r} is not a name, or a name and [how its dimensions are arranged]")
        name, arrangement = match.groups()
        return cls(Template.parse(name), None if arrangement is None else Arrangement.parse(arrangement))

    def __str__(self) -> str:
        return f"{self.name}" + (f" [{self.arrangement}]" if self.arrangement else "")

    @property
    def padded(self) -> bool:
        """Whether elements of it are nothing on the other side."""
        return self.arrangement is not None and Axis(PADDING) in self.arrangement.options

    @property
    def options(self) -> list[int]:
        """Options that tensors on the other side fill."""
        choice = self.arrangement.options if self.arrangement else ()
        return [at for at, node in enumerate(choice) if node != Axis(PADDING)] or [0]

    def indices(self, option: int) -> set[str]:
        """Names of what tells its elements of an option apart: holes that are numbers, and axes."""
        return {hole.name for hole in self.name.holes if not hole.text} | set(self.axes(option))

    def axes(self, option: int) -> list[str]:
        """Axes that elements of an option have."""
        if self.arrangement is None:
            return []
        zero = dict.fromkeys(self.arrangement.axes(), 1)
        return [name for digits in self.arrangement.digits(zero, option) for name in digits.steps]


@dataclass(frozen=True, slots=True)
class Side:
    """One option of an item."""

    item: Item
    option: int


@dataclass(frozen=True, slots=True)
class Rule:
    """One tensor here, and those that it is there.

    Attributes:
        here, there: see above.
        repeat: what is an index on one side alone, and what that means: all are the ``same``, or what is on the other side
            is their ``mean``, or their ``sum``.

    Raises:
        LanguageError: the sides do not have the same elements, whatever the sizes are.
    """

    here: Item
    there: tuple[Item, ...]
    repeat: Mapping[str, Repeat] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ours, theirs = self.here.options, [Side(item, option) for item in self.there for option in item.options]
        if not self.there:
            raise LanguageError(f"{self}: nothing is there")
        if (self.here.arrangement is None) != any(item.arrangement is None for item in self.there) or (
            self.here.arrangement is None and len(self.there) > 1
        ):
            raise LanguageError(f"{self}: an arrangement is wanted on both sides, or, of one tensor and one, on neither")
        if len(ours) != len(theirs):
            raise LanguageError(f"{self}: {len(ours)} options here are {len(theirs)} tensors (or options of them) there")
        texts = {hole.name for hole in self.here.name.holes if hole.text}
        if len({str(item.name) for item in self.there}) < len(self.there):
            raise LanguageError(f"{self}: a tensor is there twice")
        for mine, other in self.pairs():
            if {hole.name for hole in other.item.name.holes if hole.text} != texts:
                raise LanguageError(f"{self}: a hole of any text has to be in the names on both sides")
            left, right = mine.item.indices(mine.option), other.item.indices(other.option)
            alone = {name for name in left ^ right if name not in self.repeat}
            if alone:
                where, names = ("here", alone & left) if alone & left else ("there", alone)
                raise LanguageError(
                    f"{self}: {', '.join(sorted(map(repr, names)))} is an index {where} alone. Say what its repetition means: "
                    "repeat = same, mean or sum"
                )
            for side in (mine, other):
                both = {hole.name for hole in side.item.name.holes} & set(side.item.axes(side.option))
                if both:
                    raise LanguageError(f"{self}: {min(both)!r} is a hole and an axis of one tensor")
        unknown = {name for name, how in self.repeat.items() if how not in ("same", "mean", "sum")}
        unknown |= {name for name in self.repeat if not any(
            (name in a.item.indices(a.option)) != (name in b.item.indices(b.option)) for a, b in self.pairs()
        )}  # fmt: skip
        if unknown:
            raise LanguageError(f"{self}: repeat of {min(unknown)!r}, which is no index on one side alone")

    @classmethod
    def parse(cls, here: str, there: str | Sequence[str], *, repeat: Mapping[str, Repeat] | None = None) -> Rule:
        """Read one from its texts."""
        items = (there,) if isinstance(there, str) else tuple(there)
        return cls(Item.parse(here), tuple(Item.parse(each) for each in items), repeat or {})

    def __str__(self) -> str:
        return f"rule {self.here} = {' + '.join(map(str, self.there))}"

    def with_facts(self, facts: Mapping[str, int]) -> Rule:
        """The same with the numbers in names that facts of a model tell.

        Raises:
            LanguageError: one of them is not known.
        """
        if not any(item.name.facts for item in (self.here, *self.there)):
            return self
        try:
            here, *there = (Item(item.name.with_facts(facts), item.arrangement) for item in (self.here, *self.there))
        except LanguageError as err:
            raise LanguageError(f"{self}: {err}") from None
        return Rule(here, tuple(there), self.repeat)

    def pairs(self) -> Iterator[tuple[Side, Side]]:
        """Options of here, and what they are there."""
        theirs = (Side(item, option) for item in self.there for option in item.options)
        return zip((Side(self.here, option) for option in self.here.options), theirs, strict=True)
