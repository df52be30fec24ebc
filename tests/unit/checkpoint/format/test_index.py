"""The fragment table: merging ranks, surviving the disk, refusing what is inconsistent."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tests.support.handmade import index_of
from unickpt.base.errors import CoverageError, FormatError
from unickpt.checkpoint.format import index_codec, rank_rows
from unickpt.checkpoint.format.boxes import Box, split_flat_range
from unickpt.checkpoint.format.index import FragmentRow, Index, TensorInfo, check_coverage

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def parts(draw: st.DrawFn) -> tuple[list[TensorInfo], list[tuple[str, bytes]]]:
    """Tensors cut over some ranks, as ZeRO would."""
    world = draw(st.integers(1, 4))
    infos = [
        TensorInfo(f"p{n}", "master", draw(st.sampled_from(["F32", "BF16"])), draw(SHAPES), "parameter")
        for n in range(draw(st.integers(0, 4)))
    ]
    found = []
    for rank in range(world):
        fragments = []
        for info in infos:
            lo, hi = (info.numel * r // world for r in (rank, rank + 1))
            fragments += [FragmentRow(info, box, 16 * n, rank) for n, box in enumerate(split_flat_range(info.shape, lo, hi))]
        found.append((f"data/rank{rank}", rank_rows.to_bytes(fragments, infos)))
    return infos, found


@given(parts())
@settings(deadline=None)
def test_merged_parts_cover_everything_and_come_back_from_bytes(case: tuple[list[TensorInfo], list[tuple[str, bytes]]]) -> None:
    infos, found = case
    merged = rank_rows.merge(found)
    check_coverage(merged)
    assert merged.tensors == tuple(sorted(infos, key=lambda info: info.key))
    assert int(merged.numel().sum()) == sum(info.numel for info in infos)
    again = index_codec.from_bytes(index_codec.to_bytes(merged), where="here")
    assert (again.tensors, again.files) == (merged.tensors, merged.files)
    for column in COLUMNS:
        assert (getattr(again, column) == getattr(merged, column)).all()
        assert getattr(again, column).dtype == getattr(merged, column).dtype


COLUMNS = ("tensor", "file", "offset_bytes", "checksum", "start", "shape")


@given(parts())
@settings(deadline=None)
def test_an_index_has_every_row_that_a_rank_brought(case: tuple[list[TensorInfo], list[tuple[str, bytes]]]) -> None:
    """Against one rank's rows at a time, in dictionaries."""
    merged = rank_rows.merge(case[1])
    expected = set()
    for file, data in case[1]:
        one = rank_rows.merge([(file, data)])
        for row in range(len(one)):
            expected.add((one.tensors[one.tensor[row]], file, int(one.offset_bytes[row]), int(one.checksum[row]), one.box(row)))
    found = [
        (merged.tensors[merged.tensor[row]], merged.files[merged.file[row]], int(merged.offset_bytes[row]),
         int(merged.checksum[row]), merged.box(row))
        for row in range(len(merged))
    ]  # fmt: skip
    assert set(found) == expected
    assert len(found) == len(expected)
    assert [(row[0].key, row[4].start) for row in found] == sorted((row[0].key, row[4].start) for row in found)


def test_states_that_are_cut_alike_share_their_boxes() -> None:
    """Their boxes are in the file once, unless one row differs."""
    infos = [TensorInfo("w", state, "F32", (6, 4), "optimizer") for state in ("a", "b", "c")]
    cuts = [(0, 7), (7, 24)]
    sound = [
        FragmentRow(info, box, 8 * at, at)
        for info in infos
        for at, cut in enumerate(cuts)
        for box in split_flat_range((6, 4), *cut)
    ]
    index = index_of(sound)
    assert index.same_boxes.tolist() == [False, True, True]
    other = [row for row in sound if row.tensor.state != "b"]
    other += [FragmentRow(infos[1], box, 0, 0) for cut in ((0, 8), (8, 24)) for box in split_flat_range((6, 4), *cut)]
    assert index_of(other).same_boxes.tolist() == [False, False, False]
    for one in (index, index_of(other)):
        again = index_codec.from_bytes(index_codec.to_bytes(one), where="here")
        assert all((getattr(again, column) == getattr(one, column)).all() for column in COLUMNS)
    apart = [FragmentRow(info, Box((at, 0), (1, 4)), 16 * at, 0) for at, info in enumerate(infos)]
    assert not index_of(apart).same_boxes.any()
    renamed = rank_rows.merge([("a", rank_rows.to_bytes(sound[:3])), ("b", rank_rows.to_bytes(sound[3:]))])
    assert renamed.same_boxes.tolist()[1] is False  # the same boxes, on other files


def test_rows_that_are_damaged_are_refused() -> None:
    info = TensorInfo("w", "weight", "F32", (4, 4), "parameter")
    good = rank_rows.to_bytes([FragmentRow(info, Box.whole((4, 4)), 0, 0)])
    for bad, words in (
        (good[:-1], "header describes"),
        (good + b" ", "header describes"),
        (b"", "too few"),
        (good.replace(b"unickpt-rows", b"unickpt-rovs"), "not an index-rows file"),
        (
            rank_rows.pack(np.array([[1, 0, 0, 0, 0, 4, 4]]), rank_rows.packed_table([info]), []),
            "refers to tensor 1, which is not in the table",
        ),
        (rank_rows.pack(np.array([[0, 0, 0, 0, 0, 5, 4]]), rank_rows.packed_table([info]), []), "leaves its tensor"),
        (rank_rows.pack(np.array([[0, -8, 0, 0, 0, 4, 4]]), rank_rows.packed_table([info]), []), "negative byte offset"),
        (rank_rows.pack(np.array([[0, 0, 0, 0]]), rank_rows.packed_table([info]), []), "rows have 4 columns"),
    ):
        with pytest.raises(FormatError, match=words):
            rank_rows.merge([("data/rank00000", bad)])
    with pytest.raises(FormatError, match=r"ranks wrote to the same file: \['data/x'\]"):
        rank_rows.merge([("data/x", good), ("data/x", good)])


def _box_rows(info: TensorInfo, *boxes: Box) -> Index:
    return index_of([FragmentRow(info, box, 0, 0) for box in boxes])


def test_an_overlap_is_named() -> None:
    info = TensorInfo("w", "weight", "F32", (4, 4), "parameter")
    index = _box_rows(info, Box((0, 0), (4, 3)), Box((0, 2), (4, 2)))
    with pytest.raises(CoverageError, match=r"w \(weight\): fragments \[0:4,0:3\] and \[0:4,2:4\] overlap"):
        check_coverage(index)


def test_a_derived_tensor_may_be_partly_overridden_but_needs_its_source() -> None:
    master = TensorInfo("w", "master", "F32", (4,), "parameter")
    weight = TensorInfo("w", "weight", "BF16", (4,), "parameter", derived_from="master")
    whole = FragmentRow(master, Box((0,), (4,)), 0, 0)
    part = FragmentRow(weight, Box((1,), (1,)), 16, 0)
    check_coverage(index_of([whole, part]))
    with pytest.raises(CoverageError, match="derived from master, which is not stored"):
        check_coverage(index_of([part]))


def test_ranks_that_disagree_on_a_shape_are_refused() -> None:
    a, b = (TensorInfo("w", "weight", "F32", shape, "parameter") for shape in ((4,), (5,)))
    with pytest.raises(CoverageError, match="ranks disagree on tensor w"):
        rank_rows.merge([(info.name, rank_rows.to_bytes([], [info])) for info in (a, b)])


def test_any_safetensors_reader_opens_the_index(tmp_path: Path) -> None:
    info = TensorInfo("w", "weight", "F32", (4, 4), "parameter")
    path = tmp_path / "index.safetensors"
    path.write_bytes(index_codec.to_bytes(_box_rows(info, *split_flat_range((4, 4), 0, 16))))
    with safe_open(path, "np") as file:
        assert [file.get_tensor(f"shape.{dim}").tolist() for dim in (0, 1)] == [[4], [4]]
        assert file.metadata()["format"] == "unickpt-index"


def test_a_million_fragments_merge_and_query_without_python_loops() -> None:
    """Not a timed test: it would not end within the suite's limit if rows were walked one by one."""
    count = 1_000_000
    info = TensorInfo("w", "master", "F32", (count, 8), "parameter")
    start = np.zeros((count, 2), np.int64)
    start[:, 0] = np.arange(count)
    index = Index.of_rows(
        (info,), ("f",), np.zeros(count, np.int32), np.zeros(count, np.int32), 32 * np.arange(count, dtype=np.int64),
        np.zeros(count, np.uint64), start, np.tile(np.array([1, 8], np.int64), (count, 1)),
    )  # fmt: skip
    check_coverage(index)
    assert len(index_codec.from_bytes(index_codec.to_bytes(index), where="x")) == count
    assert math.prod(info.shape) == int(index.numel().sum())
