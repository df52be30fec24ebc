"""Contribution of one rank to a checkpoint, and its preparation for writing in file order."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from unickpt.base.errors import UnsupportedLayoutError
from unickpt.base.logs import logger
from unickpt.checkpoint.format import objects
from unickpt.checkpoint.format.boxes import Box, cut, split_flat_range
from unickpt.checkpoint.format.casts import cast_flags
from unickpt.checkpoint.format.dtype_names import itemsize_bytes
from unickpt.checkpoint.format.dtypes import name_of
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.layout import SHARED_PREFIX, SHARED_TENSORS_PREFIX
from unickpt.checkpoint.format.manifest import COUNT_END, OptimizerRecord, Writer
from unickpt.checkpoint.format.witnessed import Passed

if TYPE_CHECKING:  # it has shards
    from unickpt.checkpoint.save.kept import BoundShards, Keeper

FRAGMENT_BYTES = 16 << 20  # smaller fragments would give a job of thousands of ranks millions of rows
_LARGEST_ITEM = 16  # bytes; no dtype has more


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a global tensor and its elements on this rank.

    Attributes:
        tensor: the global tensor.
        box: region of this shard.
        data: ``box.numel`` elements in the row-major order of the box, on any device, with any strides.
        unless: ``box.numel`` elements, or None. The shard is written only if it differs from the cast of ``unless``
            to its dtype: a weight that cannot be restored from its master.
        steady: only a step of the optimizer changes ``data`` and ``unless``.
    """

    tensor: TensorInfo
    box: Box
    data: torch.Tensor
    unless: torch.Tensor | None = None
    steady: bool = False

    @property
    def size_bytes(self) -> int:
        return self.box.numel * itemsize_bytes(self.tensor.dtype)


def shards_of_flat_range(
    tensor: TensorInfo, lo: int, hi: int, data: torch.Tensor, unless: torch.Tensor | None = None
) -> list[Shard]:
    """Return the shards of the flat range ``[lo, hi)`` of a tensor, given its ``hi - lo`` elements as a 1-D tensor."""
    return _consecutive(tensor, split_flat_range(tensor.shape, lo, hi), data, unless)


def _consecutive(
    tensor: TensorInfo, boxes: list[Box], data: torch.Tensor, unless: torch.Tensor | None, *, steady: bool = False
) -> list[Shard]:
    """Return the shards of boxes whose elements are consecutive in 1-D tensors."""
    shards = []
    at = 0
    for box in boxes:
        part = None if unless is None else unless.narrow(0, at, box.numel)
        shards.append(Shard(tensor, box, data.narrow(0, at, box.numel), part, steady))
        at += box.numel
    return shards


def resolve_conditions(shards: list[Shard]) -> list[Shard]:
    """Return the shards to write, without conditions. Device comparisons take one synchronization."""
    conditional = [shard for shard in shards if shard.unless is not None]
    flags = cast_flags([(shard.data, shard.unless) for shard in conditional if shard.unless is not None])
    derivable = {id(shard) for shard, flag in zip(conditional, flags, strict=True) if flag}
    return [
        replace(shard, unless=None) if shard.unless is not None else shard for shard in shards if id(shard) not in derivable
    ]


@dataclass
class Contribution:
    """Contribution of one rank to a checkpoint.

    Attributes:
        shards: tensor data that this rank writes. All ranks together cover every stored tensor exactly once.
        tensors: further tensors to list without a fragment of this rank (derived, empty).
        rank_objects: non-tensor state of this rank only (such as RNG state).
        shared_objects: non-tensor state that every rank may read by name. One rank contributes each.
        optimizer_part: groups and scalars of parameters that the coordinator does not hold (other pipeline stages,
            other experts). They are merged into ``optimizer``.
        different: values that differ from the coordinator's, as ``(name, consequence)``.
        unsteady: why nothing of it is steady, although the framework has an optimizer; '' otherwise.
        replica: ``(part, fingerprint)`` if several ranks hold the same part of the state and one of them stores it.
        aliases, excluded: further names of tied parameters, and names of excluded parameters. Those of all ranks are merged.
            Only one of the ranks with the same parameters needs to give them.
        step, writer, optimizer, objects: state of the job; only those of the coordinator are used.
        witness: what the job has passed; only that of the coordinator is used. None without a witness.
        bound: further shards, which an earlier contribution had in ``shards``; or None.
        keeper: keeps the steady shards for later contributions; or None.
    """

    shards: list[Shard]
    step: int
    writer: Writer
    tensors: list[TensorInfo] = field(default_factory=list)
    rank_objects: dict[str, Any] = field(default_factory=dict)
    shared_objects: dict[str, Any] = field(default_factory=dict)
    optimizer_part: OptimizerRecord | None = None
    optimizer: OptimizerRecord | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    objects: dict[str, Any] = field(default_factory=dict)
    different: tuple[tuple[str, str], ...] = ()
    replica: tuple[int, str] | None = None
    unsteady: str = ""
    bound: BoundShards | None = None
    keeper: Keeper | None = None
    witness: Passed | None = None


@dataclass
class Prepared:
    """A contribution in file order, with encoded objects. Only the data of tensors can still change with training.

    Attributes:
        shards: all shards of the data file of this rank, including objects. A conditional shard comes after the shard
            that it is compared with.
        tensors, step, writer, optimizer, optimizer_part, aliases, excluded, different, replica, witness: as in
            ``Contribution``.
        objects: the encoded objects of the job.
        notes: on the coordinator, the sentences on differences between ranks for the manifest.
        bound: shards that are not in ``shards`` yet, or None.
    """

    shards: list[Shard]
    tensors: list[TensorInfo]
    step: int
    writer: Writer
    optimizer: OptimizerRecord | None
    optimizer_part: OptimizerRecord | None
    aliases: dict[str, str]
    excluded: tuple[str, ...]
    objects: Any
    different: tuple[tuple[str, str], ...] = ()
    replica: tuple[int, str] | None = None
    notes: tuple[str, ...] = ()
    bound: BoundShards | None = None
    witness: Passed | None = None

    def bind(self) -> None:
        """Put all shards into ``shards``."""
        if self.bound is not None:
            self.shards, self.bound = in_file_order([*self.bound.shards(), *self.shards]), None


def in_file_order(shards: Iterable[Shard]) -> list[Shard]:
    """Return shards in an order that keeps every fragment aligned to its item size."""
    return sorted(shards, key=lambda shard: (-itemsize_bytes(shard.tensor.dtype), shard.unless is not None))


def prepare(contribution: Contribution, rank: int) -> Prepared:
    """Encode the objects and sort all shards into file order.

    Raises:
        UnsupportedLayoutError: no load accepts a checkpoint of this step.
    """
    step: object = contribution.step  # of the program
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < COUNT_END:
        raise UnsupportedLayoutError(f"step {step!r}: expected an integer from 0 to 2**62 - 1")
    job = objects.encode(contribution.objects, prefix=objects.JOB_PREFIX)
    _warn_of_opaque(job, "")
    shards = list(contribution.shards)
    if contribution.rank_objects:
        shards += _object_shards(contribution.rank_objects, objects.rank_prefix(rank), objects.rank_prefix(rank))
    for name, value in contribution.shared_objects.items():
        shards += _object_shards(value, f"{SHARED_PREFIX}{name}", f"{SHARED_TENSORS_PREFIX}{name}")
    if rank == 0:
        shards += _tensor_shards(job.tensors)
    empty, cut = [], []
    for shard in shards:
        numel = shard.box.numel
        if not numel:
            empty.append(shard.tensor)
        elif numel <= FRAGMENT_BYTES // _LARGEST_ITEM:
            cut.append(shard)
        else:
            cut += _cut(shard)
    shards = in_file_order(cut)
    if contribution.keeper is not None:
        contribution.keeper.keep(shards)
    # a conditional tensor must be listed even if none of its shards is written
    conditional = [shard.tensor for shard in contribution.shards if shard.unless is not None]
    conditional += () if contribution.bound is None else contribution.bound.kept.listed
    return Prepared(
        shards, [*contribution.tensors, *conditional, *empty], contribution.step, contribution.writer, contribution.optimizer,
        contribution.optimizer_part, contribution.aliases, contribution.excluded, job.value,
        contribution.different, contribution.replica, bound=contribution.bound, witness=contribution.witness,
    )  # fmt: skip


def _cut(shard: Shard) -> list[Shard]:
    """Cut a shard into shards of at most ``FRAGMENT_BYTES``, because a load reads and verifies whole fragments."""
    data, unless = shard.data.detach(), None if shard.unless is None else shard.unless.detach()
    # a conditional shard is cut in the same way as the shard that it is compared with
    item = max(itemsize_bytes(shard.tensor.dtype), 0 if unless is None else unless.element_size())
    boxes = cut(shard.box, max(FRAGMENT_BYTES // item, 1))
    if len(boxes) == 1:
        return [shard]
    if data.is_contiguous() and (unless is None or unless.is_contiguous()):
        flat = None if unless is None else unless.view(-1)
        return _consecutive(shard.tensor, boxes, data.view(-1), flat, steady=shard.steady)
    if tuple(data.shape) != shard.box.shape or (unless is not None and unless.shape != data.shape):
        return [shard]
    slices = [box.within(shard.box).slices() for box in boxes]
    return [
        Shard(shard.tensor, box, data[part], None if unless is None else unless[part], shard.steady)
        for box, part in zip(boxes, slices, strict=True)
    ]


def _warn_of_opaque(encoded: objects.Encoded, where: str) -> None:
    if encoded.opaque:
        logger.warning(
            "unickpt: values%s of types that unickpt does not store natively: %s. They are stored as pickles. A load leaves "
            "them out, unless allow_pickle is set. Store them in plain containers, numbers, strings, arrays and tensors.",
            where,
            "; ".join(encoded.opaque[:8]),
        )


def _object_shards(value: Any, key: str, prefix: str) -> list[Shard]:
    """Return the shards of an object outside the manifest: its JSON as a byte tensor, and the tensors extracted from it."""
    if value is None:
        return [_nothing(key)]
    encoded = objects.encode(value, prefix=prefix)
    _warn_of_opaque(encoded, f" in {key}")
    text = bytearray(json.dumps(encoded.value).encode())
    return _tensor_shards({key: torch.frombuffer(text, dtype=torch.uint8), **encoded.tensors})


@lru_cache(maxsize=4096)
def _nothing(key: str) -> Shard:
    """Return the shard of a None, which many modules of Megatron have as extra state. Nothing writes to its bytes."""
    (shard,) = _tensor_shards({key: torch.frombuffer(bytearray(b"null"), dtype=torch.uint8)})
    return shard


def _tensor_shards(tensors: dict[str, torch.Tensor]) -> list[Shard]:
    shards = []
    for key, tensor in tensors.items():
        info = TensorInfo(key, "object", name_of(tensor.dtype), tuple(tensor.shape), "object")
        flat = tensor.reshape(-1)
        shards += shards_of_flat_range(info, 0, info.numel, flat) if info.numel else [Shard(info, Box.whole(info.shape), flat)]
    return shards
