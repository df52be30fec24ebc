"""What one rank brings to a checkpoint, before and after it is put in the order of its file."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from unickpt import objects
from unickpt.dtypes import cast_flags, itemsize_bytes, name_of
from unickpt.fragments import Box, cut, split_flat_range
from unickpt.index import TensorInfo
from unickpt.loading import SHARED_PREFIX, SHARED_TENSORS_PREFIX
from unickpt.manifest import OptimizerRecord, Writer

logger = logging.getLogger("unickpt")

FRAGMENT_BYTES = 16 << 20  # smaller ones would cost a job of thousands of ranks millions of rows


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a global tensor and its elements on this rank.

    ``data`` holds ``box.numel`` elements whose row-major order is the box's; any device, any strides.
    With ``unless`` (as many elements), it is only written if it is not, bit for bit, the cast of those:
    a weight that its master does not tell.
    """

    tensor: TensorInfo
    box: Box
    data: torch.Tensor
    unless: torch.Tensor | None = None

    @property
    def size_bytes(self) -> int:
        return self.box.numel * itemsize_bytes(self.tensor.dtype)


def shards_of_flat_range(
    tensor: TensorInfo, lo: int, hi: int, data: torch.Tensor, unless: torch.Tensor | None = None
) -> list[Shard]:
    """Shards for the flat range ``[lo, hi)`` of a tensor, from its ``hi - lo`` elements in a 1-D tensor."""
    return _one_after_the_other(tensor, split_flat_range(tensor.shape, lo, hi), data, unless)


def _one_after_the_other(tensor: TensorInfo, boxes: list[Box], data: torch.Tensor, unless: torch.Tensor | None) -> list[Shard]:
    """Shards of boxes whose elements follow each other in 1-D tensors."""
    shards = []
    at = 0
    for box in boxes:
        part = None if unless is None else unless.narrow(0, at, box.numel)
        shards.append(Shard(tensor, box, data.narrow(0, at, box.numel), part))
        at += box.numel
    return shards


def resolved(shards: list[Shard]) -> list[Shard]:
    """Those that are to be written; on a device, one wait for all comparisons together."""
    conditional = [shard for shard in shards if shard.unless is not None]
    tells = cast_flags([(shard.data, shard.unless) for shard in conditional if shard.unless is not None])
    told = {id(shard) for shard, tell in zip(conditional, tells, strict=True) if tell}
    return [replace(shard, unless=None) if shard.unless is not None else shard for shard in shards if id(shard) not in told]


@dataclass
class Contribution:
    """What one rank brings to a checkpoint.

    Attributes:
        shards: what this rank writes; together the ranks cover every stored tensor exactly once.
        tensors: tensors to list although this rank has no fragment of them (derived, empty).
        rank_objects: non-tensor state of this rank alone (such as RNG).
        shared_objects: non-tensor state that any rank may ask for by its name; one rank brings each.
        optimizer_part: groups and scalars of parameters that the coordinator does not hold (other
            pipeline stages, other experts); merged into ``optimizer``.
        different: what this rank holds other values of than the coordinator, each with what follows from it.
        replica: ``(part, fingerprint)`` where several ranks hold the same part of the state and one stores it.
        step, writer, optimizer, aliases, excluded, objects: of the job; the coordinator's count.
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


@dataclass
class Prepared:
    """A contribution in the order of its file, its objects encoded: only tensors' data can still change with training.

    Attributes:
        shards: everything that goes into this rank's data file, objects included; those with a condition behind
            what they depend on.
        tensors, step, writer, optimizer, optimizer_part, aliases, excluded, different, replica: as in ``Contribution``.
        objects: the job's objects as the manifest holds them.
        notes: on the coordinator: what the manifest says of differences between ranks.
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


def prepare(contribution: Contribution, rank: int) -> Prepared:
    """Encode the objects and put everything into the order of the file."""
    job = objects.encode(contribution.objects, prefix="objects/job")
    if job.opaque:
        logger.warning("unickpt: stored as opaque blobs, which only load with allow_pickle: %s", "; ".join(job.opaque[:8]))
    shards = list(contribution.shards)
    if contribution.rank_objects:
        shards += _object_shards(contribution.rank_objects, f"objects/rank{rank:05d}", f"objects/rank{rank:05d}")
    for name, value in contribution.shared_objects.items():
        shards += _object_shards(value, f"{SHARED_PREFIX}{name}", f"{SHARED_TENSORS_PREFIX}{name}")
    if rank == 0:
        shards += _tensor_shards(job.tensors)
    shards = [piece for shard in shards for piece in _cut(shard)]
    # keeps every fragment aligned to its item size
    shards.sort(key=lambda shard: (-itemsize_bytes(shard.tensor.dtype), shard.unless is not None))
    depending = [shard.tensor for shard in contribution.shards if shard.unless is not None]  # none of them may be written
    return Prepared(
        shards, [*contribution.tensors, *depending], contribution.step, contribution.writer, contribution.optimizer,
        contribution.optimizer_part, contribution.aliases, contribution.excluded, job.value,
        contribution.different, contribution.replica,
    )  # fmt: skip


def _cut(shard: Shard) -> list[Shard]:
    """Shards of at most ``FRAGMENT_BYTES``: a load that wants a part of one reads, and checks, all of it."""
    data, unless = shard.data.detach(), None if shard.unless is None else shard.unless.detach()
    item = max(
        itemsize_bytes(shard.tensor.dtype), 0 if unless is None else unless.element_size()
    )  # as what it is compared with
    boxes = cut(shard.box, max(FRAGMENT_BYTES // item, 1))
    if len(boxes) == 1:
        return [shard]
    if data.is_contiguous() and (unless is None or unless.is_contiguous()):
        return _one_after_the_other(shard.tensor, boxes, data.view(-1), None if unless is None else unless.view(-1))
    if tuple(data.shape) != shard.box.shape or (unless is not None and unless.shape != data.shape):
        return [shard]
    slices = [box.within(shard.box).slices() for box in boxes]
    return [
        Shard(shard.tensor, box, data[part], None if unless is None else unless[part])
        for box, part in zip(boxes, slices, strict=True)
    ]


def _object_shards(value: Any, key: str, prefix: str) -> list[Shard]:
    """An object outside the manifest: its JSON as a tensor of bytes, and the tensors that were in it."""
    encoded = objects.encode(value, prefix=prefix)
    text = bytearray(json.dumps(encoded.value).encode())
    return _tensor_shards({key: torch.frombuffer(text, dtype=torch.uint8), **encoded.tensors})


def _tensor_shards(tensors: dict[str, torch.Tensor]) -> list[Shard]:
    shards = []
    for key, tensor in tensors.items():
        info = TensorInfo(key, "object", name_of(tensor.dtype), tuple(tensor.shape), "object")
        shards += shards_of_flat_range(info, 0, info.numel, tensor.reshape(-1))
    return shards
