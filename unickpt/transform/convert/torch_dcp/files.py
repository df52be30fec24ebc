"""Files of ``torch.distributed.checkpoint``: the pickle ``.metadata``, and ``*.distcp`` with archives of ``torch.save``.

Their content is defined by torch/distributed/checkpoint/metadata.py (``Metadata``) and filesystem.py (``_StorageInfo``,
``_write_item``). The table is read at once. The archive of a chunk is opened at its first read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unickpt.base.errors import FormatError
from unickpt.checkpoint.format.boxes import Box, find_overlap, split_flat_range
from unickpt.checkpoint.format.dtypes import name_of
from unickpt.checkpoint.format.index import MAX_NDIM, TensorInfo
from unickpt.transform.convert.pickles.lazy_tensor import Located, OpenFiles
from unickpt.transform.convert.pickles.regular_files import named_file
from unickpt.transform.convert.pickles.safe_pickle import Record, load_archive, load_plain
from unickpt.transform.convert.pipeline import Portion, SourcePart
from unickpt.transform.convert.readings import InPlace, Reading, Regions

METADATA = ".metadata"
MAX_METADATA_BYTES = 1 << 30
MAX_OBJECT_BYTES = 1 << 30
_SAMPLE, _FAR = 1024, 0.25
_PARTS_OF_A_METADATA = "torch.distributed.checkpoint.metadata."


@dataclass(frozen=True, slots=True)
class ArchivePlace:
    """Position of an archive.

    Attributes:
        path: path of the file.
        relative: path relative to the folder of the checkpoint.
        begin_byte, size_bytes: byte range in the file.
    """

    path: Path
    relative: str
    begin_byte: int
    size_bytes: int


class StoredChunk(InPlace):
    """A box of a tensor in its own archive, which is opened at the first read."""

    __slots__ = ("_found", "_table", "box", "dtype", "name", "place")

    def __init__(self, table: DcpTable, name: str, dtype: str, box: Box, place: ArchivePlace) -> None:
        self._table, self.name, self.dtype, self.box, self.place = table, name, dtype, box, place
        self._found: Located | None = None

    def __call__(self, box: Box) -> torch.Tensor:
        """Read a box within this chunk, in the coordinates of the tensor. Return its elements, 1-D in row-major order.

        Raises:
            FormatError: the archive is damaged, or contains another tensor than the table says.
        """
        return self._located().read(box.within(self.box))

    def read_into(self, box: Box, target: torch.Tensor) -> None:
        """Read a box into a 1-D tensor of its dtype with as many elements. Raises as a call."""
        self._located().read_into(box.within(self.box), target)

    def _located(self) -> Located:
        if self._found is None:
            self._found = self._checked()
        return self._found

    def _checked(self) -> Located:
        found = self._table.load(self.place, self.name)
        if not isinstance(found, Located):
            kind = found.kind if isinstance(found, Record) else type(found).__name__
            raise FormatError(f"{self.place.path}: {self.name} is a {kind}, expected a plain tensor")
        if (found.dtype, found.shape) != (self.dtype, self.box.shape):
            raise FormatError(
                f"{self.place.path}: {self.name} at byte {self.place.begin_byte:,} is {found.dtype} {list(found.shape)}; "
                f"{METADATA} says {self.dtype} {list(self.box.shape)}"
            )
        return found


@dataclass(frozen=True)
class StoredTensor:
    """A stored tensor.

    Attributes:
        name: name in the table.
        dtype: format name of the dtype.
        shape: global shape.
        chunks: chunks that cover the tensor exactly once.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Sequence[StoredChunk]

    @property
    def numel(self) -> int:
        return Box.whole(self.shape).numel

    def is_same_as(self, other: StoredTensor) -> bool:
        """Return whether both names refer to the same bytes."""
        boxes, others = ({chunk.box: chunk.place for chunk in each.chunks} for each in (self, other))
        return (self.dtype, self.shape, boxes) == (other.dtype, other.shape, others)

    def read(self) -> torch.Tensor:
        """Read the whole tensor."""
        regions = Regions(self.dtype, [(chunk.box, chunk) for chunk in self.chunks])
        return regions.read(Box.whole(self.shape)).view(self.shape)


class DcpTable:
    """Table of a DCP folder.

    Attributes:
        tensors: tensors by name.
        objects: positions of other objects by name.
        paths: keys of the nested dictionaries that a name was flattened from, by name, if the table has them.
        version: version of the format in the table.
    """

    def __init__(self, folder: Path, files: OpenFiles, also: Sequence[str] = ()) -> None:
        """Read the table without data.

        Raises:
            FormatError: the table is damaged, or has content that is not supported.
            UnsafePickleError: the pickle names a class that is not allowed.
            OSError: a file cannot be read.
        """
        self.folder, self._files, self._also = folder, files, also
        self.where = folder / METADATA
        self._sizes: dict[str, int] = {}
        if not self.where.is_file():
            raise FormatError(
                f"{folder}: has no common {METADATA} of all ranks (was it saved with no_dist or without collectives?)"
            )
        size = files.size_bytes(self.where)
        if size > MAX_METADATA_BYTES:
            raise FormatError(f"{self.where}: has {size:,} bytes, the limit is {MAX_METADATA_BYTES:,}")
        root = load_plain(files.read(self.where, 0, size), self.where, files, also=also)
        state = self._state(root, "Metadata")
        self.version = str(state.get("version") or "")
        places = self._places(state.get("storage_data"))
        self.tensors: dict[str, StoredTensor] = {}
        self.objects: dict[str, ArchivePlace] = {}
        for name, entry in self._dict(state.get("state_dict_metadata"), "state_dict_metadata").items():
            kind = entry.kind.removeprefix(_PARTS_OF_A_METADATA) if isinstance(entry, Record) else ""
            if not isinstance(name, str):
                raise FormatError(f"{self.where}: the name {name!r} is not text")
            if kind == "BytesStorageMetadata":
                self.objects[name] = self._place(places, name, None)
            elif kind == "TensorStorageMetadata":
                self.tensors[name] = self._tensor(name, entry.state, places)
            else:
                raise FormatError(f"{self.where}: {name} is neither a tensor nor an object ({entry!r:.80})")
        paths = state.get("planner_data")
        self.paths: dict[str, tuple[Any, ...]] = {
            name: path
            for name, path in (paths.items() if isinstance(paths, dict) else ())
            if isinstance(name, str) and isinstance(path, tuple) and path
        }

    def load(self, place: ArchivePlace, name: str) -> Any:
        """Return the object in an archive. Its tensors are ``Located``. Raises FormatError."""
        if place.size_bytes < 2 or self._files.read(place.path, place.begin_byte, 2) != b"PK":
            raise FormatError(
                f"{place.path}: {name} at byte {place.begin_byte:,} is not an archive of torch.save; other serializations of "
                "DCP (safetensors) are not supported"
            )
        return load_archive(place.path, place.begin_byte, place.size_bytes, self._files, also=self._also)

    # ---------------------------------------------------------------- the pickle

    def _state(self, value: Any, kind: str) -> Mapping[str, Any]:
        if not isinstance(value, Record) or value.kind.rpartition(".")[2] != kind:
            raise FormatError(f"{self.where}: contains {value!r:.80}, expected a {kind}")
        return value.state

    def _dict(self, value: Any, what: str) -> Mapping[Any, Any]:
        if not isinstance(value, dict):
            raise FormatError(f"{self.where}: {what} is a {type(value).__name__}, expected a dictionary")
        return value

    def _numbers(self, value: Any, what: str) -> tuple[int, ...]:
        if not isinstance(value, (tuple, list)) or len(value) > MAX_NDIM:
            raise FormatError(f"{self.where}: {what} is {value!r:.80}")
        if any(type(number) is not int or not 0 <= number < 1 << 62 for number in value):
            raise FormatError(f"{self.where}: {what} is {value!r:.80}")
        return tuple(value)

    def _places(self, value: Any) -> dict[tuple[str, tuple[int, ...] | None], Mapping[str, Any]]:
        """Return the storage entries by name and offset."""
        found = {}
        for index, info in self._dict(value, "storage_data").items():
            key = self._state(index, "MetadataIndex")
            offset = key.get("offset")
            found[str(key.get("fqn")), None if offset is None else self._numbers(offset, "an offset")] = self._state(
                info, "_StorageInfo"
            )
        return found

    def _place(self, places: Mapping[Any, Mapping[str, Any]], name: str, offset: tuple[int, ...] | None) -> ArchivePlace:
        state = places.get((name, offset))
        at = "" if offset is None else f" at {list(offset)}"
        if state is None:
            raise FormatError(f"{self.where}: has no storage entry of {name}{at}")
        relative, begin, size = state.get("relative_path"), state.get("offset"), state.get("length")
        if state.get("transform_descriptors"):
            raise FormatError(
                f"{self.where}: {name}{at} was written with the transformation {state['transform_descriptors']} (such as "
                "compression), which is not supported: save it again without extensions of the writer"
            )
        if not isinstance(relative, str) or type(begin) is not int or type(size) is not int or begin < 0 or size < 0:
            raise FormatError(f"{self.where}: the storage entry of {name}{at} is invalid: {state!r:.120}")
        path = self.folder / relative
        if relative not in self._sizes:
            self._sizes[relative] = named_file(self.folder, relative, str(self.where)).stat().st_size
        if begin + size > self._sizes[relative]:
            raise FormatError(
                f"{path}: has {self._sizes[relative]:,} bytes, but {name}{at} is at bytes {begin:,} to {begin + size:,}"
            )
        return ArchivePlace(path, relative, begin, size)

    def _tensor(self, name: str, state: Mapping[str, Any], places: Mapping[Any, Mapping[str, Any]]) -> StoredTensor:
        dtype = self._dtype(name, state.get("properties"))
        shape = self._numbers(state.get("size"), f"the shape of {name}")
        entries = state.get("chunks")
        if not isinstance(entries, list):
            raise FormatError(f"{self.where}: {name} has no list of chunks")
        chunks = []
        for each in entries:
            chunk = self._state(each, "ChunkStorageMetadata")
            start = self._numbers(chunk.get("offsets"), f"the offset of a chunk of {name}")
            extent = self._numbers(chunk.get("sizes"), f"the shape of a chunk of {name}")
            outside = (
                len(start) != len(shape)
                or len(extent) != len(shape)
                or any(a + n > m for a, n, m in zip(start, extent, shape, strict=True))
            )
            if outside:
                raise FormatError(f"{self.where}: {name} of shape {list(shape)} has a chunk of {list(extent)} at {list(start)}")
            if 0 not in extent:
                chunks.append(StoredChunk(self, name, dtype, Box(start, extent), self._place(places, name, start)))
        self._check_cover(name, shape, [chunk.box for chunk in chunks])
        return StoredTensor(name, dtype, shape, chunks)

    def _dtype(self, name: str, properties: Any) -> str:
        """Return the dtype in ``TensorProperties``, which can also be a tuple with the dtype first (``ShardedTensor``)."""
        state = self._state(properties, "TensorProperties")
        dtype = state.get("dtype", next(iter(state.get("") or ()), None))
        if not isinstance(dtype, torch.dtype):
            raise FormatError(f"{self.where}: {name} has no dtype ({state!r:.80})")
        return name_of(dtype)

    def _check_cover(self, name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
        if len(boxes) > 1:
            starts, extents = (
                np.array([getattr(box, what) for box in boxes], np.int64).reshape(len(boxes), len(shape))
                for what in ("start", "shape")
            )
            pair = find_overlap(starts, extents)
            if pair is not None:
                raise FormatError(f"{self.where}: chunks {boxes[pair[0]]} and {boxes[pair[1]]} of {name} overlap")
        found, expected = sum(box.numel for box in boxes), Box.whole(shape).numel
        if found != expected:
            raise FormatError(f"{self.where}: {name} is incomplete: its chunks have {found:,} of {expected:,} elements")


def portions_of(
    tensors: Iterable[tuple[TensorInfo, StoredTensor, StoredTensor | None]],
) -> tuple[list[Portion], list[TensorInfo]]:
    """Return one portion per file.

    Args:
        tensors: for each tensor its description in the checkpoint, the stored tensor, and for a derived tensor the one that
            it is the cast of.

    Returns:
        The portions, and the tensors without elements.
    """
    parts: dict[str, list[SourcePart]] = defaultdict(list)
    inputs: dict[str, set[Path]] = defaultdict(set)
    empty = []
    for info, stored, origin in tensors:
        if not stored.chunks:
            empty.append(info)
        origins = None if origin is None else _Origins(origin)
        for chunk in stored.chunks:
            unless = None
            if origins is not None:
                unless, paths = origins.within(chunk.box)
                inputs[chunk.place.relative] |= paths
            inputs[chunk.place.relative].add(chunk.place.path)
            parts[chunk.place.relative].append(SourcePart(info, chunk.box, chunk, unless))
    portions = [Portion(name.replace("/", "-"), parts[name], sorted(inputs[name])) for name in sorted(parts)]
    return portions, empty


def is_far(weight: StoredTensor, master: StoredTensor) -> bool:
    """Return whether most elements of a weight are not near those of another tensor of its shape, by a sample of them.

    Rounding, also that of fp8, sets two numbers apart by less than a quarter of the larger one.
    """
    origins = _Origins(master)
    far = seen = 0
    for chunk in dict.fromkeys((*weight.chunks[:1], *weight.chunks[-1:])):
        n = chunk.box.numel
        for lo, hi in ((0, min(n, _SAMPLE)), (max(n - _SAMPLE, 0), n)):
            for part in split_flat_range(chunk.box.shape, lo, hi):
                box = Box(tuple(map(add, chunk.box.start, part.start)), part.shape)
                one, other = chunk(box).float(), origins.within(box)[0](box).float()
                far += int(((one - other).abs() > _FAR * one.abs().maximum(other.abs())).sum())
                seen += box.numel
    return 2 * far > seen


class _Origins:
    """Source of a derived tensor, readable by box."""

    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored
        self._exact = {chunk.box: chunk for chunk in stored.chunks}
        shape = len(stored.chunks), len(stored.shape)  # an empty tensor has no chunks
        self._start = np.array([chunk.box.start for chunk in stored.chunks], np.int64).reshape(shape)
        self._stop = np.array([chunk.box.stop for chunk in stored.chunks], np.int64).reshape(shape)

    def within(self, box: Box) -> tuple[Reading, set[Path]]:
        """Return the function that reads boxes within ``box``, and the files that it reads."""
        same = self._exact.get(box)
        if same is not None:
            return same, {same.place.path}
        meets = ((self._start < np.array(box.stop)) & (self._stop > np.array(box.start))).all(axis=1)
        chunks = [self._stored.chunks[at] for at in np.flatnonzero(meets).tolist()]
        regions = Regions(self._stored.dtype, [(chunk.box, chunk) for chunk in chunks])
        return regions.read, {chunk.place.path for chunk in chunks}
