"""Shards that one save describes and the next ones use again, while nothing that the description has read is another.

Only places are kept, in tensors of the job that are its *bases*. No view is kept: memory that the job frees is free.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from unickpt.base.arrays import Ints
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.tensor_info import TensorInfo
from unickpt.checkpoint.save.late_copy import Watch
from unickpt.checkpoint.save.shards import Shard

_dtypes, _versions = attrgetter("dtype"), attrgetter("_version")
_AT_ONCE = 256  # tensors: read one after another, thousands of them leave the cache before the next reading
Getter = Callable[[torch.Tensor], Any]


def read_of(tensors: Sequence[torch.Tensor], *getters: Getter) -> list[list[Any]]:
    """Return what each getter reads of each tensor: a list for each getter."""
    found: list[list[Any]] = [[] for _ in getters]
    for at in range(0, len(tensors), _AT_ONCE):
        some = tensors[at : at + _AT_ONCE]
        for values, getter in zip(found, getters, strict=True):
            values += map(getter, some)
    return found


@dataclass(frozen=True, slots=True)
class Facts:
    """What a description has read. ``KeptFacts`` tells whether it would read the same again.

    Attributes:
        objects: compared by identity.
        tensors: compared by memory, shape, strides and dtype.
        shaped: tensors that are compared by shape and dtype alone.
        values: compared by ``==``.
    """

    objects: Sequence[Any] = ()
    tensors: Sequence[torch.Tensor] = ()
    shaped: Sequence[torch.Tensor] = ()
    values: tuple[Any, ...] = ()

    def read(self) -> list[Any]:
        """Return what two facts have in common that are the same."""
        return [
            list(map(id, self.objects)),
            *read_of(self.tensors, torch.Tensor.data_ptr, torch.Tensor.stride, torch.Tensor.size, _dtypes),
            *read_of(self.shaped, torch.Tensor.size, _dtypes),
            self.values,
        ]


class KeptFacts:
    """The facts of an earlier description. It holds no object: one that has ended makes all later facts different.

    That is not so of tensors. torch swaps none that has a weak reference (``torch.utils.swap_tensors``), and ``Module.to`` may
    swap. Another tensor at the address of one that has ended, under the same name, with the same memory, shape, strides and
    dtype, is described alike.
    """

    def __init__(self, facts: Facts) -> None:
        self._read = facts.read()
        self._ended: list[Any] = []
        every = {id(each): each for each in facts.objects if each is not None and not isinstance(each, torch.Tensor)}
        self._references = [weakref.ref(each, self._ended.append) for each in every.values()]

    def fit(self, facts: Facts) -> bool:
        """Whether a description of these facts would be the same."""
        return not self._ended and facts.read() == self._read


@dataclass(frozen=True, slots=True)
class _Place:
    """Elements of a base: as for ``torch.as_strided``, counted from its first element. All of it if ``size`` is None."""

    base: int
    offset: int
    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()

    def of(self, bases: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor:
        """Return the elements. ``bases``: detached, each with its offset in the storage."""
        base, begin = bases[self.base]
        return base if self.size is None else base.as_strided(self.size, self.stride, begin + self.offset)

    def renumbered(self, used: Sequence[int]) -> _Place:
        """Return the same place with a base that is numbered among the used ones, ascending."""
        return replace(self, base=bisect_left(used, self.base))


@dataclass(frozen=True, slots=True)
class _KeptShard:
    tensor: TensorInfo
    box: Box
    data: _Place
    unless: _Place | None

    def renumbered(self, used: Sequence[int]) -> _KeptShard:
        """Return the same with bases that are numbered among the used ones."""
        found = (
            None if each is None else replace(each, base=bisect_left(used, each.base)) for each in (self.data, self.unless)
        )
        return _KeptShard(self.tensor, self.box, *found)  # type: ignore[arg-type]


class KeptShards:
    """Steady shards without their data, in file order.

    Attributes:
        names: of the tensors that are copied or compared behind training.
        compared: which of them are compared alone.
        certain_bytes: size of the shards without a condition.
        on_host: all of them are in host memory.
        listed: tensors that are in the index even if none of their shards is written.
    """

    def __init__(self, shards: Sequence[_KeptShard], bases: Sequence[torch.Tensor], numbers: Sequence[int]) -> None:
        self._shards, self._numbers = shards, numbers
        self.on_host = all(base.is_cpu for base in bases)
        self.listed = [shard.tensor for shard in shards if shard.unless is not None]
        self.certain_bytes = sum(shard.box.numel * bases[shard.data.base].itemsize for shard in shards if shard.unless is None)
        self.names: list[str] = []
        self.compared: list[bool] = []
        spans: list[tuple[int, int, int]] = []  # base, offset in bytes, size in bytes
        first: dict[int, str] = {}
        copied: set[tuple[int, int]] = set()
        for shard in shards:
            spans.append(self._watched(shard, shard.data, bases, compared=shard.unless is not None))
            first.setdefault(shard.data.base, shard.tensor.name)
            if shard.unless is None:
                copied.add((shard.data.base, shard.data.offset))
            elif (shard.unless.base, shard.unless.offset) not in copied:
                spans.append(self._watched(shard, shard.unless, bases, compared=True))
                first.setdefault(shard.unless.base, shard.tensor.name)
        self._first = sorted(first.items())
        self._spans = np.array(spans, np.int64).reshape(-1, 3)

    def _watched(
        self, shard: _KeptShard, place: _Place, bases: Sequence[torch.Tensor], *, compared: bool
    ) -> tuple[int, int, int]:
        item = bases[place.base].itemsize
        self.names.append(shard.tensor.name)
        self.compared.append(compared)
        return place.base, place.offset * item, shard.box.numel * item

    @classmethod
    def of(cls, shards: Sequence[Shard], bases: Sequence[torch.Tensor]) -> KeptShards | None:
        """Return the shards without their data; None if some are not dense, or are not in a base.

        Args:
            shards: steady, in file order.
            bases: tensors of the job, such that the shards are views of some of them.
        """
        among = _Bases(bases)
        found = []
        for shard in shards:
            data = among.place(shard.data)
            unless = None if shard.unless is None else among.place(shard.unless)
            if data is None or (shard.unless is not None and unless is None) or not shard.steady:
                return None
            found.append(_KeptShard(shard.tensor, shard.box, data, unless))
        used = sorted({place.base for each in found for place in (each.data, each.unless) if place is not None})
        if any(bases[number].is_inference() or not _dense(bases[number]) for number in used):
            return None
        return cls([each.renumbered(used) for each in found], [bases[number] for number in used], used)

    def bases(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the bases of the shards among those that ``of`` was given."""
        return [tensors[number] for number in self._numbers]

    def shards(self, bases: Sequence[torch.Tensor]) -> list[Shard]:
        """Return the shards with the data of detached bases."""
        roots = [(base, int(base.storage_offset())) for base in bases]
        return [
            Shard(each.tensor, each.box, each.data.of(roots), None if each.unless is None else each.unless.of(roots), True)
            for each in self._shards
        ]

    def boxes(self) -> list[tuple[TensorInfo, Box]]:
        """Return tensor and box of each shard."""
        return [(each.tensor, each.box) for each in self._shards]

    def spans(self, begins: Ints) -> Ints:
        """Return address and size in bytes of each tensor of ``names``. int64 ``[names, 2]``. ``begins``: of the bases."""
        return np.stack([begins[self._spans[:, 0]] + self._spans[:, 1], self._spans[:, 2]], axis=1)

    def written(self, bases: Sequence[torch.Tensor], versions: Sequence[int]) -> list[tuple[str, torch.Tensor, int]]:
        """Return the bases that the shards are in, each with the name of a tensor in it, and its count of writes."""
        return [(name, bases[base], versions[base]) for base, name in self._first]


class _Bases:
    """Finds places of tensors in bases, of which many may share a storage."""

    def __init__(self, bases: Sequence[torch.Tensor]) -> None:
        self._bases = bases
        self._sorted: dict[torch.dtype, list[tuple[int, int]]] = {}  # address and number
        for number, base in enumerate(bases):
            self._sorted.setdefault(base.dtype, []).append((base.data_ptr(), number))
        for each in self._sorted.values():
            each.sort()

    def place(self, data: torch.Tensor) -> _Place | None:
        """Return the place of a dense tensor in one of the bases, or None. Of several bases it is the one that begins last."""
        if not _dense(data):
            return None
        among = self._sorted.get(data.dtype, [])
        last = bisect_right(among, (data.data_ptr(), len(self._bases)))
        found = (among[at][1] for at in range(last - 1, -1, -1))
        number = next((number for number in found if _within(data, self._bases[number])), None)
        if number is None:
            return None
        base = self._bases[number]
        offset = (data.data_ptr() - base.data_ptr()) // data.itemsize
        if not offset and data.size() == base.size():
            return _Place(number, 0)
        return _Place(number, offset, tuple(data.size()), data.stride())


def _dense(tensor: torch.Tensor) -> bool:
    """As ``casts.is_dense``, on any device. A complex tensor may become a conjugate one of the same memory."""
    return tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_complex()


def _within(data: torch.Tensor, base: torch.Tensor) -> bool:
    begin = data.data_ptr() - base.data_ptr()
    return begin >= 0 and begin + data.nbytes <= base.nbytes and begin % data.itemsize == 0


@dataclass(frozen=True, slots=True)
class BoundShards:
    """Kept shards at the call of a save.

    Attributes:
        kept: the shards.
        bases: the tensors that they are in, detached.
        begins: their addresses.
        versions: torch's counts of writes to them.
    """

    kept: KeptShards
    bases: Sequence[torch.Tensor] = field(repr=False)
    begins: Ints = field(repr=False)
    versions: Sequence[int] = field(repr=False)

    @classmethod
    def of(cls, kept: KeptShards, bases: Sequence[torch.Tensor]) -> BoundShards:
        """Bind the shards to bases of the job, as for ``KeptShards.of``. Other memory of a base does not change them later."""
        tensors, begins, versions = read_of(kept.bases(bases), torch.Tensor.detach, torch.Tensor.data_ptr, _versions)
        return cls(kept, tensors, np.array(begins, np.int64), versions)

    def shards(self) -> list[Shard]:
        """Return the shards with their data."""
        return self.kept.shards(self.bases)

    def watch(self) -> Watch:
        """Return the watch of what is copied or compared behind training."""
        written = self.kept.written(self.bases, self.versions)
        return Watch(written, self.kept.names, self.kept.spans(self.begins), self.kept.compared)


@dataclass
class Keeper:
    """Keeps the shards of a contribution for the next one.

    Attributes:
        bases: the tensors that the steady shards of the contribution are views of; forgotten by ``keep``.
        kept: the shards, once they are in file order; None if they cannot be kept.
    """

    bases: Sequence[torch.Tensor]
    kept: KeptShards | None = None

    def keep(self, shards: Iterable[Shard]) -> None:
        """Keep the steady shards among those of a contribution, which are in file order."""
        self.kept, self.bases = KeptShards.of([shard for shard in shards if shard.steady], self.bases), ()
