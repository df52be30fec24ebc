"""The files of ``torch.distributed.checkpoint``: ``.metadata``, a pickle, and ``*.distcp``, archives of ``torch.save``.

What is in them: torch/distributed/checkpoint/metadata.py (``Metadata``) and filesystem.py (``_StorageInfo``, ``_write_item``).
The table is read at once; the archive of a chunk is opened when something of it is wanted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unickpt.converting import Part, Portion, Reading, Regions
from unickpt.dtypes import name_of
from unickpt.errors import FormatError
from unickpt.foreign.located import Files, Located
from unickpt.foreign.pickles import Record, load_archive, load_plain
from unickpt.fragments import Box, find_overlap
from unickpt.index import MAX_NDIM, TensorInfo
from unickpt.regular_files import named_file

METADATA = ".metadata"
MAX_METADATA_BYTES = 1 << 30
MAX_OBJECT_BYTES = 1 << 30
_PARTS_OF_A_METADATA = "torch.distributed.checkpoint.metadata."


@dataclass(frozen=True, slots=True)
class Place:
    """Where an archive lies. Attributes: file, and that within its folder; first byte; bytes."""

    path: Path
    relative: str
    begin_byte: int
    size_bytes: int


class Chunk:
    """A box of a tensor, in an archive of its own that is opened when it is first read."""

    __slots__ = ("_found", "_table", "box", "dtype", "name", "place")

    def __init__(self, table: Table, name: str, dtype: str, box: Box, place: Place) -> None:
        self._table, self.name, self.dtype, self.box, self.place = table, name, dtype, box, place
        self._found: Located | None = None

    def read(self, box: Box) -> torch.Tensor:
        """A box within it, in the tensor's coordinates: 1-D in row-major order.

        Raises:
            FormatError: the archive is damaged, or of another tensor than the table says.
        """
        if self._found is None:
            self._found = self._located()
        return self._found.read(box.within(self.box))

    def _located(self) -> Located:
        found = self._table.load(self.place, self.name)
        if not isinstance(found, Located):
            kind = found.kind if isinstance(found, Record) else type(found).__name__
            raise FormatError(f"{self.place.path}: {self.name} is a {kind} there, not a plain tensor")
        if (found.dtype, found.shape) != (self.dtype, self.box.shape):
            raise FormatError(
                f"{self.place.path}: {self.name} at byte {self.place.begin_byte:,} is {found.dtype} {list(found.shape)}; "
                f"{METADATA} says {self.dtype} {list(self.box.shape)}"
            )
        return found


@dataclass(frozen=True)
class Stored:
    """A tensor. Attributes: name (as the table has it); dtype; shape; chunks, which cover it exactly once."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Sequence[Chunk]

    @property
    def numel(self) -> int:
        return Box.whole(self.shape).numel

    def is_same_as(self, other: Stored) -> bool:
        """Whether both are the same bytes, under two names."""
        boxes, others = ({chunk.box: chunk.place for chunk in each.chunks} for each in (self, other))
        return (self.dtype, self.shape, boxes) == (other.dtype, other.shape, others)

    def read(self) -> torch.Tensor:
        """All of it, in its shape."""
        regions = Regions(self.dtype, [(chunk.box, chunk.read) for chunk in self.chunks])
        return regions.read(Box.whole(self.shape)).view(self.shape)


class Table:
    """What a folder holds.

    Attributes:
        tensors: by name.
        objects: where what is no tensor lies, by name.
        paths: of names, the keys of the nested dictionaries that they were flattened from, as far as it is told.
        version: of the format, as the file says.
    """

    def __init__(self, folder: Path, files: Files, also: Sequence[str] = ()) -> None:
        """Read it, but no data.

        Raises:
            FormatError: it is damaged, or holds what is not supported.
            UnsafePickleError: the pickle names what may not be read.
            OSError: it cannot be read.
        """
        self.folder, self._files, self._also = folder, files, also
        self.where = folder / METADATA
        self._sizes: dict[str, int] = {}
        if not self.where.is_file():
            raise FormatError(f"{folder}: has no {METADATA} of all ranks together (was it saved without collectives?)")
        size = files.size_bytes(self.where)
        if size > MAX_METADATA_BYTES:
            raise FormatError(f"{self.where}: has {size:,} bytes; {MAX_METADATA_BYTES:,} are read")
        root = load_plain(files.read(self.where, 0, size), self.where, files, also=also)
        state = self._state(root, "Metadata")
        self.version = str(state.get("version") or "")
        places = self._places(state.get("storage_data"))
        self.tensors: dict[str, Stored] = {}
        self.objects: dict[str, Place] = {}
        for name, entry in self._dict(state.get("state_dict_metadata"), "state_dict_metadata").items():
            kind = entry.kind.removeprefix(_PARTS_OF_A_METADATA) if isinstance(entry, Record) else ""
            if not isinstance(name, str):
                raise FormatError(f"{self.where}: {name!r} is no name")
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

    def load(self, place: Place, name: str) -> Any:
        """What an archive holds, its tensors ``Located``. Raises FormatError."""
        if place.size_bytes < 2 or self._files.read(place.path, place.begin_byte, 2) != b"PK":
            raise FormatError(
                f"{place.path}: {name} at byte {place.begin_byte:,} is no archive of torch.save; what DCP has written in "
                "another serialization (safetensors) is not supported"
            )
        return load_archive(place.path, place.begin_byte, place.size_bytes, self._files, also=self._also)

    # ---------------------------------------------------------------- the pickle

    def _state(self, value: Any, kind: str) -> Mapping[str, Any]:
        if not isinstance(value, Record) or value.kind.rpartition(".")[2] != kind:
            raise FormatError(f"{self.where}: holds {value!r:.80} where a {kind} is expected")
        return value.state

    def _dict(self, value: Any, what: str) -> Mapping[Any, Any]:
        if not isinstance(value, dict):
            raise FormatError(f"{self.where}: {what} is {type(value).__name__}, not a dictionary")
        return value

    def _numbers(self, value: Any, what: str) -> tuple[int, ...]:
        if not isinstance(value, (tuple, list)) or len(value) > MAX_NDIM:
            raise FormatError(f"{self.where}: {what} is {value!r:.80}")
        if any(type(number) is not int or not 0 <= number < 1 << 62 for number in value):
            raise FormatError(f"{self.where}: {what} is {value!r:.80}")
        return tuple(value)

    def _places(self, value: Any) -> dict[tuple[str, tuple[int, ...] | None], Mapping[str, Any]]:
        """What is said of where things are, by name and first index."""
        found = {}
        for index, info in self._dict(value, "storage_data").items():
            key = self._state(index, "MetadataIndex")
            offset = key.get("offset")
            found[str(key.get("fqn")), None if offset is None else self._numbers(offset, "an offset")] = self._state(
                info, "_StorageInfo"
            )
        return found

    def _place(self, places: Mapping[Any, Mapping[str, Any]], name: str, offset: tuple[int, ...] | None) -> Place:
        state = places.get((name, offset))
        at = "" if offset is None else f" at {list(offset)}"
        if state is None:
            raise FormatError(f"{self.where}: does not say where {name}{at} is")
        relative, begin, size = state.get("relative_path"), state.get("offset"), state.get("length")
        if state.get("transform_descriptors"):
            raise FormatError(
                f"{self.where}: {name}{at} was transformed when it was written ({state['transform_descriptors']}; compressed, "
                "say), which is not supported: save it again without extensions of the writer"
            )
        if not isinstance(relative, str) or type(begin) is not int or type(size) is not int or begin < 0 or size < 0:
            raise FormatError(f"{self.where}: {name}{at} is said to be at {state!r:.120}")
        path = self.folder / relative
        if relative not in self._sizes:
            self._sizes[relative] = named_file(self.folder, relative, str(self.where)).stat().st_size
        if begin + size > self._sizes[relative]:
            raise FormatError(
                f"{path}: has {self._sizes[relative]:,} bytes; {name}{at} should be in bytes {begin:,} to {begin + size:,}"
            )
        return Place(path, relative, begin, size)

    def _tensor(self, name: str, state: Mapping[str, Any], places: Mapping[Any, Mapping[str, Any]]) -> Stored:
        dtype = self._dtype(name, state.get("properties"))
        shape = self._numbers(state.get("size"), f"the shape of {name}")
        told = state.get("chunks")
        if not isinstance(told, list):
            raise FormatError(f"{self.where}: {name} has no list of chunks")
        chunks = []
        for each in told:
            chunk = self._state(each, "ChunkStorageMetadata")
            start = self._numbers(chunk.get("offsets"), f"the offset of a chunk of {name}")
            extent = self._numbers(chunk.get("sizes"), f"the shape of a chunk of {name}")
            outside = len(start) != len(shape) or len(extent) != len(shape) or any(
                a + n > m for a, n, m in zip(start, extent, shape, strict=True)
            )  # fmt: skip
            if outside:
                raise FormatError(f"{self.where}: {name} of shape {list(shape)} has a chunk of {list(extent)} at {list(start)}")
            if 0 not in extent:
                chunks.append(Chunk(self, name, dtype, Box(start, extent), self._place(places, name, start)))
        self._check_cover(name, shape, [chunk.box for chunk in chunks])
        return Stored(name, dtype, shape, chunks)

    def _dtype(self, name: str, properties: Any) -> str:
        """Of ``TensorProperties``, here and of a ``ShardedTensor``: a tuple with the dtype first."""
        state = self._state(properties, "TensorProperties")
        dtype = state.get("dtype", next(iter(state.get("") or ()), None))
        if not isinstance(dtype, torch.dtype):
            raise FormatError(f"{self.where}: {name} has no dtype ({state!r:.80})")
        return name_of(dtype)

    def _check_cover(self, name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
        if len(boxes) > 1:
            starts, extents = (np.array([getattr(box, what) for box in boxes], np.int64).reshape(len(boxes), len(shape))
                               for what in ("start", "shape"))  # fmt: skip
            pair = find_overlap(starts, extents)
            if pair is not None:
                raise FormatError(f"{self.where}: chunks {boxes[pair[0]]} and {boxes[pair[1]]} of {name} overlap")
        there, wanted = sum(box.numel for box in boxes), Box.whole(shape).numel
        if there != wanted:
            raise FormatError(f"{self.where}: the chunks of {name} hold {there:,} elements of {wanted:,}; it is not whole")


def portions_of(tensors: Iterable[tuple[TensorInfo, Stored, Stored | None]]) -> tuple[list[Portion], list[TensorInfo]]:
    """One portion for every file.

    Args:
        tensors: what each becomes, what it is, and what it is the cast of (if it is derived).

    Returns:
        The portions, and the tensors that have no elements.
    """
    parts: dict[str, list[Part]] = defaultdict(list)
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
            parts[chunk.place.relative].append(Part(info, chunk.box, chunk.read, unless))
    portions = [Portion(name.replace("/", "-"), parts[name], sorted(inputs[name])) for name in sorted(parts)]
    return portions, empty


class _Origins:
    """The tensor that another one is the cast of, by box."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self._exact = {chunk.box: chunk for chunk in stored.chunks}
        self._start = np.array([chunk.box.start for chunk in stored.chunks], np.int64).reshape(len(stored.chunks), -1)
        self._stop = np.array([chunk.box.stop for chunk in stored.chunks], np.int64).reshape(len(stored.chunks), -1)

    def within(self, box: Box) -> tuple[Reading, set[Path]]:
        """How boxes within a box are read, and of what files."""
        same = self._exact.get(box)
        if same is not None:
            return same.read, {same.place.path}
        meets = ((self._start < np.array(box.stop)) & (self._stop > np.array(box.start))).all(axis=1)
        chunks = [self._stored.chunks[at] for at in np.flatnonzero(meets).tolist()]
        regions = Regions(self._stored.dtype, [(chunk.box, chunk.read) for chunk in chunks])
        return regions.read, {chunk.place.path for chunk in chunks}
