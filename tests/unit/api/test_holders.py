"""Which ranks hold the same: meshes in a short form."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unickpt.api.holders import _packed, _unpacked

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def _mesh(sizes: list[int], order: list[int], step: int, first: int) -> tuple[int, ...]:
    """Return the ranks of a mesh whose dimensions lie in another order, as a slice of a larger mesh has them."""
    ranks = torch.arange(math.prod(sizes)).reshape(sizes) * step + first
    return tuple(ranks.permute(order).reshape(-1).tolist())


@given(st.data(), SIZES, st.integers(1, 5), st.integers(0, 9))
def test_a_mesh_comes_back(data: st.DataObject, sizes: list[int], step: int, first: int) -> None:
    order = data.draw(st.permutations(range(len(sizes))))
    ranks = _mesh(sizes, order, step, first)
    packed = _packed(ranks)
    assert _unpacked(packed) == ranks
    assert len(ranks) < 2 or len(packed) == 2, "regular"
    assert sum(map(len, packed[1] if len(packed) == 2 else [])) <= 2 * len(sizes)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=12, unique=True))
def test_ranks_of_any_order_come_back(ranks: list[int]) -> None:
    assert _unpacked(_packed(tuple(ranks))) == tuple(ranks)


@pytest.mark.parametrize(
    "ranks", [(3,), (0, 1, 2, 3), (0, 4, 1, 5), (0, 1, 3), (1, 0), (0, 1, 2, 3, 8, 9, 10, 11), (0, 1, 2, 4)]
)
def test_known_meshes_come_back(ranks: tuple[int, ...]) -> None:
    assert _unpacked(_packed(ranks)) == ranks


def test_thousands_of_ranks_are_a_few_numbers() -> None:
    ranks = _mesh([2816 // 8, 8], [1, 0], 1, 0)
    assert _packed(ranks) == [0, [[8, 1], [352, 8]]]
