"""Pieces, which a translation is made of: parts of them, one after the other, and what may not overlap."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unickpt.base.errors import CoverageError
from unickpt.checkpoint.format.boxes import Box
from unickpt.transform.dialects.pieces import GridPiece, Link, check_cover


def test_a_part_of_every_second_row() -> None:
    piece = GridPiece("a", "t", (1,), (10,), (Link(5, 0, 2, 0, 3),))  # 1, 3, 5, 7, 9 go to 10, 13, 16, 19, 22
    part = piece.within(Box((12,), (8,)))
    assert part == GridPiece("a", "t", (3,), (13,), (Link(3, 0, 2, 0, 3),))
    assert piece.within(Box((11,), (2,))) is None


def test_an_element_from_two_tensors_is_refused() -> None:
    pieces = [GridPiece("a", "t", (0,), (0,), (Link(3, 0, 1, 0, 1),)), GridPiece("b", "t", (0,), (2,), (Link(2, 0, 1, 0, 1),))]
    with pytest.raises(CoverageError, match="elements come from both a and b"):
        check_cover("t", (5,), pieces)
    with pytest.raises(CoverageError, match="4 of 5 elements"):
        check_cover("t", (5,), [pieces[0], GridPiece("b", "t", (0,), (4,), ())])
    with pytest.raises(CoverageError, match="outside"):
        check_cover("t", (2,), [pieces[0]])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=4))
def test_overlaps_of_grids_are_found(grids: list[tuple[int, int, int]]) -> None:
    pieces = [GridPiece(str(at), "t", (0,), (start,), (Link(count, 0, 1, 0, step),) if count > 1 else ())
              for at, (start, step, count) in enumerate(grids)]  # fmt: skip
    hit = [start + n * step for start, step, count in grids for n in range(count)]
    size = max(hit) + 1
    try:
        check_cover("t", (size,), pieces, less=size - len(hit))
        assert len(set(hit)) == len(hit)
    except CoverageError:
        assert len(set(hit)) < len(hit)


@settings(max_examples=200, deadline=None)
@given(st.tuples(*[st.integers(0, 12), st.integers(1, 6), st.integers(1, 6)] * 2))
def test_two_grids_in_a_row(grid: tuple[int, ...]) -> None:
    """What goes through both is what is in both."""
    a, a_step, a_count, b, b_step, b_count = grid
    first = GridPiece("a", "b", (0,), (a,), (Link(a_count, 0, 1, 0, a_step),) if a_count > 1 else ())
    second = GridPiece("b", "c", (b,), (0,), (Link(b_count, 0, b_step, 0, 1),) if b_count > 1 else ())
    want = {(n, m) for n in range(a_count) for m in range(b_count) if a + n * a_step == b + m * b_step}
    made = first.then(second)
    found = set()
    if made is not None:
        link = made.links[0] if made.links else Link(1, 0, 0, 0, 0)
        found = {
            (made.source_start[0] + n * link.source_step, made.target_start[0] + n * link.target_step)
            for n in range(link.extent)
        }
    assert found == want
