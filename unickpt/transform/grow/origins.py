"""Positions of the elements of a source tensor in the grown tensor, one dimension at a time. Pure functions.

The origin of a dimension is an array with one number per position of the grown tensor: the position in the source, or -1.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unickpt.base.arrays import Ints
from unickpt.transform.dialects.arrangement import Arrangement, Axis, Concatenation, Node

GROUP, QUERY = Axis("group"), Axis("query")


@dataclass(frozen=True, slots=True)
class PositionRun:
    """Consecutive positions of a dimension.

    Attributes:
        start, length: positions in the grown tensor.
        origin: first position in the source, or -1 for new positions.
        copies: number of positions in the grown tensor with the same origin.
    """

    start: int
    length: int
    origin: int
    copies: int = 1


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads before and after.

    Each group of the source becomes ``repeats`` groups with the same key and value, which share its queries.

    Attributes:
        groups, queries: numbers of key and value heads, and of queries of each, in the source.
        new_groups, new_queries: the same numbers in the grown model.
    """

    groups: int
    queries: int
    new_groups: int
    new_queries: int

    @property
    def repeats(self) -> int:
        return -(-self.queries // self.new_queries)

    def keys(self) -> Ints:
        """Return the origin of key and value heads."""
        at = np.arange(self.new_groups, dtype=np.int64)
        return np.where(at < self.groups * self.repeats, at // self.repeats, -1)

    def query_heads(self) -> Ints:
        """Return the origin of query heads, which are ordered by group."""
        group, query = np.divmod(np.arange(self.new_groups * self.new_queries, dtype=np.int64), self.new_queries)
        old_query = group % self.repeats * self.new_queries + query
        known = (group < self.groups * self.repeats) & (old_query < self.queries)
        return np.where(known, group // self.repeats * self.queries + old_query, -1)


def origins(arrangement: Arrangement, old: Mapping[str, int], new: Mapping[str, int], heads: Heads | None) -> list[Ints]:
    """Return the origin of every dimension.

    Args:
        arrangement: arrangement of the tensor.
        old, new: sizes of all its axes.
        heads: attention heads, if it has the axes ``group`` or ``query``.

    Raises:
        KeyError: the size of an axis is unknown.
    """
    return [_origin(node, old, new, heads)[0] for node in arrangement.dimensions]


def runs(origin: Ints, start: int, stop: int, copies: Ints) -> list[PositionRun]:
    """Return the runs of positions ``start`` to ``stop``. ``copies`` has the number of copies of each position."""
    part, count = origin[start:stop], copies[start:stop]
    step = np.diff(part)
    breaks = np.where(part[1:] < 0, part[:-1] >= 0, (step != 1) | (part[:-1] < 0)) | (np.diff(count) != 0)
    firsts = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(part)]
    return [PositionRun(start + a, b - a, int(part[a]), int(count[a])) for a, b in itertools.pairwise(firsts) if b > a]


def copies_of(origin: Ints) -> Ints:
    """Return the number of positions with the same origin, for every position; 1 for new positions."""
    known = origin[origin >= 0]
    counts = np.bincount(known) if len(known) else np.zeros(1, np.int64)
    return np.where(origin >= 0, counts[np.maximum(origin, 0)], 1).astype(np.int64)


def _origin(node: Node, old: Mapping[str, int], new: Mapping[str, int], heads: Heads | None) -> tuple[Ints, int]:
    """Return the origin of a node, and its number of elements in the source."""
    if isinstance(node, Axis):
        return _axis(node, old, new, heads)
    if isinstance(node, Concatenation):
        parts, before = [], 0
        for option in node.options:
            found, size = _origin(option, old, new, heads)
            parts.append(np.where(found >= 0, found + before, -1))
            before += size
        return np.concatenate(parts), before
    return _product(node.factors, old, new, heads)


def _product(factors: Sequence[Node], old: Mapping[str, int], new: Mapping[str, int], heads: Heads | None) -> tuple[Ints, int]:
    total, size = np.zeros(1, np.int64), 1
    at = 0
    while at < len(factors):
        if heads is not None and tuple(factors[at : at + 2]) == (GROUP, QUERY):
            found, extent = heads.query_heads(), heads.groups * heads.queries
            at += 2
        else:
            found, extent = _origin(factors[at], old, new, heads)
            at += 1
        joined = total[:, None] * extent + found
        total = np.where((total[:, None] < 0) | (found < 0), -1, joined).reshape(-1)
        size *= extent
    return total, size


def _axis(node: Axis, old: Mapping[str, int], new: Mapping[str, int], heads: Heads | None) -> tuple[Ints, int]:
    if node.name == "1":
        return np.zeros(1, np.int64), 1
    if node == GROUP and heads is not None:
        return heads.keys(), heads.groups
    before, after = old[node.name], new[node.name]
    at = np.arange(after, dtype=np.int64)
    return np.where(at < before, at, -1), before
