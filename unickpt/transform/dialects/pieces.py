"""Pieces: maps between elements of two tensors. Pure functions of whole numbers.

A piece consists of two grids with the same extents, one in each tensor. In every dimension a grid has a start and a step. A
dimension of one grid corresponds to a dimension of the other, which can be another one. Pieces are closed under inversion,
restriction to a box, and composition.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from unickpt.base.errors import CoverageError
from unickpt.checkpoint.format.boxes import Box, find_overlap


@dataclass(frozen=True, slots=True)
class Link:
    """A direction of a grid, along one dimension of each tensor.

    Attributes:
        extent: number of elements, at least 2.
        source, target: dimension in each tensor. No two links of a piece share one.
        source_step, target_step: distance between consecutive elements, at least 1.
    """

    extent: int
    source: int
    source_step: int
    target: int
    target_step: int


@dataclass(frozen=True, slots=True)
class GridPiece:
    """Elements of a target tensor that are elements of a source tensor.

    Attributes:
        source, target: names of the tensors.
        source_start, target_start: index of the first element in each tensor.
        links: directions with several elements. All other dimensions have one element.
        weight: factor of the source; 1 unless the target is a mean.
        term: number of the term, if the target is a sum.
    """

    source: str
    target: str
    source_start: tuple[int, ...]
    target_start: tuple[int, ...]
    links: tuple[Link, ...]
    weight: float = 1.0
    term: int = 0

    @property
    def numel(self) -> int:
        return math.prod(link.extent for link in self.links)

    def inverted(self) -> GridPiece:
        """Return the map from target to source. Raises ValueError for a piece of a sum, whose terms cannot be separated."""
        if self.weight != 1.0 or self.term:
            raise ValueError(f"{self.target} is a sum with the term {self.source}, which cannot be inverted")
        links = (Link(link.extent, link.target, link.target_step, link.source, link.source_step) for link in self.links)
        return GridPiece(self.target, self.source, self.target_start, self.source_start, tuple(links))

    def within(self, box: Box) -> GridPiece | None:
        """Return the part with target elements in a box of the target, or None."""
        source, target = list(self.source_start), list(self.target_start)
        links = []
        linked = {link.target: link for link in self.links}
        for dim, (begin, end) in enumerate(zip(box.start, box.stop, strict=True)):
            link = linked.get(dim)
            if link is None:
                if not begin <= target[dim] < end:
                    return None
                continue
            first = max(-(-(begin - target[dim]) // link.target_step), 0)
            last = min((end - 1 - target[dim]) // link.target_step, link.extent - 1)
            if last < first:
                return None
            target[dim] += first * link.target_step
            source[link.source] += first * link.source_step
            if last > first:
                links.append(replace(link, extent=last - first + 1))
        return replace(self, source_start=tuple(source), target_start=tuple(target), links=tuple(links))

    def then(self, second: GridPiece) -> GridPiece | None:
        """Compose this piece from a to b with a piece from b to c. Return the piece from a to c, or None if it is empty."""
        if self.target != second.source:
            raise ValueError(f"the target {self.target} of the first piece is not the source {second.source} of the second")
        source, target = list(self.source_start), list(second.target_start)
        first_of, second_of = {link.target: link for link in self.links}, {link.source: link for link in second.links}
        links = []
        for dim, (a, b) in enumerate(zip(self.target_start, second.source_start, strict=True)):
            one, two = first_of.get(dim), second_of.get(dim)
            a_step, a_extent = (one.target_step, one.extent) if one else (1, 1)
            b_step, b_extent = (two.source_step, two.extent) if two else (1, 1)
            common = _common(a, a_step, a_extent, b, b_step, b_extent)
            if common is None:
                return None
            at, step, extent = common
            if one:
                source[one.source] += (at - a) // a_step * one.source_step
            if two:
                target[two.target] += (at - b) // b_step * two.target_step
            if extent > 1 and one and two:
                links.append(
                    Link(extent, one.source, one.source_step * step // a_step, two.target, two.target_step * step // b_step)
                )
        weight = self.weight * second.weight
        return GridPiece(
            self.source, second.target, tuple(source), tuple(target), tuple(links), weight, self.term + second.term
        )

    def reads(self) -> Iterator[GridPiece]:
        """Yield pieces whose source elements are boxes."""
        stepped = next((link for link in self.links if link.source_step > 1), None)
        if stepped is None:
            yield self
            return
        others = tuple(link for link in self.links if link is not stepped)
        for at in range(stepped.extent):
            source, target = list(self.source_start), list(self.target_start)
            source[stepped.source] += at * stepped.source_step
            target[stepped.target] += at * stepped.target_step
            yield from replace(self, source_start=tuple(source), target_start=tuple(target), links=others).reads()

    @property
    def source_box(self) -> Box:
        """The source elements of a piece whose source steps are 1."""
        shape = [1] * len(self.source_start)
        for link in self.links:
            shape[link.source] = link.extent
        return Box(self.source_start, tuple(shape))

    def strides(self, strides: Sequence[int]) -> tuple[int, ...]:
        """Return, for every dimension of the source, the stride of its elements in a target with these strides."""
        found = [0] * len(self.source_start)
        for link in self.links:
            found[link.source] = link.target_step * strides[link.target]
        return tuple(found)


def _common(a: int, a_step: int, a_extent: int, b: int, b_step: int, b_extent: int) -> tuple[int, int, int] | None:
    """Return start, step and extent of the intersection of two arithmetic progressions, or None."""
    divisor = math.gcd(a_step, b_step)
    if (b - a) % divisor:
        return None
    step = a_step // divisor * b_step
    other = b_step // divisor
    turns = (b - a) // divisor * pow(a_step // divisor, -1, other) % other if other > 1 else 0
    at = a + turns * a_step
    low = max(a, b)
    if at < low:
        at += -(-(low - at) // step) * step
    high = min(a + a_step * (a_extent - 1), b + b_step * (b_extent - 1))
    return None if at > high else (at, step, (high - at) // step + 1)


def check_cover(name: str, shape: Sequence[int], pieces: Sequence[GridPiece], *, less: int = 0) -> None:
    """Check that every element of a target comes from exactly one piece of each term.

    Args:
        name, shape: name and shape of the target.
        pieces: all its pieces.
        less: number of padding elements, which have no source.

    Raises:
        CoverageError: an element has no source or two, or a piece leaves the target.
    """
    for term in sorted({piece.term for piece in pieces} or {0}):
        mine = [piece for piece in pieces if piece.term == term]
        for piece in mine:
            ends = list(piece.target_start)
            for link in piece.links:
                ends[link.target] += (link.extent - 1) * link.target_step
            if any(end >= extent for end, extent in zip(ends, shape, strict=True)):
                raise CoverageError(f"{name} {list(shape)}: {piece.source} maps to element {ends}, which is outside")
        got, want = sum(piece.numel for piece in mine), math.prod(shape) - less
        twice = _overlap(mine, len(shape))
        if got != want or twice is not None:
            found = (
                f"some elements come from both {twice[0].source} and {twice[1].source}"
                if twice
                else f"{got} of {want} elements have a source"
            )
            raise CoverageError(f"{name} {list(shape)}: {found}")


def _overlap(pieces: Sequence[GridPiece], ndim: int) -> tuple[GridPiece, GridPiece] | None:
    """Return two pieces with a common target element, or None."""
    if len(pieces) < 2:
        return None
    steps = [1] * ndim
    for piece in pieces:
        for link in piece.links:
            steps[link.target] = math.lcm(steps[link.target], link.target_step)
    # with a common step s, an index i is (i % s, i // s), and a grid consists of a few boxes of such pairs
    start, shape, owner = [], [], []
    for at, piece in enumerate(pieces):
        linked = {link.target: link for link in piece.links}
        for box in _product(_residues(piece.target_start[dim], linked.get(dim), steps[dim]) for dim in range(ndim)):
            start.append([value for part in box for value in part[0]])
            shape.append([value for part in box for value in part[1]])
            owner.append(at)
    if not ndim:
        return pieces[0], pieces[1]
    found = find_overlap(np.array(start, np.int64), np.array(shape, np.int64), np.zeros(len(owner), np.int64))
    return None if found is None else (pieces[owner[found[0]]], pieces[owner[found[1]]])


GridPart = tuple[tuple[int, int], tuple[int, int]]


def _residues(start: int, link: Link | None, step: int) -> list[GridPart]:
    """Return the elements in one dimension as boxes ``(start, shape)`` of (remainder, quotient)."""
    if link is None:
        return [((start % step, start // step), (1, 1))]
    found: list[GridPart] = []
    times = step // link.target_step
    for turn in range(min(times, link.extent)):
        first = start + turn * link.target_step
        found.append(((first % step, first // step), (1, (link.extent - turn - 1) // times + 1)))
    return found


def _product(parts: Iterable[list[GridPart]]) -> list[list[GridPart]]:
    found: list[list[GridPart]] = [[]]
    for each in parts:
        found = [[*before, part] for before in found for part in each]
    return found
