"""Planning: reads that find every wanted element."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.handmade import index_of
from unickpt.base.errors import CoverageError
from unickpt.checkpoint.format.boxes import Box, split_flat_range
from unickpt.checkpoint.format.index import FragmentRow, TensorInfo, check_coverage
from unickpt.checkpoint.load.read_plan import Target, plan_reads


def _rows(info: TensorInfo, cuts: list[int]) -> list[FragmentRow]:
    return [
        FragmentRow(info, box, 8 * lo, 0) for lo, hi in itertools.pairwise(cuts) for box in split_flat_range(info.shape, lo, hi)
    ]


@given(st.data())
@settings(max_examples=200)
def test_a_plan_reads_every_requested_element_from_its_fragment(data: st.DataObject) -> None:
    """Any partition on the writing side, any on the reading side, several tensors of different rank."""
    rows, infos, targets, wanted = [], [], [], []
    for number in range(data.draw(st.integers(1, 3))):
        shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))
        total = math.prod(shape)
        info = TensorInfo(f"t{number}", "weight", "F32", shape, "parameter")
        infos.append(info)
        rows += _rows(info, sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=4))}))
        lo = data.draw(st.integers(0, total - 1))
        for box in split_flat_range(shape, lo, data.draw(st.integers(lo, total))):
            targets.append((info, box))
    index = index_of(rows)
    ids = index.ids()
    wanted = [Target(ids[info.key], box) for info, box in targets]
    plan = plan_reads(index, wanted)
    found = [np.zeros(index.tensors[t.tensor_id].shape, int) for t in wanted]
    for fragment, target, start, shape in zip(plan.fragment, plan.target, plan.start, plan.shape, strict=True):
        ndim = wanted[target].box.ndim
        region = Box(tuple(start[:ndim].tolist()), tuple(shape[:ndim].tolist()))
        assert index.tensor[fragment] == wanted[target].tensor_id
        assert region.within(index.box(int(fragment)))
        found[target][region.slices()] += 1
    for target, count in zip(wanted, found, strict=True):
        expected = np.zeros(count.shape, int)
        expected[target.box.slices()] = 1
        assert (count == expected).all()


def _cuts(data: st.DataObject, length: int) -> list[int]:
    return sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=2))})


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_plan_has_exactly_the_common_regions(data: st.DataObject) -> None:
    """Against every target with every fragment: columns, so that the ranges of places overlap widely."""
    rows, targets = [], []
    for number in range(data.draw(st.integers(1, 3))):
        shape = data.draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
        info = TensorInfo(f"t{number}", "weight", "F32", shape, "parameter")
        for cells in (rows, targets):
            for left, right in itertools.pairwise(_cuts(data, shape[1])):  # every column is cut in its own way
                for top, bottom in itertools.pairwise(_cuts(data, shape[0])):
                    box = Box((top, left), (bottom - top, right - left))
                    cells.append(FragmentRow(info, box, 64 * len(cells), 0) if cells is rows else (info, box))
    index = index_of(rows)
    ids = index.ids()
    wanted = [Target(ids[info.key], box) for info, box in data.draw(st.permutations(targets))]
    plan = plan_reads(index, wanted)
    expected = set()
    for at, target in enumerate(wanted):
        for row in index.rows_of(target.tensor_id):
            common = target.box.intersect(index.box(row))
            if common is not None:
                expected.add((at, row, common.start, common.shape))
    columns = (plan.target.tolist(), plan.fragment.tolist(), map(tuple, plan.start.tolist()), map(tuple, plan.shape.tolist()))
    found = list(zip(*columns, strict=True))
    assert set(found) == expected
    assert len(found) == len(expected)
    assert [int(index.offset_bytes[row]) for _, row, _, _ in found] == sorted(
        int(index.offset_bytes[r]) for _, r, _, _ in found
    )


def test_a_hole_is_an_error_that_names_the_tensor() -> None:
    info = TensorInfo("model.w", "exp_avg", "F32", (4, 4), "optimizer")
    rows = [row for row in _rows(info, [0, 4, 12, 16]) if row.box.start != (1, 0)]
    index = index_of(rows)
    with pytest.raises(CoverageError, match=r"model.w \(exp_avg\) region \[0:4,0:4\]: stored fragments cover 8 of 16"):
        plan_reads(index, [Target(0, Box.whole((4, 4)))])
    with pytest.raises(CoverageError, match=r"model.w \(exp_avg\) of shape \(4, 4\): fragments cover 8 of 16 elements"):
        check_coverage(index)
    assert len(plan_reads(index, [Target(0, Box.whole((4, 4)))], allow_partial=frozenset({0})).fragment) == 2
