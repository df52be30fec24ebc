"""The box algebra against numpy: every split covers exactly once, contiguous, and reassembles."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unickpt.checkpoint.format.boxes import (
    Box,
    boxes_of_view,
    contiguous_runs,
    cut,
    find_overlap,
    flat_range,
    intersect_many,
    split_flat_range,
)

SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def shape_and_range(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    total = math.prod(shape)
    lo = draw(st.integers(0, total))
    return shape, lo, draw(st.integers(lo, total))


@st.composite
def shape_and_box(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> tuple[tuple[int, ...], Box]:
    shape = draw(SHAPES) if shape is None else shape
    start = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return shape, Box(start, tuple(draw(st.integers(1, n - s)) for s, n in zip(start, shape, strict=True)))


@given(shape_and_range())
@settings(max_examples=400)
def test_every_split_of_a_flat_range_covers_it_once_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, lo, hi = case
    numbers = np.arange(math.prod(shape)).reshape(shape)
    boxes = split_flat_range(shape, lo, hi)
    pieces = [numbers[box.slices()].reshape(-1) for box in boxes]
    assert np.concatenate([np.zeros(0, int), *pieces]).tolist() == list(range(lo, hi))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    for box in boxes:
        ends = flat_range(box, shape)
        assert ends is not None, f"{box} is not contiguous in {shape}"
        assert ends[1] - ends[0] == box.numel


@given(shape_and_box(), st.integers(1, 50))
def test_a_box_cut_to_a_limit_is_the_box_in_its_order(case: tuple[tuple[int, ...], Box], limit: int) -> None:
    shape, box = case
    numbers = np.arange(math.prod(shape)).reshape(shape)
    pieces = cut(box, limit)
    assert all(0 < piece.numel <= limit for piece in pieces)
    assert (
        np.concatenate([numbers[p.slices()].reshape(-1) for p in pieces]).tolist() == numbers[box.slices()].reshape(-1).tolist()
    )
    assert all(flat_range(p.within(box), box.shape) is not None for p in pieces)


@given(SHAPES, st.integers(1, 7))
def test_partitions_of_a_tensor_reassemble_it(shape: tuple[int, ...], parts: int) -> None:
    numbers = np.arange(math.prod(shape), dtype=np.int64)
    cuts = [len(numbers) * part // parts for part in range(parts + 1)]
    out = np.full(shape, -1, np.int64)
    for lo, hi in itertools.pairwise(cuts):
        at = lo
        for box in split_flat_range(shape, lo, hi):
            out[box.slices()] = numbers[at : at + box.numel].reshape(box.shape)
            at += box.numel
    assert out.reshape(-1).tolist() == numbers.tolist()


@given(st.data())
@settings(max_examples=300)
def test_intersections_agree_with_numpy(data: st.DataObject) -> None:
    shape, a = data.draw(shape_and_box())
    _, b = data.draw(shape_and_box(shape=shape))
    left, right = np.zeros(shape, bool), np.zeros(shape, bool)
    left[a.slices()] = True
    right[b.slices()] = True
    both = left & right
    common = a.intersect(b)
    assert (common is None) == (not both.any())
    if common is not None:
        found = np.zeros(shape, bool)
        found[common.slices()] = True
        assert (found == both).all()
        numbers = np.arange(math.prod(shape)).reshape(shape)
        assert (numbers[a.slices()][common.within(a).slices()] == numbers[common.slices()]).all()
    rows = [np.array([x], np.int64).reshape(1, -1) for x in (a.start, a.shape, b.start, b.shape)]
    start, extent = intersect_many(*rows)
    assert (common is None) == bool((extent <= 0).any())
    if common is not None:
        assert (tuple(start[0]), tuple(extent[0])) == (common.start, common.shape)


@given(shape_and_box())
def test_contiguous_runs_are_the_boxs_elements_in_order(case: tuple[tuple[int, ...], Box]) -> None:
    shape, box = case
    numbers = np.arange(math.prod(shape)).reshape(shape)
    offsets, run = contiguous_runs(box, shape)
    found = (offsets[:, None] + np.arange(run)[None, :]).reshape(-1)
    assert found.tolist() == numbers[box.slices()].reshape(-1).tolist()
    ends = flat_range(box, shape)
    assert (ends is not None) == (len(found) == 0 or bool((np.diff(found) == 1).all()))
    if ends is not None:
        assert ends == (found[0], found[-1] + 1)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_overlaps_are_found_if_and_only_if_they_exist(data: st.DataObject) -> None:
    shape, first = data.draw(shape_and_box(shape=data.draw(SHAPES.filter(lambda s: len(s) > 0))))
    boxes = [first, *(data.draw(shape_and_box(shape=shape))[1] for _ in range(data.draw(st.integers(0, 8))))]
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[box.slices()] += 1
    start, extent = (np.array([getattr(b, name) for b in boxes], np.int64) for name in ("start", "shape"))
    clash = find_overlap(start, extent, block=data.draw(st.integers(1, 4)))
    assert (clash is not None) == bool((counts > 1).any())
    if clash is not None:
        assert clash[0] != clash[1]
        assert boxes[clash[0]].intersect(boxes[clash[1]]) is not None


@st.composite
def grouped_boxes(draw: st.DrawFn) -> tuple[list[int], list[Box]]:
    """Boxes of several tensors, in any order: each tensor cut along a grid, flat ranges in its cells, and some strays."""
    found: list[tuple[int, Box]] = []
    for group in draw(st.lists(st.integers(0, 60), max_size=3, unique=True)):
        shape = draw(st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3)))
        dim = draw(st.integers(0, 2))
        cut = draw(st.integers(0, shape[dim]))
        for lo, hi in ((0, cut), (cut, shape[dim])):
            cell = tuple(hi - lo if d == dim else n for d, n in enumerate(shape))
            inner = draw(st.lists(st.integers(0, math.prod(cell)), max_size=4))
            for a, b in itertools.pairwise(sorted({0, math.prod(cell), *inner})):
                for box in split_flat_range(cell, a, b):
                    found.append((group, Box(tuple(s + lo * (d == dim) for d, s in enumerate(box.start)), box.shape)))
        found += [(group, draw(shape_and_box(shape=shape))[1]) for _ in range(draw(st.integers(0, 1)))]
    found = draw(st.permutations(found))
    return [group for group, _ in found], [box for _, box in found]


@given(grouped_boxes(), st.sampled_from([1, 2**58]))
@settings(max_examples=300, deadline=None)
def test_overlaps_within_groups_are_those_of_all_pairs(case: tuple[list[int], list[Box]], scale: int) -> None:
    """Also of boxes so large that a group's number and a coordinate do not fit into one integer."""
    groups, boxes = case
    pairs = {
        (a, b)
        for a, b in itertools.combinations(range(len(boxes)), 2)
        if groups[a] == groups[b] and boxes[a].intersect(boxes[b]) is not None
    }
    start, extent = (np.array([getattr(b, name) for b in boxes], np.int64).reshape(-1, 3) for name in ("start", "shape"))
    clash = find_overlap(start * scale, extent * scale, np.array(groups, np.int32), block=2)
    assert (clash is None) == (not pairs)
    assert clash is None or tuple(sorted(clash)) in pairs


def test_boxes_that_no_cut_separates_are_compared_pair_by_pair() -> None:
    """A pinwheel: four boxes around a middle one."""
    boxes = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
    start, extent = (np.array([getattr(b, name) for b in boxes], np.int64) for name in ("start", "shape"))
    assert find_overlap(start, extent) is None
    extent[4, 1] = 2
    clash = find_overlap(start, extent)
    assert clash is not None
    assert set(clash) == {1, 4}


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"outside a tensor of shape \(2, 3\)"):
        split_flat_range((2, 3), 4, 7)
    with pytest.raises(ValueError, match="differ in their number of dimensions"):
        Box((0,), (1, 2))
    with pytest.raises(ValueError, match="must not be negative"):
        Box((-1,), (1,))
    with pytest.raises(ValueError, match="is not inside"):
        Box((0,), (3,)).within(Box((1,), (3,)))


@st.composite
def nested_views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """A small storage, a view of it by slicing, splitting and permuting, and a range of the storage."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    storage = torch.arange(math.prod(shape) + 3)
    view = storage[2 : 2 + math.prod(shape)].view(shape)
    for dim, n in enumerate(shape):
        start = draw(st.integers(0, n - 1))
        view = view.narrow(dim, start, draw(st.integers(0, n - start)))
    view = view.permute(draw(st.permutations(range(len(shape)))))
    lo = draw(st.integers(0, len(storage)))
    return storage, view, lo, draw(st.integers(lo, len(storage)))


@given(nested_views())
def test_range_of_a_strided_view(case: tuple[torch.Tensor, torch.Tensor, int, int]) -> None:
    storage, view, lo, hi = case
    seen = torch.zeros(view.shape, dtype=torch.int)
    for box, at in boxes_of_view(view.shape, view.stride(), view.storage_offset(), lo, hi):
        assert torch.equal(view[box.slices()], storage.as_strided(box.shape, view.stride(), at))
        seen[box.slices()] += 1
    assert torch.equal(seen, ((view >= lo) & (view < hi)).int())


def test_interleaved_view_is_refused() -> None:
    with pytest.raises(ValueError, match="not nested"):
        boxes_of_view((2, 3), (2, 1), 0, 0, 6)
