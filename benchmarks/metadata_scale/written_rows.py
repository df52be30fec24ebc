"""Rows of the index that each rank writes, and the tensors that a rank of another layout loads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.metadata_scale.layouts import Layout, Pieces, pieces_of_stage
from benchmarks.metadata_scale.models import Model, Parameter
from unickpt.base.arrays import Ints
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.index import Index, TensorInfo
from unickpt.checkpoint.load.read_plan import Target
from unickpt.checkpoint.save import shards

STATES = ("master", "exp_avg", "exp_avg_sq")  # in the order in which a rank writes them

GENERATORS = (("/0", "U32", 625), ("/1", "U32", 624), ("", "U8", 600), ("/2", "U8", 5056), ("/3", "U8", 16))


@dataclass(frozen=True, slots=True)
class RankRows:
    """Rows of the index that one rank sends to the coordinator.

    Attributes:
        tensors: tensors that all ranks of the stage list, sorted. Derived ones have no fragments.
        own: tensors that only this rank lists, sorted.
        rows: int64 ``[n, 3 + 2 * ndim]``, argument of ``unickpt.checkpoint.format.rank_rows.pack``.
        header_bytes, size_bytes: sizes of the data file.
    """

    tensors: tuple[TensorInfo, ...]
    own: tuple[TensorInfo, ...]
    rows: Ints
    header_bytes: int
    size_bytes: int


def rows_of_ranks(model: Model, layout: Layout, *, seed: int = 0) -> Iterator[RankRows]:
    """Yield the rows of all ranks in order: three fp32 states of every piece, and the states of the random generators."""
    random = np.random.default_rng(seed)
    for stage in range(layout.pp):
        numbers = model.stage(stage, layout.pp)
        tensors = sorted((info for at in numbers for info in infos_of(model.parameters[at])), key=lambda info: info.key)
        position = {info.key: at for at, info in enumerate(tensors)}
        ids = np.array([[position[model.parameters[at].name, state] for state in STATES] for at in numbers], np.int64)
        table = tuple(tensors)
        pieces = _cut(pieces_of_stage(model, layout, stage), shards.FRAGMENT_BYTES // 4)
        ends = np.searchsorted(pieces.rank, np.arange(layout.per_stage + 1)).tolist()
        for rank in range(layout.per_stage):
            part = slice(ends[rank], ends[rank + 1])
            yield _rank_rows(pieces, part, ids, numbers.start, table, stage * layout.per_stage + rank, random)


def infos_of(parameter: Parameter) -> list[TensorInfo]:
    """Return the entries of a parameter's states. The bf16 weight is derived from its master."""
    infos = [
        TensorInfo(parameter.name, state, "F32", parameter.shape, "parameter" if state == "master" else "optimizer")
        for state in STATES
    ]
    return [*infos, TensorInfo(parameter.name, "weight", "BF16", parameter.shape, "parameter", derived_from="master")]


def _cut(pieces: Pieces, limit: int) -> Pieces:
    """Cut boxes of more than ``limit`` elements along their first dimension longer than 1, as ``format.boxes`` does."""
    numel = pieces.shape.prod(axis=1)
    every = np.arange(len(numel))
    dim = np.argmax(pieces.shape > 1, axis=1)
    extent = pieces.shape[every, dim]
    row = numel // extent
    assert row.max(initial=0) <= limit
    step = np.maximum(limit // row, 1)
    count = np.where(numel > limit, -(-extent // step), 1)
    origin = np.repeat(every, count)
    number = np.arange(len(origin)) - np.repeat(np.cumsum(count) - count, count)
    start, shape = pieces.start[origin], pieces.shape[origin]
    at, along = np.arange(len(origin)), dim[origin]
    begin = number * step[origin]
    start[at, along] += begin
    shape[at, along] = np.where(count[origin] > 1, np.minimum(step[origin], extent[origin] - begin), extent[origin])
    return Pieces(pieces.rank[origin], pieces.run[origin], pieces.parameter[origin], start, shape)


def _rank_rows(
    pieces: Pieces, part: slice, ids: Ints, first: int, table: tuple[TensorInfo, ...], rank: int, random: np.random.Generator
) -> RankRows:
    run, start, shape = pieces.run[part], pieces.start[part], pieces.shape[part]
    boxes, ndim = start.shape
    # order within a range: all boxes of one state, then all boxes of the next
    _, at, count = np.unique(run, return_index=True, return_counts=True)
    begin, length = np.repeat(at, count), np.repeat(count, count)
    place = (3 * begin + np.arange(boxes) - begin)[None, :] + np.arange(3)[:, None] * length[None, :]
    box = np.empty(3 * boxes, np.int64)
    state = np.empty(3 * boxes, np.int64)
    box[place], state[place] = np.arange(boxes)[None, :], np.arange(3)[:, None]
    extra = len(GENERATORS)
    numbers = np.zeros((3 * boxes + extra, 3 + 2 * ndim), np.int64)
    numbers[: 3 * boxes, 0] = ids[pieces.parameter[part][box] - first, state]
    numbers[3 * boxes :, 0] = len(table) + np.argsort(np.argsort([suffix for suffix, _, _ in GENERATORS]))
    numbers[: 3 * boxes, 3 : 3 + ndim] = start[box]
    numbers[:, 3 + ndim :] = 1
    numbers[: 3 * boxes, 3 + ndim :] = shape[box]
    numbers[3 * boxes :, 3 + ndim] = [length for _, _, length in GENERATORS]
    itemsize = np.full(3 * boxes + extra, 4, np.int64)
    itemsize[3 * boxes :] = [4 if dtype == "U32" else 1 for _, dtype, _ in GENERATORS]
    size = numbers[:, 3 + ndim :].prod(axis=1) * itemsize
    header_bytes = -(-(200 + 130 * len(size)) // 4096) * 4096  # approximate size of a data file's header
    end = header_bytes + np.cumsum(size)
    numbers[:, 1] = end - size
    numbers[:, 2] = random.integers(-(2**63), 2**63, len(size))
    stem = f"objects/rank{rank:05d}"
    own = sorted((TensorInfo(f"{stem}{k}", "object", dtype, (n,), "object") for k, dtype, n in GENERATORS), key=lambda i: i.key)
    return RankRows(table, tuple(own), numbers, header_bytes, int(end[-1]))


def targets_of(model: Model, layout: Layout, rank: int, index: Index) -> list[Target]:
    """Return what one rank of a job loads: its pieces of all three states."""
    ids = index.ids()
    stage, within = divmod(rank, layout.per_stage)
    pieces = pieces_of_stage(model, layout, stage, only=within)
    found = []
    for number, start, shape in zip(pieces.parameter.tolist(), pieces.start.tolist(), pieces.shape.tolist(), strict=True):
        parameter = model.parameters[number]
        box = Box(tuple(start[: len(parameter.shape)]), tuple(shape[: len(parameter.shape)]))
        found += [Target(ids[parameter.name, state], box) for state in STATES]
    return found
