"""What to write where, what to read from where. Pure functions, no I/O, no communication.

Every rank computes its own part from the topology and from the index alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unickpt.errors import CoverageError
from unickpt.fragments import Box, Ints, find_overlap, intersect_many
from unickpt.index import Index


def share_of_replicas(sizes_bytes: Sequence[int], numels: Sequence[int], *, rank: int, world: int) -> list[tuple[int, int]]:
    """The part of replicated tensors that one rank writes.

    The tensors are laid end to end and the line is cut into ``world`` equal lengths, so the ranks
    write the same number of bytes (to within one element per cut) and every element is written by
    exactly one of them. Nothing is communicated: every rank evaluates the same arithmetic.

    Args:
        sizes_bytes, numels: of every replicated tensor, in an order that all ranks share.
        rank, world: this writer among those that hold the same replicas.

    Returns:
        For each tensor the flat element range ``[lo, hi)`` that this rank writes, possibly empty.
    """
    total = sum(sizes_bytes)
    begin, end = total * rank // world, total * (rank + 1) // world
    ranges = []
    at = 0
    for size, numel in zip(sizes_bytes, numels, strict=True):
        itemsize = size // numel if numel else 1
        lo = min(max(-(-(begin - at) // itemsize), 0), numel)
        hi = min(max(-(-(end - at) // itemsize), 0), numel)
        ranges.append((lo, hi))
        at += size
    return ranges


@dataclass(frozen=True, slots=True)
class Target:
    """A region of a stored tensor that a rank wants."""

    tensor_id: int
    box: Box


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Which part of which fragment goes to which target.

    Attributes:
        fragment: int64 ``[n]``, row of the index; rows sorted by (file, offset), so that one pass
            over the plan reads every file front to back and no fragment twice.
        target: int64 ``[n]``, position in the list of targets.
        start, shape: int64 ``[n, ndim]``, the common region in the tensor's own coordinates, padded
            like the index.
    """

    fragment: Ints
    target: Ints
    start: Ints
    shape: Ints

    def rows(self) -> Ints:
        """The rows of the index that it reads, sorted, each once."""
        return np.unique(self.fragment)

    def only(self, rows: Ints, *, without: bool = False) -> ReadPlan:
        """The part of it that reads these rows of the index, or reads others."""
        keep = np.isin(self.fragment, rows, invert=without)
        return ReadPlan(self.fragment[keep], self.target[keep], self.start[keep], self.shape[keep])


def plan_reads(index: Index, targets: Sequence[Target], *, allow_partial: frozenset[int] = frozenset()) -> ReadPlan:
    """Intersect the targets with the stored fragments.

    Args:
        index: of the checkpoint.
        targets: regions wanted, in any order; none is empty.
        allow_partial: ids of tensors whose targets need not be covered (derived tensors, whose
            fragments only override).

    Raises:
        CoverageError: a target is not covered exactly once by fragments.
    """
    ndim = index.start.shape[1]
    ids = np.array([target.tensor_id for target in targets], np.int64)
    start = np.zeros((len(targets), ndim), np.int64)
    shape = np.ones((len(targets), ndim), np.int64)
    for at, target in enumerate(targets):
        start[at, : target.box.ndim] = target.box.start[:ndim]
        shape[at, : target.box.ndim] = target.box.shape[:ndim]
    first = np.searchsorted(index.tensor, ids, side="left")
    count = np.searchsorted(index.tensor, ids, side="right") - first
    pair_target = np.repeat(np.arange(len(targets), dtype=np.int64), count)
    within = np.arange(len(pair_target), dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)
    pair_fragment = np.repeat(first, count) + within
    common_start, common_shape = intersect_many(
        start[pair_target], shape[pair_target], index.start[pair_fragment], index.shape[pair_fragment]
    )
    keep = (common_shape > 0).all(axis=1)
    pair_target, pair_fragment = pair_target[keep], pair_fragment[keep]
    common_start, common_shape = common_start[keep], common_shape[keep]
    _check_covered(index, targets, pair_target, common_start, common_shape, allow_partial)
    order = np.lexsort([index.offset_bytes[pair_fragment], index.file[pair_fragment]])
    return ReadPlan(pair_fragment[order], pair_target[order], common_start[order], common_shape[order])


def _check_covered(
    index: Index,
    targets: Sequence[Target],
    pair_target: Ints,
    common_start: Ints,
    common_shape: Ints,
    allow_partial: frozenset[int],
) -> None:
    order = np.argsort(pair_target, kind="stable")
    bounds = np.searchsorted(pair_target[order], np.arange(len(targets) + 1))
    covered = np.zeros(len(targets), np.int64)
    np.add.at(covered, pair_target, common_shape.prod(axis=1, dtype=np.int64))
    for at, target in enumerate(targets):
        got, want = int(covered[at]), target.box.numel
        rows = order[bounds[at] : bounds[at + 1]]
        twice = len(rows) > 1 and find_overlap(common_start[rows], common_shape[rows]) is not None
        if twice or got > want or (got < want and target.tensor_id not in allow_partial):
            info = index.tensors[target.tensor_id]
            raise CoverageError(
                f"{info.name} ({info.state}) region {target.box}: stored fragments cover {got} of {want} elements"
                + (", some of them twice" if twice else "")
            )
