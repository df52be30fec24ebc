"""Which rows of a DTensor a rank has, compared with the functions by which torch divides a tensor."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from unickpt.api.dtensors import Runs, _boxes, _in_order, _nested, _Way

MESHES = [(2, 2), (3, 2), (2, 3), (4, 2), (2, 4), (32, 2)]


def rows(runs: Runs) -> list[int]:
    return [row for start, length in runs for row in range(start, start + length)]


def parts(placement: Shard | _StridedShard, whole: torch.Tensor, count: int) -> list[torch.Tensor]:
    return placement._split_tensor(whole, count, with_padding=False)[0]


@pytest.mark.parametrize("mesh", MESHES)
def test_placements_divide_in_their_order(mesh: tuple[int, int]) -> None:
    outer, inner = mesh
    for size, factor in itertools.product((*range(14), 24, 31), (1, 2, 3, inner)):
        for at, whole in enumerate(parts(_StridedShard(0, split_factor=factor), torch.arange(size), outer)):
            for here, expected in enumerate(parts(Shard(0), whole, inner)):
                (found,) = _in_order([size], [_Way(0, factor, outer, at), _Way(0, 1, inner, here)])
                assert rows(found) == expected.tolist(), (size, factor, at, here)


@pytest.mark.parametrize("mesh", MESHES)
def test_fsdp_divides_what_tensor_parallelism_leaves(mesh: tuple[int, int]) -> None:
    fsdp, tensors = mesh
    for size in (*range(14), 24, 31):
        for here, whole in enumerate(parts(Shard(0), torch.arange(size), tensors)):
            for at, expected in enumerate(parts(Shard(0), whole, fsdp)):
                found = _nested([size], [_Way(0, tensors, fsdp, at), _Way(0, 1, tensors, here)])
                assert found is not None
                assert rows(found[0]) == expected.tolist()
                assert len(found[0]) <= 1


def test_a_strided_placement_alone_is_not_that_of_fsdp() -> None:
    assert _nested([8], [_Way(0, 2, 2, 0)]) is None


def test_boxes_of_several_runs_cover_the_local_tensor_once() -> None:
    whole = torch.arange(7 * 5).reshape(7, 5)
    division = _in_order(whole.shape, [_Way(0, 2, 2, 1), _Way(1, 2, 2, 0)])
    assert division == (((2, 2), (6, 1)), ((0, 2), (3, 1)))
    local = torch.full((3, 3), -1)
    for box, region in _boxes(division):
        local[region.slices()] = whole[box.slices()]
    assert local.tolist() == whole[[2, 3, 6]][:, [0, 1, 3]].tolist()
