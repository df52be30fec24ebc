"""What a rank writes of what it holds: copies are divided evenly, every element is written once, with its value."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.save.shards import Shard
from unickpt.checkpoint.state.held import Copies, Description, Held, divided

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F64": torch.float64, "U8": torch.uint8}
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
TENSORS = st.lists(st.tuples(SHAPES, st.sampled_from(sorted(DTYPES))), max_size=6)


def held_by(number: int, shape: tuple[int, ...], dtype: str, copies: Copies | None, *, flat: bool = False) -> Held:
    """Return a box of a tensor that is larger in every dimension, with the values 0, 1, ..."""
    info = TensorInfo(f"t{number}", "weight", dtype, tuple(extent + 2 for extent in shape), "parameter")
    data = torch.arange(math.prod(shape)).to(DTYPES[dtype])
    return Held(info, Box((1,) * len(shape), shape), data if flat else data.reshape(shape), copies)


@given(TENSORS, st.integers(1, 9))
def test_copies_are_divided_once_and_evenly(tensors: list[tuple[tuple[int, ...], str]], world: int) -> None:
    group = [held_by(at, shape, dtype, None) for at, (shape, dtype) in enumerate(tensors)]
    parts = [divided(group, Copies(tuple(range(world)), rank)) for rank in range(world)]
    for at, held in enumerate(group):
        assert [element for part in parts for element in range(*part[at])] == list(range(held.box.numel))
    items = [DTYPES[dtype].itemsize for _, dtype in tensors]
    written = [sum((hi - lo) * item for (lo, hi), item in zip(part, items, strict=True)) for part in parts]
    assert all(abs(size - sum(held.size_bytes for held in group) / world) <= 8 + 1 for size in written)


@given(TENSORS, st.integers(1, 4), st.booleans())
def test_all_ranks_together_write_every_element(tensors: list[tuple[tuple[int, ...], str]], world: int, flat: bool) -> None:
    """The order of the boxes differs between the ranks."""
    ranks = tuple(range(10, 10 + world))
    shards: list[Shard] = []
    for at, rank in enumerate(ranks):
        held = [held_by(n, shape, dtype, Copies(ranks, rank), flat=flat) for n, (shape, dtype) in enumerate(tensors)]
        shards += Description(held if at % 2 else held[::-1]).shards()
    for number, (shape, dtype) in enumerate(tensors):
        info = held_by(number, shape, dtype, None).tensor
        found = torch.full(info.shape, -1.0)
        for shard in (each for each in shards if each.tensor == info):
            assert (found[shard.box.slices()] == -1).all()
            found[shard.box.slices()] = shard.data.reshape(shard.box.shape).float()
        expected = torch.full(info.shape, -1.0)
        if math.prod(shape):
            expected[Box((1,) * len(shape), shape).slices()] = (
                torch.arange(math.prod(shape)).to(DTYPES[dtype]).float().reshape(shape)
            )
        assert torch.equal(found, expected)


def test_groups_of_copies_and_conditions_are_divided_apart() -> None:
    info, other = (TensorInfo(name, "weight", "F32", (4,), "parameter") for name in "ab")
    weight, box = TensorInfo("a", "cast", "F32", (4,), "parameter", "weight"), Box((0,), (4,))
    data = torch.arange(4.0)
    written = {}
    for rank in range(4):
        held = [
            Held(info, box, data, Copies((0, 1), rank)),
            Held(other, box, data, Copies((2, 3), rank)),
            Held(weight, box, data, Copies((0, 1), rank), unless=data + 1),
            Held(other, box, data, Copies((), rank)),
        ]
        written[rank] = [
            (s.tensor.key, s.box, None if s.unless is None else s.unless.tolist()) for s in Description(held).shards()
        ]
    lower, upper = Box((0,), (2,)), Box((2,), (2,))
    assert written[0] == [(info.key, lower, None), (weight.key, lower, [1.0, 2.0])]
    assert written[1] == [(info.key, upper, None), (weight.key, upper, [3.0, 4.0])]
    assert list(itertools.chain(written[2], written[3])) == [(other.key, lower, None), (other.key, upper, None)]


def test_a_transposed_box_keeps_its_strides() -> None:
    info = TensorInfo("t", "weight", "F32", (4, 6), "parameter")
    data = torch.arange(24.0).reshape(6, 4).t()
    (whole,) = Description([Held(info, Box.whole((4, 6)), data)]).shards()
    assert whole.data is data
    parts = [
        shard
        for rank in range(3)
        for shard in Description([Held(info, Box.whole((4, 6)), data, Copies((0, 1, 2), rank))]).shards()
    ]
    found = torch.zeros(4, 6)
    for shard in parts:
        found[shard.box.slices()] = shard.data
    assert torch.equal(found, data)
