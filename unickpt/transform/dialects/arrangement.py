"""Arrangement of named axes in the dimensions of a tensor: ``(group (query | 1 | 1) head) hidden``.

    dimensions     separated by spaces, outermost first
    (a b c)        one dimension of several axes, outermost first: index = (a * |b| + b) * |c| + c
    (a | b | c)    concatenation: |a| + |b| + |c|; also as one of the axes of a dimension
    1              an axis of one element
    ~              as an option of a concatenation: padding, which no tensor fills

Two arrangements of the same elements can differ in the order of the axes, in their grouping into dimensions, and in their
distribution over tensors. A pair of arrangements therefore expresses transposition, interleaving, fusion, splitting, stacking
and padding. (Universal Checkpointing, arXiv 2406.18820, table 2, has a pattern for each of them.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from unickpt.base.errors import LanguageError

PADDING = "~"
_LONGEST = 1000
_TOKEN = re.compile(r"\s*(?:([A-Za-z_][A-Za-z0-9_]*)|([0-9]+)|([()|~]))")


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis. ``name`` is an identifier, ``1``, or ``~``."""

    name: str


@dataclass(frozen=True, slots=True)
class Product:
    """Axes of one dimension, outermost first."""

    factors: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Concatenation:
    """Concatenation of options in one dimension."""

    options: tuple[Node, ...]


Node = Axis | Product | Concatenation


@dataclass(frozen=True, slots=True)
class Digits:
    """Position of an element in one dimension: ``start`` plus the index of every axis times its step.

    Attributes:
        start: position of the first element.
        steps: steps by axis name.
    """

    start: int
    steps: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Arrangement of one tensor.

    Attributes:
        dimensions: dimensions, outermost first.
        text: text that was parsed.
    """

    dimensions: tuple[Node, ...]
    text: str

    @classmethod
    def parse(cls, text: str) -> Arrangement:
        """Parse an arrangement.

        Raises:
            LanguageError: the text is not an arrangement; the message has the position.
        """
        return _Parser(text).all()

    def __str__(self) -> str:
        return self.text

    @property
    def options(self) -> tuple[Node, ...]:
        """Options of the concatenation; empty without one."""
        return next((node.options for node in self._nodes() if isinstance(node, Concatenation)), ())

    def axes(self) -> frozenset[str]:
        """Return the names of all named axes."""
        return frozenset(node.name for node in self._nodes() if isinstance(node, Axis) and node.name not in ("1", PADDING))

    def _nodes(self) -> Iterator[Node]:
        return (node for dimension in self.dimensions for node in _walk(dimension))

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the extents of the dimensions. Padding has the size ``sizes["~"]``, or 0.

        Raises:
            KeyError: the size of an axis is unknown.
        """
        return tuple(_size(node, sizes) for node in self.dimensions)

    def solve(self, shape: Sequence[int], sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the sizes of unknown axes that follow from a shape.

        A dimension with a single axis of unknown size determines it.

        Raises:
            LanguageError: the shape contradicts the arrangement.
        """
        if len(shape) != len(self.dimensions):
            raise LanguageError(f"[{self}] has {len(self.dimensions)} dimensions, but the tensor has the shape {list(shape)}")
        found: dict[str, int] = {}
        for at, (node, extent) in enumerate(zip(self.dimensions, shape, strict=True)):
            unknown = {leaf.name for leaf in _walk(node) if isinstance(leaf, Axis) and leaf.name != "1"} - {*sizes, *found}
            known = {**sizes, **found}
            if len(unknown) > 1 or (PADDING in unknown and len(unknown) > 1):
                continue
            if not unknown:
                if _size(node, known) != extent:
                    raise LanguageError(
                        f"dimension {at} of [{self}] has {_size(node, known)} elements ({_sizes_text(node, known)}), but the "
                        f"tensor has {extent} (shape {list(shape)})"
                    )
                continue
            (name,) = unknown
            none, one, two = (_size(node, {**known, name: size}) for size in (0, 1, 2))
            slope = one - none
            if slope <= 0 or two - one != slope or (extent - none) % slope or (extent - none) // slope < (name != PADDING):
                raise LanguageError(
                    f"dimension {at} of [{self}] cannot have {extent} elements for any {name!r} ({_sizes_text(node, known)})"
                )
            found[name] = (extent - none) // slope
        return found

    def digits(self, sizes: Mapping[str, int], option: int = 0) -> list[Digits]:
        """Return the positions of elements in every dimension; in a concatenation those of one option."""
        found = []
        for node in self.dimensions:
            steps: dict[str, int] = {}
            found.append(Digits(_place(node, sizes, option, 1, steps), steps))
        return found


def _walk(node: Node) -> Iterator[Node]:
    yield node
    parts = node.factors if isinstance(node, Product) else node.options if isinstance(node, Concatenation) else ()
    for part in parts:
        yield from _walk(part)


def _size(node: Node, sizes: Mapping[str, int]) -> int:
    if isinstance(node, Axis):
        return 1 if node.name == "1" else sizes.get(PADDING, 0) if node.name == PADDING else sizes[node.name]
    if isinstance(node, Concatenation):
        return sum(_size(option, sizes) for option in node.options)
    size = 1
    for factor in node.factors:
        size *= _size(factor, sizes)
    return size


def _path(node: Node, option: int) -> Iterator[str]:
    """Yield the names of the axes of an option."""
    if isinstance(node, Axis):
        if node.name not in ("1", PADDING):
            yield node.name
    elif isinstance(node, Concatenation):
        yield from _path(node.options[option], 0)
    else:
        for factor in node.factors:
            yield from _path(factor, option)


def _sizes_text(node: Node, sizes: Mapping[str, int]) -> str:
    names = [leaf.name for leaf in _walk(node) if isinstance(leaf, Axis) and leaf.name != "1"]
    return ", ".join(f"{name} = {sizes.get(name, '?')}" for name in dict.fromkeys(names))


def _place(node: Node, sizes: Mapping[str, int], option: int, step: int, steps: dict[str, int]) -> int:
    """Add the steps of the axes of a node to ``steps`` and return the position of its first element.

    ``step`` is the step of the node.
    """
    if isinstance(node, Axis):
        if node.name not in ("1", PADDING):
            steps[node.name] = step
        return 0
    if isinstance(node, Concatenation):
        before = sum(_size(each, sizes) for each in node.options[:option])
        return before * step + _place(node.options[option], sizes, 0, step, steps)
    start = 0
    for factor in reversed(node.factors):
        start += _place(factor, sizes, option, step, steps)
        step *= _size(factor, sizes)
    return start


class _Parser:
    """Recursive descent parser. A dimension is an axis or a group. A group consists of products separated by bars."""

    def __init__(self, text: str) -> None:
        if len(text) > _LONGEST:
            raise LanguageError(f"an arrangement has {len(text)} characters, the limit is {_LONGEST}")
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
                raise LanguageError(f"[{self.text}]: the axis {twice[0]!r} appears twice")
        return found

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def factor(self) -> Node:
        token = self.peek()
        if token in ("", ")", "|"):
            raise self.error("expected an axis or '('")
        if token == PADDING and not self.in_choice:
            raise self.error("padding must be an option of its own, as in (a | ~)")
        if token.isdigit() and token != "1":
            raise self.error("the only number that can be an axis is 1; name the axis, and give its size under [sizes]")
        self.at += 1
        return self.group() if token == "(" else Axis(token)

    def group(self) -> Node:
        options: list[Node] = []
        chooses = self._has_bar()
        if chooses and self.choices:
            raise self.error("only one concatenation is allowed")
        self.choices += chooses
        self.in_choice += chooses
        while True:
            factors = []
            while self.peek() not in (")", "|"):
                factors.append(self.factor())
            if not factors:
                raise self.error("an option is empty")
            if Axis(PADDING) in factors and len(factors) > 1:
                raise self.error("padding must be an option of its own, as in (a | ~)")
            options.append(factors[0] if len(factors) == 1 else Product(tuple(factors)))
            self.at += 1
            if self.tokens[self.at - 1] == ")":
                break
        self.in_choice -= chooses
        return Concatenation(tuple(options)) if chooses else options[0]

    def _has_bar(self) -> bool:
        """Return whether the group that begins here has bars. Raises LanguageError if it has no end."""
        depth, bar = 0, False
        for token in self.tokens[self.at :]:
            if token == ")" and depth == 0:
                return bar
            depth += (token == "(") - (token == ")")
            bar |= token == "|" and depth == 0
        raise self.error("a ')' is missing")

    def error(self, reason: str) -> LanguageError:
        return LanguageError(f"[{self.text}]: {reason}" + (f", at {self.peek()!r}" if self.peek() else ", at the end"))


def _tokens(text: str) -> Iterator[str]:
    at = 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None:
            raise LanguageError(f"[{text}]: the character {text[at:].strip()[0]!r} is not allowed")
        yield match.group(1) or match.group(2) or match.group(3)
        at = match.end()
