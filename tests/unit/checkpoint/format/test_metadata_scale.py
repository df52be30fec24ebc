"""Compare the rows that the benchmark generates with those of real saves of a small model."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.metadata_scale.layouts import Layout, split_flat_ranges
from benchmarks.metadata_scale.models import Model, Parameter
from benchmarks.metadata_scale.written_rows import GENERATORS, STATES, infos_of, rows_of_ranks, targets_of
from unickpt.checkpoint.format import rank_rows
from unickpt.checkpoint.format.boxes import Box, cut, split_flat_range
from unickpt.checkpoint.format.index import FragmentRow, Index, TensorInfo, check_coverage
from unickpt.checkpoint.load.read_plan import plan_reads
from unickpt.checkpoint.save import shards
from unickpt.checkpoint.save.shards import shards_of_flat_range

TINY = Model(
    "tiny",
    (
        (Parameter("embed", (8, 5), 0),),
        (Parameter("norm", (7,)), Parameter("wide", (12, 5), 0), Parameter("tall", (5, 12), 1)),
        (Parameter("up", (4, 6, 5), expert=True), Parameter("down", (4, 5, 6), expert=True), Parameter("router", (4, 5))),
        (Parameter("head", (8, 5), 0),),
    ),
)
LAYOUTS = [
    Layout(world, tp, pp, zero, ep)
    for zero in (1, 3)
    for world, tp, pp, ep in ((1, 1, 1, 1), (6, 1, 1, 2), (8, 2, 2, 2), (12, 2, 1, 4), (24, 4, 2, 2))
]


@given(st.data())
@settings(deadline=None)
def test_many_ranges_are_split_like_one(data: st.DataObject) -> None:
    ndim = data.draw(st.integers(1, 4))
    cases = []
    for _ in range(data.draw(st.integers(1, 4))):
        shape = data.draw(st.tuples(*[st.integers(1, 5)] * ndim))
        lo = data.draw(st.integers(0, math.prod(shape) - 1))
        cases.append((shape, lo, data.draw(st.integers(lo + 1, math.prod(shape)))))
    which, start, extent = split_flat_ranges(*(np.array(column, np.int64) for column in zip(*cases, strict=True)))
    found = [(w, Box(tuple(s), tuple(n))) for w, s, n in zip(which.tolist(), start.tolist(), extent.tolist(), strict=True)]
    assert found == [(at, box) for at, case in enumerate(cases) for box in split_flat_range(*case)]


def merged(layout: Layout) -> Index:
    return rank_rows.merge(
        (f"data/rank{rank:05d}", rank_rows.pack(found.rows, rank_rows.packed_table(found.tensors), found.own))
        for rank, found in enumerate(rows_of_ranks(TINY, layout))
    )


@pytest.mark.parametrize("limit", [13, 4096])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_has_the_rows_of_a_real_save(layout: Layout, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows through ``shards_of_flat_range`` and the loops of an adapter, rank by rank."""
    monkeypatch.setattr(shards, "FRAGMENT_BYTES", 4 * limit)
    index = merged(layout)
    check_coverage(index)
    parts = []
    for rank in range(layout.world):
        fragments: list[FragmentRow] = []
        offset = next(found.header_bytes for found in itertools.islice(rows_of_ranks(TINY, layout), rank, None))
        for parameter, block, lo, hi in _held_by(layout, rank):
            for state in STATES:
                info = next(i for i in infos_of(parameter) if i.state == state)
                local = TensorInfo("local", state, "F32", block.shape, "parameter")
                for shard in shards_of_flat_range(local, lo, hi, torch.zeros(hi - lo)):
                    for box in cut(shard.box, limit):
                        start = tuple(a + b for a, b in zip(block.start, box.start, strict=True))
                        fragments.append(FragmentRow(info, Box(start, box.shape), offset, 0))
                        offset += 4 * box.numel
        for suffix, dtype, length in GENERATORS:
            info = TensorInfo(f"objects/rank{rank:05d}{suffix}", "object", dtype, (length,), "object")
            fragments.append(FragmentRow(info, Box.whole(info.shape), offset, 0))
            offset += info.size_bytes
        derived = [i for p in TINY.parameters for i in infos_of(p) if i.derived_from]
        parts.append((f"data/rank{rank:05d}", rank_rows.to_bytes(fragments, derived)))
    real = rank_rows.merge(parts)
    assert (real.tensors, real.files) == (index.tensors, index.files)
    for column in ("tensor", "file", "offset_bytes", "start", "shape"):
        assert (getattr(real, column) == getattr(index, column)).all(), column


def _held_by(layout: Layout, rank: int) -> list[tuple[Parameter, Box, int, int]]:
    """Parameter, its block on this rank, and the flat range of that block; dense parameters first."""
    stage, within = divmod(rank, layout.per_stage)
    slots = TINY.slots[len(TINY.slots) * stage // layout.pp : len(TINY.slots) * (stage + 1) // layout.pp]
    dense: list[tuple[Parameter, Box]] = []
    experts: list[tuple[Parameter, Box]] = []
    for parameter in (parameter for slot in slots for parameter in slot):
        if parameter.expert:
            each = parameter.shape[0] // layout.ep
            first = within % layout.ep * each
            experts += [(parameter, Box((e, 0, 0), (1, *parameter.shape[1:]))) for e in range(first, first + each)]
            continue
        start, shape = [0] * len(parameter.shape), list(parameter.shape)
        if parameter.split is not None:
            shape[parameter.split] //= layout.tp
            start[parameter.split] = within % layout.tp * shape[parameter.split]
        dense.append((parameter, Box(tuple(start), tuple(shape))))
    found = []
    for blocks, degree in ((dense, layout.tp), (experts, layout.ep)):
        parts, part = layout.per_stage // degree, within // degree
        at = 0
        for parameter, block in blocks:
            numels = [b.numel for _, b in blocks] if layout.zero == 1 else [block.numel]
            size = -(-sum(numels) // parts)
            origin = at if layout.zero == 1 else 0
            lo, hi = (min(max(edge * size - origin, 0), block.numel) for edge in (part, part + 1))
            at += block.numel
            copy = not parameter.expert and parameter.split is None and within % layout.tp
            if lo < hi and not copy:
                found.append((parameter, block, lo, hi))
    return found


@pytest.mark.parametrize(("old", "new"), [*itertools.product(LAYOUTS[2:4], LAYOUTS[-2:])], ids=str)
def test_ranks_of_another_layout_find_all_that_they_load(old: Layout, new: Layout) -> None:
    index = merged(old)
    total = 0
    for rank in range(new.world):
        targets = targets_of(TINY, new, rank, index)
        plan = plan_reads(index, targets)
        total += int(plan.shape.prod(axis=1).sum())
    assert total == 3 * sum(math.prod(parameter.shape) for parameter in TINY.parameters)
