"""The parts of parameters that tensor-parallel ranks have, against DeepSpeed's own maps of them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.checkpoint import affine
from deepspeed.module_inject.layers import _build_param_uc_restore_meta

from ds_unickpt.framework.autotp import META, slices
from ds_unickpt.placing.placement import Generators, Placement
from ds_unickpt.placing.slices import Slice, places
from unickpt.base.errors import FormatError

MAPS = {
    "rows": affine.contiguous_split_map((7, 4), [3, 2, 2], 0),
    "columns": affine.contiguous_split_map((4, 7), [3, 4, 0], 1),
    "vector": affine.contiguous_split_map((7,), [4, 2, 1], 0),
    "sub-parameters": affine.sub_param_map((12, 3), [6, 3, 3], [[4, 2, 0], [2, 1, 0], [2, 1, 0]], 0),
    "columns of sub-parameters": affine.sub_param_map((3, 8), [4, 4], [[2, 1, 1], [2, 1, 1]], 1),
    "keys on every rank": affine.segmented_map((10, 3), [(6, False), (4, True)], 0, 3, [[2, 2, 2]]),
    "blocks": affine.block_gather_map((12, 2), {0: [0, 2], 1: [1, 3], 2: [5, 4]}, 2, 0),
    "replicated": affine.replicated_map((5, 2), 3),
    "view of three dimensions": affine.contiguous_split_map((2, 5, 3), [2, 2, 1], 1),
    "view whose heads are divided": affine.contiguous_split_map((4, 2, 3), [2, 1, 1], 0),
    "sub-parameters in each head": affine.sub_param_map((2, 6, 3), [4, 2], [[2, 1, 1], [1, 1, 0]], 1),
}


def _engine(parameter: torch.nn.Parameter, tensor: int, world: int) -> Any:
    """The attributes of an engine and a module that are read."""
    module = torch.nn.Module()
    module.weight = parameter
    return SimpleNamespace(
        module=module, has_moe_layers=False, autotp_size=lambda: world, get_tensor_parallel_rank=lambda: tensor
    )  # fmt: skip


def _described(found: affine.ParamAffineMap, rank: int, original: tuple[int, ...]) -> torch.nn.Parameter:
    shard = found.extract(torch.arange(found.numel, dtype=torch.float32), rank)
    parameter = torch.nn.Parameter(shard if len(original) == len(found.logical_shape) else shard.flatten(0, 1))
    meta = _build_param_uc_restore_meta(partition_type="column", original_shape=original, affine_map=found)
    setattr(parameter, META, meta)
    return parameter


def _original(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if len(shape) < 3 else (shape[0] * shape[1], shape[2])


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_every_flat_range_of_every_rank_is_at_its_global_place(name: str, parts: int) -> None:
    found = MAPS[name]
    original = _original(found.logical_shape)
    stored = torch.zeros(original)
    for rank in range(3):
        parameter = _described(found, rank, original)
        part = slices(_engine(parameter, rank, 3)).of(parameter)
        assert (part.shape, part.local) == (original, tuple(parameter.shape))
        whole, flat = torch.arange(found.numel, dtype=torch.float32).reshape(original), parameter.detach().reshape(-1)
        step = -(-flat.numel() // parts)
        for lo in range(0, flat.numel(), max(step, 1)):
            hi = min(lo + step, flat.numel())
            read = torch.full((hi - lo,), -1.0)
            for place in places(part.local, part.boxes, lo, hi):
                place.of(read).view(place.whole.shape).copy_(whole[place.whole.slices()])
            assert torch.equal(read, flat[lo:hi])
            for place in places(part.local, part.own, lo, hi):
                stored[place.whole.slices()] += place.of(flat[lo:hi]).reshape(place.whole.shape) + 1
    assert torch.equal(stored, torch.arange(found.numel, dtype=torch.float32).reshape(original) + 1)  # each element once


def test_a_parameter_without_description_is_whole_and_stored_by_the_first_rank() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    parts = [slices(_engine(parameter, rank, 2)).of(parameter) for rank in (0, 1)]
    assert [(part.replicated, len(part.own)) for part in parts] == [(True, 1), (True, 0)]
    assert Slice.whole(()).boxes[0].whole.numel == 1


def _break(kind: str, meta: dict[str, Any]) -> None:
    ranks = meta["conversion"]["affine_map"]["ranks"]
    if kind == "not a map":
        meta["conversion"]["affine_map"] = "rows"
    elif kind == "no conversion":
        del meta["conversion"]
    elif kind == "another shape":
        ranks[1]["shard_shape"] = [5, 4]
        ranks[1]["pieces"][0]["shape"] = [5, 4]
    elif kind == "fewer elements":
        ranks[1]["pieces"][0]["shape"] = [1, 4]
    elif kind == "fewer ranks":
        del ranks[2]
    elif kind == "multiples":
        ranks[1]["pieces"][0]["scale"] = 0.5
    elif kind == "another logical shape":
        meta["original_shape"] = (7, 5)
    elif kind == "not described":
        meta["conversion"]["unsupported_reason"] = "it is unknown"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("not a map", "does not describe its layout"),
        ("no conversion", "KeyError: 'conversion'"),
        ("another shape", "does not describe its layout"),
        ("fewer elements", "its boxes have 4 elements, its tensor has shape"),
        ("fewer ranks", "it has 2 ranks, expected 3"),
        ("multiples", "multiples of its elements"),
        ("another logical shape", "logical shape"),
        ("not described", "it is unknown"),
    ],
)
def test_a_wrong_description_is_an_error_with_the_name(kind: str, message: str) -> None:
    parameter = _described(affine.contiguous_split_map((7, 4), [3, 2, 2], 0), 1, (7, 4))
    _break(kind, getattr(parameter, META))
    with pytest.raises(FormatError, match=f"weight on tensor-parallel rank 1 of 3: .*{message}"):
        slices(_engine(parameter, 1, 3))


def test_tensor_parallel_peers_take_the_generators_of_one_rank() -> None:
    def ranks(world: int, tensors: int, before: int) -> list[int]:
        return [Generators.of(_placed(rank, world, tensors), before).rank for rank in range(world)]

    assert ranks(4, 1, 1) == [0, 1, 2, 3]
    assert ranks(4, 2, 2) == [0, 1, 2, 3]
    assert ranks(4, 2, 1) == [0, 0, 1, 1]
    assert ranks(4, 4, 2) == [0, 0, 0, 0]
    assert ranks(2, 1, 2) == [0, 2]
    assert Generators.of(_placed(3, 4, 2), 1) == Generators(1, 1, 1, True)


def _placed(rank: int, world: int, tensors: int) -> Placement:
    everyone = tuple(range(world))
    return Placement(rank, world, 0, 1, everyone, everyone, everyone[rank % tensors :: tensors], None, rank % tensors, tensors)


def test_a_rank_stores_what_its_data_parallel_group_partitions() -> None:
    placed = [_placed(rank, 4, 2) for rank in range(4)]
    assert [p.slice_ranks for p in placed] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert all(p.stores(p.data) and not p.across(p.data) and p.across((0, 1, 2, 3)) for p in placed)
    assert [p.copies().rank for p in placed] == [0, 0, 1, 1]
    assert not any(p.partial for p in placed)
    assert math.prod(p.copies().world for p in placed) == 16
