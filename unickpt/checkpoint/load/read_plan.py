"""Plan reads. Pure functions, no I/O, no communication.

Every rank computes its own part from the index and the topology.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unickpt.base.arrays import Ints
from unickpt.base.errors import CoverageError
from unickpt.checkpoint.format.boxes import Box, find_overlap, intersect_many
from unickpt.checkpoint.format.index import Index, IndexRows
from unickpt.checkpoint.format.linear_order import ranges, volumes


@dataclass(frozen=True, slots=True)
class Target:
    """A requested region of a stored tensor.

    Attributes:
        tensor_id: position of the tensor in the index.
        box: region of the tensor.
    """

    tensor_id: int
    box: Box


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Parts of fragments to copy to targets.

    Attributes:
        fragment: int64 ``[n]``, row of the index. Sorted by (file, offset), so that one pass over the plan reads every file
            front to back and each fragment once.
        target: int64 ``[n]``, position in the list of targets.
        start: int64 ``[n, ndim]``, start of the common region in coordinates of the tensor, padded like the index.
        shape: int64 ``[n, ndim]``, shape of the common region.
    """

    fragment: Ints
    target: Ints
    start: Ints
    shape: Ints

    def rows(self) -> Ints:
        """Return the rows of the index that the plan reads, int64, sorted and unique."""
        return np.unique(self.fragment)

    def mostly_needed(self, index: Index) -> Ints:
        """Return the rows, int64, sorted and unique, of which the plan needs more than half of the blocks, or the only one."""
        if not len(self.fragment):
            return self.fragment
        first = np.flatnonzero(np.diff(self.fragment, prepend=-1))
        rows = self.fragment[first]
        near = index.take(self.fragment)
        begin, last = np.zeros(len(near.start), np.int64), np.zeros(len(near.start), np.int64)
        for dim in range(index.ndim):
            begin = begin * near.shape[:, dim] + self.start[:, dim] - near.start[:, dim]
            last = last * near.shape[:, dim] + self.start[:, dim] + self.shape[:, dim] - 1 - near.start[:, dim]
        item = index.itemsizes()[near.tensor[first]]
        needed = (np.maximum.reduceat(last, first) + 1 - np.minimum.reduceat(begin, first)) * item
        size = near.size_bytes[first]
        whole = (size < 2 * index.block_bytes) if index.block_bytes else np.ones(len(size), bool)
        return np.sort(rows[whole | (2 * needed > size)])

    def only(self, rows: Ints, *, without: bool = False) -> ReadPlan:
        """Return the part of the plan that reads the given rows of the index; with ``without`` the other part."""
        keep = np.isin(self.fragment, rows, invert=without)
        return ReadPlan(self.fragment[keep], self.target[keep], self.start[keep], self.shape[keep])


def plan_reads(index: Index, targets: Sequence[Target], *, allow_partial: frozenset[int] = frozenset()) -> ReadPlan:
    """Intersect the targets with the stored fragments.

    Args:
        index: index of the checkpoint.
        targets: requested regions, in any order. None is empty.
        allow_partial: ids of tensors whose targets need not be covered. These are derived tensors: their fragments override
            parts of a cast.

    Returns:
        The plan.

    Raises:
        CoverageError: fragments do not cover a target, or cover an element twice.
    """
    ndim = index.ndim
    ids = np.array([target.tensor_id for target in targets], np.int64)
    start = np.zeros((len(targets), ndim), np.int64)
    shape = np.ones((len(targets), ndim), np.int64)
    for at, target in enumerate(targets):
        start[at, : target.box.ndim] = target.box.start[:ndim]
        shape[at, : target.box.ndim] = target.box.shape[:ndim]
    aim, rows, near, row = _near(index, ids, start, shape)
    common_start, common_shape = intersect_many(start[aim], shape[aim], near.start[row], near.shape[row])
    keep = (common_shape > 0).all(axis=1)
    aim, row, common_start, common_shape = aim[keep], row[keep], common_start[keep], common_shape[keep]
    fragment = rows[row]
    _check_covered(index, targets, ReadPlan(fragment, aim, common_start, common_shape), allow_partial)
    order = np.lexsort((near.offset_bytes[row], near.file[row]))
    return ReadPlan(fragment[order], aim[order], common_start[order], common_shape[order])


def _near(index: Index, ids: Ints, start: Ints, shape: Ints) -> tuple[Ints, Ints, IndexRows, Ints]:
    """Return ``(target, rows, near, row)``: all pairs of a target and a fragment, ``rows[row]``, that can overlap.

    ``rows`` are numbers of rows of the index, and ``near`` are these rows.

    On the index's line a box lies between the places of its first and last element. Rows are sorted by the first place. The
    running maximum of the last place is sorted too, so the candidates of a target are one range of rows.
    """
    wanted = np.unique(ids)
    rows = ranges(index.first_row[wanted], index.fragments[wanted])
    near = index.take(rows)
    first = index.order.positions(near.tensor, near.start.T)
    reach = np.maximum.accumulate(index.order.positions(near.tensor, (near.start + near.shape - 1).T))
    lo = np.searchsorted(reach, index.order.positions(ids, start.T))
    hi = np.searchsorted(first, index.order.positions(ids, (start + shape - 1).T), side="right")
    count = np.maximum(hi - lo, 0)
    return np.repeat(np.arange(len(ids), dtype=np.int64), count), rows, near, ranges(lo, count)


def _check_covered(index: Index, targets: Sequence[Target], plan: ReadPlan, allow_partial: frozenset[int]) -> None:
    covered = np.zeros(len(targets), np.int64)
    np.add.at(covered, plan.target, volumes(plan.shape))
    clash = find_overlap(plan.start, plan.shape, plan.target)
    twice = None if clash is None else int(plan.target[clash[0]])
    for at, (target, got) in enumerate(zip(targets, covered.tolist(), strict=True)):
        want = target.box.numel
        if at == twice or got > want or (got < want and target.tensor_id not in allow_partial):
            info = index.tensors[target.tensor_id]
            raise CoverageError(
                f"{info.name} ({info.state}) region {target.box}: stored fragments cover {got} of {want} elements"
                + (", some of them twice" if at == twice else "")
            )
