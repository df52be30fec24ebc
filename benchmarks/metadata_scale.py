"""Metadata of very large jobs, without their data: how big the index is, how long it takes to merge and to plan from it.

Every rank's rows of the index are made as that rank would write them, and go through the same code as in a save and a
load: ``rows.merge``, ``check_coverage`` and ``to_bytes`` on the coordinator; ``from_bytes``, the checks of a load and
``plan_reads`` on a rank of another layout. Only the disk is left out, but for ``--files``.

python benchmarks/metadata_scale.py [--cases dense-1 dense-3 moe-1] [--ranks 8960 100096] [--write docs/performance.md]
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from benchmarks.measure import machine  # noqa: E402
from unickpt import contribution, index_file, rows  # noqa: E402
from unickpt.checksums import digest  # noqa: E402
from unickpt.commit import Names, read_rows  # noqa: E402
from unickpt.fragments import Box, Ints  # noqa: E402
from unickpt.index import Index, TensorInfo, check_complete, check_coverage  # noqa: E402
from unickpt.loading import check_places  # noqa: E402
from unickpt.manifest import FileRecord  # noqa: E402
from unickpt.planning import Target, plan_reads  # noqa: E402
from unickpt.posix import PosixStorage  # noqa: E402

STATES = ("master", "exp_avg", "exp_avg_sq")  # in the order in which a rank writes them
GENERATORS = (("/0", "U32", 625), ("/1", "U32", 624), ("", "U8", 600), ("/2", "U8", 5056), ("/3", "U8", 16))


# ---------------------------------------------------------------- models


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter by its global shape. ``split``: the dimension that tensor parallelism cuts, None for a copy on every
    rank; of an expert weight the first dimension counts experts, and expert parallelism cuts that one alone.
    """

    name: str
    shape: tuple[int, ...]
    split: int | None = None
    expert: bool = False


@dataclass(frozen=True)
class Model:
    """What pipeline stages are made of: ``slots`` are dealt out evenly, in order; embedding and head are slots, too."""

    title: str
    slots: tuple[tuple[Parameter, ...], ...]

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(parameter for slot in self.slots for parameter in slot)

    def stage(self, stage: int, stages: int) -> range:
        """Positions in ``parameters`` of one pipeline stage."""
        ends = np.cumsum([0, *map(len, self.slots)]).tolist()
        first, last = (len(self.slots) * at // stages for at in (stage, stage + 1))
        return range(ends[first], ends[last])


def llama_405b() -> Model:
    """Llama 3 405B by its published shapes; 126 layers, embedding and head make 128 slots, eight for each of 16 stages."""
    hidden, ffn, key_value, words = 16384, 53248, 8 * 128, 128256
    slots = [(Parameter("model.embed_tokens.weight", (words, hidden), 0),)]
    for layer in range(126):
        shapes = {
            "input_layernorm": ((hidden,), None),
            "self_attn.q_proj": ((hidden, hidden), 0),
            "self_attn.k_proj": ((key_value, hidden), 0),
            "self_attn.v_proj": ((key_value, hidden), 0),
            "self_attn.o_proj": ((hidden, hidden), 1),
            "post_attention_layernorm": ((hidden,), None),
            "mlp.gate_proj": ((ffn, hidden), 0),
            "mlp.up_proj": ((ffn, hidden), 0),
            "mlp.down_proj": ((hidden, ffn), 1),
        }
        slots.append(tuple(Parameter(f"model.layers.{layer}.{k}.weight", s, split) for k, (s, split) in shapes.items()))
    slots.append((Parameter("model.norm.weight", (hidden,)), Parameter("lm_head.weight", (words, hidden), 0)))
    return Model("Llama 3 405B", tuple(slots))


def moe_1t() -> Model:
    """A 1T mixture of experts with the published shapes of Kimi K2: the largest open one, 384 experts of which 8 work.

    The experts of a layer are one tensor with a dimension that counts them, as Megatron stores them.
    """
    hidden, ffn, experts, words = 7168, 2048, 384, 163840
    slots = [(Parameter("embedding.word_embeddings.weight", (words, hidden), 0),)]
    for layer in range(61):
        attention = {
            "input_layernorm": ((hidden,), None),
            "self_attention.linear_q_down_proj": ((1536, hidden), None),
            "self_attention.q_layernorm": ((1536,), None),
            "self_attention.linear_q_up_proj": ((64 * 192, 1536), 0),
            "self_attention.linear_kv_down_proj": ((576, hidden), None),
            "self_attention.kv_layernorm": ((512,), None),
            "self_attention.linear_kv_up_proj": ((64 * 256, 512), 0),
            "self_attention.linear_proj": ((hidden, 64 * 128), 1),
            "pre_mlp_layernorm": ((hidden,), None),
        }
        wide = 18432 if layer == 0 else ffn  # the first layer is dense, all others have one shared expert
        block = "mlp" if layer == 0 else "mlp.shared_experts"
        attention |= {f"{block}.gate": ((wide, hidden), 0), f"{block}.up": ((wide, hidden), 0)}
        attention |= {f"{block}.linear_fc2": ((hidden, wide), 1)}
        if layer:
            attention |= {"mlp.router": ((experts, hidden), None)}
        slot = [Parameter(f"decoder.layers.{layer}.{k}.weight", s, split) for k, (s, split) in attention.items()]
        if layer:
            stem = f"decoder.layers.{layer}.mlp.experts.experts"
            slot.append(Parameter(f"{stem}.gate.weight", (experts, ffn, hidden), expert=True))
            slot.append(Parameter(f"{stem}.up.weight", (experts, ffn, hidden), expert=True))
            slot.append(Parameter(f"{stem}.linear_fc2.weight", (experts, hidden, ffn), expert=True))
        slots.append(tuple(slot))
    slots.append((Parameter("final_layernorm.weight", (hidden,)), Parameter("output_layer.weight", (words, hidden), 0)))
    return Model("1T mixture of experts", tuple(slots))


# ---------------------------------------------------------------- layouts


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of a job. Ranks of a pipeline stage count tensor parallel ranks first, then data parallel ones; for
    experts, expert parallel ranks first, then copies.
    """

    world: int
    tp: int
    pp: int
    zero: int  # 1 or 3
    ep: int = 1

    def __post_init__(self) -> None:
        if self.world % (self.tp * self.pp) or self.world % (self.ep * self.pp):
            raise ValueError(f"{self} does not come out even")

    @property
    def per_stage(self) -> int:
        return self.world // self.pp

    def __str__(self) -> str:
        experts = f" EP {self.ep}" if self.ep > 1 else ""
        return f"TP {self.tp} PP {self.pp}{experts} DP {self.per_stage // self.tp}, ZeRO-{self.zero}"


@dataclass(frozen=True, slots=True)
class Pieces:
    """Boxes of parameters that ranks of one stage hold, in the order in which they hold them.

    Attributes:
        rank: int64 ``[k]``, rank within the stage, ascending.
        run: int64 ``[k]``, which flat range the box is a part of, ascending; a range lies on one rank.
        parameter: int64 ``[k]``, position in ``Model.parameters``.
        start, shape: int64 ``[k, ndim]``, in the global tensor, padded like the index.
    """

    rank: Ints
    run: Ints
    parameter: Ints
    start: Ints
    shape: Ints


def pieces_of_stage(model: Model, layout: Layout, stage: int, *, only: int | None = None) -> Pieces:
    """What the ranks of a stage write, or one of them alone, of one state.

    ZeRO-1 lays the parameters of a model parallel rank end to end and cuts the line into equal lengths, one for each
    data parallel rank. ZeRO-3 cuts every parameter so. Of copies within a tensor parallel group the first rank writes.
    """
    numbers = model.stage(stage, layout.pp)
    ndim = max(len(parameter.shape) for parameter in model.parameters)
    found = []
    dense = [at for at in numbers if not model.parameters[at].expert]
    for tp in range(layout.tp):
        blocks = [_tensor_parallel_block(model.parameters[at], tp, layout.tp) for at in dense]
        owned = np.array([tp == 0 or model.parameters[at].split is not None for at in dense], bool)
        found.append(_held(dense, blocks, owned, ndim, layout, first=tp, group=layout.tp, only=only))
    experts = [at for at in numbers if model.parameters[at].expert]
    for ep in range(layout.ep if experts else 0):
        lists, blocks = [], []
        for at in experts:
            shape = model.parameters[at].shape
            each = shape[0] // layout.ep
            for expert in range(ep * each, (ep + 1) * each):  # each one is a parameter of its own to the optimizer
                lists.append(at)
                blocks.append(Box((expert, 0, 0), (1, *shape[1:])))
        found.append(_held(lists, blocks, np.ones(len(lists), bool), ndim, layout, first=ep, group=layout.ep, only=only))
    rank, length, parameter, start, shape = (np.concatenate(columns) for columns in zip(*found, strict=True))
    order = np.argsort(rank, kind="stable")
    run = np.cumsum(length[order])  # ``length`` marks the first box of every range with 1
    return Pieces(rank[order], run, parameter[order], start[order], shape[order])


def _tensor_parallel_block(parameter: Parameter, tp: int, degree: int) -> Box:
    start, shape = [0] * len(parameter.shape), list(parameter.shape)
    if parameter.split is not None:
        shape[parameter.split] //= degree
        start[parameter.split] = tp * shape[parameter.split]
    return Box(tuple(start), tuple(shape))


def _held(
    numbers: Sequence[int], blocks: Sequence[Box], owned: np.ndarray, ndim: int, layout: Layout, *,
    first: int, group: int, only: int | None,
) -> tuple[Ints, Ints, Ints, Ints, Ints]:  # fmt: skip
    """Pieces of the ranks ``first``, ``first + group``, ... that share these blocks."""
    none = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), *(np.zeros((0, ndim), np.int64),) * 2
    if not numbers or (only is not None and only % group != first):
        return none
    numels = np.array([block.numel for block in blocks], np.int64)
    part, block, lo, hi = flat_ranges(numels, layout.per_stage // group, layout.zero)
    keep = owned[block] if only is None else owned[block] & (part == only // group)
    part, block, lo, hi = part[keep], block[keep], lo[keep], hi[keep]
    shapes, starts = np.ones((len(blocks), ndim), np.int64), np.zeros((len(blocks), ndim), np.int64)
    for at, box in enumerate(blocks):
        shapes[at, : box.ndim], starts[at, : box.ndim] = box.shape, box.start
    which, start, shape = split_flat_ranges(shapes[block], lo, hi)
    begins = np.ones(len(which), np.int64)
    begins[1:] = which[1:] != which[:-1]
    origin = block[which]
    return first + group * part[which], begins, np.array(numbers, np.int64)[origin], start + starts[origin], shape


def flat_ranges(numels: Ints, parts: int, zero: int) -> tuple[Ints, Ints, Ints, Ints]:
    """``(part, tensor, lo, hi)``, sorted by part: which part holds which flat range of which tensor."""
    ends = np.cumsum(numels)
    if zero == 1:
        size = -(-int(ends[-1]) // parts)
        cuts = np.minimum(np.arange(parts + 1, dtype=np.int64) * size, ends[-1])
        edges = np.unique(np.concatenate([cuts, ends]))
        begin, end = edges[:-1], edges[1:]
        tensor = np.searchsorted(ends, begin, side="right")
        first = ends[tensor] - numels[tensor]
        return begin // size, tensor, begin - first, end - first
    size = -(-numels // parts)
    part = np.repeat(np.arange(parts, dtype=np.int64), len(numels))
    tensor = np.tile(np.arange(len(numels), dtype=np.int64), parts)
    lo = np.minimum(part * size[tensor], numels[tensor])
    hi = np.minimum(lo + size[tensor], numels[tensor])
    keep = lo < hi
    return part[keep], tensor[keep], lo[keep], hi[keep]


def split_flat_ranges(shape: Ints, lo: Ints, hi: Ints) -> tuple[Ints, Ints, Ints]:
    """``fragments.split_flat_range`` of many ranges at once.

    Args:
        shape: int64 ``[n, ndim]``, of the tensors; ``ndim`` >= 1.
        lo, hi: int64 ``[n]``, none empty.

    Returns:
        ``(which, start, shape)``: the range that a box is of, and the box; in the ranges' order and in memory order.
    """
    count, ndim = shape.shape
    strides = np.ones((count, ndim), np.int64)
    for dim in range(ndim - 2, -1, -1):
        strides[:, dim] = strides[:, dim + 1] * shape[:, dim + 1]
    which, start = np.arange(count, dtype=np.int64), np.zeros((count, ndim), np.int64)
    whole: list[tuple[Ints, Ints, Ints]] = []
    for dim in range(ndim):  # what is left begins and ends within one element of the dimensions before this one
        row = strides[which, dim]
        first, head = np.divmod(lo, row)
        last, tail = np.divmod(hi, row)
        same = first == last
        begin = first + (head > 0)
        middle = ~same & (begin < last)
        at = start[middle]
        at[:, dim] = begin[middle]
        extent = np.ones_like(at)
        extent[:, dim] = (last - begin)[middle]
        extent[:, dim + 1 :] = shape[which[middle], dim + 1 :]
        whole.append((which[middle], at, extent))
        rest = []
        for chosen, index, low, high in (
            (same, first, head, tail),
            (~same & (head > 0), first, head, row),
            (~same & (tail > 0), last, np.zeros_like(tail), tail),
        ):
            inner = start[chosen]
            inner[:, dim] = index[chosen]
            rest.append((which[chosen], inner, low[chosen], high[chosen]))
        which, start, lo, hi = (np.concatenate(columns) for columns in zip(*rest, strict=True))
    found, starts, shapes = (np.concatenate(columns) for columns in zip(*whole, strict=True))
    order = np.lexsort(((starts * strides[found]).sum(axis=1), found))
    return found[order], starts[order], shapes[order]


# ---------------------------------------------------------------- what the ranks write


@dataclass(frozen=True, slots=True)
class RankRows:
    """What one rank brings to the coordinator.

    Attributes:
        tensors: listed by all ranks of the stage, sorted; those derived have no fragments.
        own: this rank's alone, sorted.
        rows: int64 ``[n, 3 + 2 * ndim]``, as ``unickpt.rows.pack`` takes them.
        header_bytes, size_bytes: of the data file.
    """

    tensors: tuple[TensorInfo, ...]
    own: tuple[TensorInfo, ...]
    rows: Ints
    header_bytes: int
    size_bytes: int


def rows_of_ranks(model: Model, layout: Layout, *, seed: int = 0) -> Iterator[RankRows]:
    """Rows of all ranks in their order: three fp32 states of every piece, and the states of the random generators."""
    random = np.random.default_rng(seed)
    for stage in range(layout.pp):
        numbers = model.stage(stage, layout.pp)
        tensors = sorted((info for at in numbers for info in infos_of(model.parameters[at])), key=lambda info: info.key)
        position = {info.key: at for at, info in enumerate(tensors)}
        ids = np.array([[position[model.parameters[at].name, state] for state in STATES] for at in numbers], np.int64)
        table = tuple(tensors)
        pieces = _cut(pieces_of_stage(model, layout, stage), contribution.FRAGMENT_BYTES // 4)
        ends = np.searchsorted(pieces.rank, np.arange(layout.per_stage + 1)).tolist()
        for rank in range(layout.per_stage):
            part = slice(ends[rank], ends[rank + 1])
            yield _rank_rows(pieces, part, ids, numbers.start, table, stage * layout.per_stage + rank, random)


def infos_of(parameter: Parameter) -> list[TensorInfo]:
    """The states of a parameter; the bf16 weight is derived from its master."""
    infos = [
        TensorInfo(parameter.name, state, "F32", parameter.shape, "parameter" if state == "master" else "optimizer")
        for state in STATES
    ]
    return [*infos, TensorInfo(parameter.name, "weight", "BF16", parameter.shape, "parameter", derived_from="master")]


def _cut(pieces: Pieces, limit: int) -> Pieces:
    """Boxes of more than ``limit`` elements in pieces, as ``fragments.cut`` makes them: along the first dimension that is
    longer than 1, where its rows are not larger than that."""
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
    # a range's boxes of one state, then of the next: state s of the range's box j comes after s times all its boxes
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
    header_bytes = -(-(200 + 130 * len(size)) // 4096) * 4096  # a data file's header, about
    end = header_bytes + np.cumsum(size)
    numbers[:, 1] = end - size
    numbers[:, 2] = random.integers(-(2**63), 2**63, len(size))
    stem = f"objects/rank{rank:05d}"
    own = sorted((TensorInfo(f"{stem}{k}", "object", dtype, (n,), "object") for k, dtype, n in GENERATORS), key=lambda i: i.key)
    return RankRows(table, tuple(own), numbers, header_bytes, int(end[-1]))


def targets_of(model: Model, layout: Layout, rank: int, index: Index) -> list[Target]:
    """What one rank of a job loads: its pieces of all three states."""
    ids = index.ids()
    stage, within = divmod(rank, layout.per_stage)
    pieces = pieces_of_stage(model, layout, stage, only=within)
    found = []
    for number, start, shape in zip(pieces.parameter.tolist(), pieces.start.tolist(), pieces.shape.tolist(), strict=True):
        parameter = model.parameters[number]
        box = Box(tuple(start[: len(parameter.shape)]), tuple(shape[: len(parameter.shape)]))
        found += [Target(ids[parameter.name, state], box) for state in STATES]
    return found


# ---------------------------------------------------------------- measuring: every step in a process of its own

CASES = {"dense-1": (llama_405b, 1, 1), "dense-3": (llama_405b, 3, 1), "moe-1": (moe_1t, 1, 16), "moe-3": (moe_1t, 3, 16)}
Result = dict[str, Any]


def layouts_of(case: str, world: int) -> tuple[Model, Layout, Layout]:
    """The model, the layout that saves, and the one that loads: other degrees, and the other ZeRO stage."""
    make, zero, ep = CASES[case]
    return make(), Layout(world, tp=8, pp=16, zero=zero, ep=ep), Layout(world, tp=4, pp=8, zero=4 - zero, ep=max(ep // 2, 1))


def generate(folder: Path, case: str, world: int) -> Result:
    """All ranks' rows one after the other, and sizes of their data files."""
    model, layout, _ = layouts_of(case, world)
    lengths, sizes, headers = [], [], []
    tensors, table = None, b""
    with (folder / "rows").open("wb") as out:
        for found in rows_of_ranks(model, layout):
            if found.tensors is not tensors:  # another stage
                tensors, table = found.tensors, rows.packed_table(found.tensors)
            lengths.append(out.write(rows.pack(found.rows, table, found.own)))
            sizes.append(found.size_bytes)
            headers.append(found.header_bytes)
    np.savez(folder / "files.npz", length=lengths, size=sizes, header=headers)
    return {"rows_bytes": sum(lengths)}


def names_of(count: int) -> list[str]:
    return [Names(rank, 0).data for rank in range(count)]


def timed(steps: Mapping[str, Callable[[Any], Any]], first: Any, rounds: int) -> Result:
    """Seconds and processor seconds of steps that hand on what they make; of the quickest round."""
    best: Result = {}
    for _ in range(rounds):
        value, found = first, {}
        begin, processor = time.perf_counter(), time.process_time()
        for name, step in steps.items():
            at = time.perf_counter()
            value = step(value)
            found[name] = time.perf_counter() - at
        found |= {"seconds": time.perf_counter() - begin, "processor": time.process_time() - processor}
        if not best or found["seconds"] < best["seconds"]:
            best = found
    return {**best, "result": value}


def merge(folder: Path, rounds: int) -> Result:
    """What the coordinator does with the rows that it has read, up to the bytes of the index."""
    data = (folder / "rows").read_bytes()
    ends = np.cumsum([0, *np.load(folder / "files.npz")["length"].tolist()]).tolist()
    parts = [(name, data[a:b]) for name, a, b in zip(names_of(len(ends) - 1), ends[:-1], ends[1:], strict=True)]
    del data
    before = peak_bytes()

    def checked(index: Index) -> Index:
        check_coverage(index)
        return index

    def signed(table: bytes) -> bytes:
        digest(table)
        return table

    steps = {"merge": rows.merge, "coverage": checked, "to_bytes": index_file.to_bytes, "digest": signed}
    found = timed(steps, parts, rounds)
    table = found.pop("result")
    (folder / "index").write_bytes(table)
    return {**found, "index_bytes": len(table), "memory_bytes": peak_bytes() - before}


def plan(folder: Path, case: str, world: int, rounds: int) -> Result:
    """What one rank of another layout does from the bytes of the index to its plan, with all checks of a load."""
    model, _, layout = layouts_of(case, world)
    table = (folder / "index").read_bytes()
    files = np.load(folder / "files.npz")
    sizes, headers = files["size"].tolist(), files["header"].tolist()
    records = {n: FileRecord(n, s, "", h, "") for n, s, h in zip(names_of(world), sizes, headers, strict=True)}
    before = peak_bytes()

    def opened(data: bytes) -> Index:
        digest(data)
        return index_file.from_bytes(data, where="index")

    def checked(index: Index) -> Index:
        check_complete(index)
        check_places(index, records, "index")
        return index

    def planned(index: Index) -> tuple[Index, int, int]:
        targets = targets_of(model, layout, world // 2 + 1, index)
        return index, len(targets), len(plan_reads(index, targets).fragment)

    found = timed({"from_bytes": opened, "checks": checked, "plan": planned}, table, rounds)
    index, targets, reads = found.pop("result")
    counts = {"fragments": len(index), "tensors": len(index.tensors), "targets": targets, "reads": reads}
    return {**found, **counts, "memory_bytes": peak_bytes() - before}


def files(folder: Path) -> Result:
    """Reading the ranks' rows from the disk, as the coordinator does: sizes of the data files, then the rows."""
    storage = PosixStorage(folder / "checkpoint")
    sizes = np.load(folder / "files.npz")
    for kind in ("data", "rows"):
        (storage.root / kind).mkdir(parents=True)
    with (folder / "rows").open("rb") as source:
        for rank, length in enumerate(sizes["length"].tolist()):
            storage.path(Names(rank, 0).rows).write_bytes(source.read(length))
            storage.path(Names(rank, 0).data).touch()
    records = [FileRecord(name, 0, "", 0, "") for name in names_of(len(sizes["length"]))]
    begin, processor = time.perf_counter(), time.process_time()
    count = sum(len(data) for _, data in read_rows(storage, records, 0))
    seconds = {"read_seconds": time.perf_counter() - begin, "processor": time.process_time() - processor}
    return {**seconds, "read_bytes": count}


def peak_bytes() -> int:
    """Of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured(case: str, world: int, rounds: int, *, with_files: bool) -> Result:
    """All steps of a case, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        found: Result = {}
        for step in ("generate", "merge", "plan", *(["files"] if with_files else [])):
            command = [sys.executable, __file__, "--step", step, "--folder", folder, "--cases", case, "--ranks", str(world)]
            done = subprocess.run([*command, "--rounds", str(rounds)], check=True, capture_output=True, text=True)
            found[step] = json.loads(done.stdout)
        return found


def row_of(case: str, world: int, found: Result) -> str:
    model, layout, other = layouts_of(case, world)
    made, merged, planned = found["generate"], found["merge"], found["plan"]
    cells = [
        f"{model.title}, {layout}; loaded as {other}",
        f"{world:,}",
        f"{planned['fragments']:,}",
        f"{merged['index_bytes'] / 1e6:.1f}",
        f"{made['rows_bytes'] / 1e6:.0f}",
        f"{merged['seconds']:.2f} ({merged['processor']:.2f})",
        f"{merged['to_bytes']:.2f}",
        f"{merged['memory_bytes'] / 1e6:.0f}",
        f"{planned['seconds']:.2f} ({planned['processor']:.2f})",
        f"{planned['from_bytes']:.2f}",
        f"{planned['memory_bytes'] / 1e6:.0f}",
    ]
    if "files" in found:
        cells.append(f"{found['files']['read_seconds']:.1f} ({found['files']['processor']:.1f})")
    return f"| {' | '.join(cells)} |"


COLUMNS = [
    "job", "ranks", "fragments", "index MB", "rows MB", "merge s (processor)", "of it to bytes", "merge MB",
    "plan s (processor)", "of it from bytes", "plan MB", "reading rows s (processor)",
]  # fmt: skip
BEGIN, END = "<!-- metadata at scale: by the script -->", "<!-- end of metadata at scale -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["dense-1", "dense-3", "moe-1"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[8960, 100096], help="multiples of 256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", action="store_true", help="read the rows from as many files, too")
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE:RANKS", help="these instead of all combinations")
    parser.add_argument("--write", type=Path, help="document that has the markers to write between")
    parser.add_argument("--step", choices=("generate", "merge", "plan", "files"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        case, world = args.cases[0], args.ranks[0]
        steps = {
            "generate": lambda: generate(args.folder, case, world),
            "merge": lambda: merge(args.folder, args.rounds),
            "plan": lambda: plan(args.folder, case, world, args.rounds),
            "files": lambda: files(args.folder),
        }
        print(json.dumps(steps[args.step]()))
        return
    pairs = [(case, int(world)) for case, world in (pair.split(":") for pair in args.only)]
    columns = COLUMNS if args.files else COLUMNS[:-1]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for case, world in pairs or itertools.product(args.cases, args.ranks):
        found = measured(case, world, args.rounds, with_files=args.files)
        print(case, world, json.dumps(found), file=sys.stderr, flush=True)
        lines.append(row_of(case, world, found))
    shown = [argument for argument in sys.argv[1:] if not argument.startswith("--write")]
    if args.write:
        shown.remove(str(args.write))
    command = " ".join(["python benchmarks/metadata_scale.py", *shown])
    text = f"`{command}`\n\nBest of {args.rounds} rounds; {machine()}, numpy {np.__version__}.\n\n" + "\n".join(lines)
    print(text)
    if args.write:
        old = args.write.read_text()
        first, last = old.index(BEGIN) + len(BEGIN), old.index(END)
        args.write.write_text(f"{old[:first]}\n\n{text}\n\n{old[last:]}")


if __name__ == "__main__":
    main()
