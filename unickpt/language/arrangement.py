"""How a tensor's dimensions are made of named axes: ``(group (query | 1 | 1) head) hidden``.

    dimensions     separated by spaces, the outermost first
    (a b c)        one dimension that is several axes, the outermost first: index = (a * |b| + b) * |c| + c
    (a | b | c)    one after the other: |a| + |b| + |c|; also as one of the axes of a dimension
    1              an axis of one element
    ~              as one of several: padding, which no tensor fills

What may differ between two arrangements of the same elements is the order of the axes, how they are put together into
dimensions, and which of them are in one tensor: transposition, interleaving, fusion, splitting, stacking and padding are
all said by writing down both. (Universal Checkpointing, arXiv 2406.18820, table 2, has a pattern for each of them.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from unickpt.errors import LanguageError

PADDING = "~"
_LONGEST = 1000
_TOKEN = re.compile(r"\s*(?:([A-Za-z_][A-Za-z0-9_]*)|([0-9]+)|([()|~]))")


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis. ``name`` is an identifier, ``1``, or ``~``."""

    name: str


@dataclass(frozen=True, slots=True)
class Product:
    """Axes of one dimension, the outermost first."""

    factors: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One after the other in one dimension."""

    options: tuple[Node, ...]


Node = Axis | Product | Choice


@dataclass(frozen=True, slots=True)
class Digits:
    """Where an element is in one dimension: ``start`` plus, for every axis, its index times its step.

    Attributes:
        start: of the first element.
        steps: by name of the axis.
    """

    start: int
    steps: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Of one tensor.

    Attributes:
        dimensions: the outermost first.
        text: that it was read from.
    """

    dimensions: tuple[Node, ...]
    text: str

    @classmethod
    def parse(cls, text: str) -> Arrangement:
        """Read one.

        Raises:
            LanguageError: this is none; says where.
        """
        return _Parser(text).all()

    def __str__(self) -> str:
        return self.text

    @property
    def options(self) -> tuple[Node, ...]:
        """Of the one choice in it; empty if there is none."""
        return next((node.options for node in self._nodes() if isinstance(node, Choice)), ())

    def axes(self) -> frozenset[str]:
        """Names of all axes that have one."""
        return frozenset(node.name for node in self._nodes() if isinstance(node, Axis) and node.name not in ("1", PADDING))

    def _nodes(self) -> Iterator[Node]:
        return (node for dimension in self.dimensions for node in _walk(dimension))

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Extents of the dimensions; padding counts as ``sizes["~"]``, or not at all.

        Raises:
            KeyError: the size of an axis is not known.
        """
        return tuple(_size(node, sizes) for node in self.dimensions)

    def solve(self, shape: Sequence[int], sizes: Mapping[str, int]) -> dict[str, int]:
        """Sizes of axes that the shape tells, beyond those that are known.

        Every dimension that has only one axis of unknown size tells it.

        Raises:
            LanguageError: the shape cannot be.
        """
        if len(shape) != len(self.dimensions):
            raise LanguageError(f"[{self}] has {len(self.dimensions)} dimensions, the tensor has the shape {list(shape)}")
        found: dict[str, int] = {}
        for at, (node, extent) in enumerate(zip(self.dimensions, shape, strict=True)):
            unknown = {leaf.name for leaf in _walk(node) if isinstance(leaf, Axis) and leaf.name != "1"} - {*sizes, *found}
            known = {**sizes, **found}
            if len(unknown) > 1 or (PADDING in unknown and len(unknown) > 1):
                continue
            if not unknown:
                if _size(node, known) != extent:
                    raise LanguageError(
                        f"dimension {at} of [{self}] has {_size(node, known)} elements ({_told(node, known)}), the tensor has "
                        f"{extent} there (shape {list(shape)})"
                    )
                continue
            (name,) = unknown
            none, one, two = (_size(node, {**known, name: size}) for size in (0, 1, 2))
            slope = one - none
            if slope <= 0 or two - one != slope or (extent - none) % slope or (extent - none) // slope < (name != PADDING):
                raise LanguageError(
                    f"dimension {at} of [{self}] cannot have {extent} elements, whatever {name!r} is ({_told(node, known)})"
                )
            found[name] = (extent - none) // slope
        return found

    def digits(self, sizes: Mapping[str, int], option: int = 0) -> list[Digits]:
        """Of every dimension, where elements are; of a choice only those of one of its options."""
        found = []
        for node in self.dimensions:
            steps: dict[str, int] = {}
            found.append(Digits(_place(node, sizes, option, 1, steps), steps))
        return found


def _walk(node: Node) -> Iterator[Node]:
    yield node
    parts = node.factors if isinstance(node, Product) else node.options if isinstance(node, Choice) else ()
    for part in parts:
        yield from _walk(part)


def _size(node: Node, sizes: Mapping[str, int]) -> int:
    if isinstance(node, Axis):
        return 1 if node.name == "1" else sizes.get(PADDING, 0) if node.name == PADDING else sizes[node.name]
    if isinstance(node, Choice):
        return sum(_size(option, sizes) for option in node.options)
    size = 1
    for factor in node.factors:
        size *= _size(factor, sizes)
    return size


def _path(node: Node, option: int) -> Iterator[str]:
    """Names of the axes that an element of an option has."""
    if isinstance(node, Axis):
        if node.name not in ("1", PADDING):
            yield node.name
    elif isinstance(node, Choice):
        yield from _path(node.options[option], 0)
    else:
        for factor in node.factors:
            yield from _path(factor, option)


def _told(node: Node, sizes: Mapping[str, int]) -> str:
    names = [leaf.name for leaf in _walk(node) if isinstance(leaf, Axis) and leaf.name != "1"]
    return ", ".join(f"{name} = {sizes.get(name, '?')}" for name in dict.fromkeys(names))


def _place(node: Node, sizes: Mapping[str, int], option: int, step: int, steps: dict[str, int]) -> int:
    """Add the steps of a node's axes, and return the position of its first element; ``step`` is that of the node."""
    if isinstance(node, Axis):
        if node.name not in ("1", PADDING):
            steps[node.name] = step
        return 0
    if isinstance(node, Choice):
        before = sum(_size(each, sizes) for each in node.options[:option])
        return before * step + _place(node.options[option], sizes, 0, step, steps)
    start = 0
    for factor in reversed(node.factors):
        start += _place(factor, sizes, option, step, steps)
        step *= _size(factor, sizes)
    return start


class _Parser:
    """Recursive descent: a dimension is an axis or a group; a group is products, separated by bars."""

    def __init__(self, text: str) -> None:
        if len(text) > _LONGEST:
            raise LanguageError(f"an arrangement of {len(text)} characters; {_LONGEST} are enough for any")
        self.text, self.tokens = text, list(_tokens(text))
        self.at = self.choices = self.in_choice = 0

    def all(self) -> Arrangement:
        dimensions = []
        while self.at < len(self.tokens):
            dimensions.append(self.factor())
        found = Arrangement(tuple(dimensions), " ".join(self.text.split()))
        for option in range(max(len(found.options), 1)):
            names = [name for node in dimensions for name in _path(node, option)]
            twice = [name for name in names if names.count(name) > 1]
            if twice:
                raise LanguageError(f"[{self.text}]: axis {twice[0]!r} is in it twice")
        return found

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def factor(self) -> Node:
        token = self.peek()
        if token in ("", ")", "|"):
            raise self.error("an axis or '(' is expected")
        if token == PADDING and not self.in_choice:
            raise self.error("padding stands for itself, as one of several: (a | ~)")
        if token.isdigit() and token != "1":
            raise self.error("of numbers only 1 can be an axis; give the axis a name, and its size among the sizes")
        self.at += 1
        return self.group() if token == "(" else Axis(token)

    def group(self) -> Node:
        options: list[Node] = []
        chooses = self._has_bar()
        if chooses and self.choices:
            raise self.error("there is more than one choice in it")
        self.choices += chooses
        self.in_choice += chooses
        while True:
            factors = []
            while self.peek() not in (")", "|"):
                factors.append(self.factor())
            if not factors:
                raise self.error("nothing is between the bars or parentheses")
            if Axis(PADDING) in factors and len(factors) > 1:
                raise self.error("padding stands for itself, as one of several: (a | ~)")
            options.append(factors[0] if len(factors) == 1 else Product(tuple(factors)))
            self.at += 1
            if self.tokens[self.at - 1] == ")":
                break
        self.in_choice -= chooses
        return Choice(tuple(options)) if chooses else options[0]

    def _has_bar(self) -> bool:
        """Whether the group that begins here has bars of its own; that it has an end."""
        depth, bar = 0, False
        for token in self.tokens[self.at :]:
            if token == ")" and depth == 0:
                return bar
            depth += (token == "(") - (token == ")")
            bar |= token == "|" and depth == 0
        raise self.error("a ')' is missing")

    def error(self, told: str) -> LanguageError:
        return LanguageError(f"[{self.text}]: {told}" + (f", at {self.peek()!r}" if self.peek() else ", at the end"))


def _tokens(text: str) -> Iterator[str]:
    at = 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None:
            raise LanguageError(f"[{text}]: {text[at:].strip()[0]!r} cannot be in it")
        yield match.group(1) or match.group(2) or match.group(3)
        at = match.end()
