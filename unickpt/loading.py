"""Loading: open a checkpoint without believing it, then read exactly the wanted boxes.

Checks come in the order of their cost: manifest and index with their checksums, every file's
presence and size, the headers of the files that are read, and the checksum of every fragment that
is used. The first thing that is wrong ends the load with a message that names it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from unickpt import handover, index_file
from unickpt import index as index_module
from unickpt import manifest as manifest_module
from unickpt import objects as objects_module
from unickpt.checksums import digest
from unickpt.dtypes import torch_dtype
from unickpt.errors import CorruptCheckpointError, CoverageError, FormatError, NotACheckpointError, UnsafePathError
from unickpt.fragments import Box, Ints
from unickpt.index import Index, TensorInfo, blocks
from unickpt.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, FileRecord, Manifest
from unickpt.neighbours import Neighbours
from unickpt.planning import ReadPlan, Target, plan_reads
from unickpt.reading import ReadStats, Request, execute, files_of
from unickpt.safetensors_io import parse_header
from unickpt.storage import Storage, open_storage

SHARED_PREFIX = "objects/shared/"  # objects that any rank may ask for by name
SHARED_TENSORS_PREFIX = "objects/shared-tensors/"
MAX_INDEX_BYTES = 1 << 32  # some 50 million fragments
_LARGE_INDEX_BYTES = 64 << 20


def is_checkpoint(directory: str | os.PathLike[str]) -> bool:
    """Whether the directory (or URL) holds a (possibly damaged) unickpt checkpoint.

    Raises:
        StorageError: the storage does not say.
    """
    try:
        return open_storage(directory).size_bytes(MANIFEST_FILE) is not None
    except UnsafePathError:
        return True


@dataclass(frozen=True, slots=True)
class Planned:
    """Requests, the fragments that serve them, and the bytes of those fragments."""

    requests: Sequence[Request]
    plan: ReadPlan
    size_bytes: int

    @property
    def rows(self) -> Ints:
        """Of the index, sorted."""
        return self.plan.rows()


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: sound manifest and index, all files present with the right size."""

    storage: Storage
    manifest: Manifest
    index: Index
    ids: Mapping[tuple[str, str], int] = field(repr=False)

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Checkpoint:
        """Open and validate.

        Args:
            directory: the checkpoint, ``<save_dir>/<tag>``; a path or a URL.

        Raises:
            NotACheckpointError: no manifest.
            NewerFormatError, UnsafePathError, FormatError: what the manifest or index says is wrong.
            CorruptCheckpointError: a file is missing, of another size, or not what was written.
        """
        storage = open_storage(directory)
        manifest = read_manifest(storage)
        _check_files(storage, manifest)
        index = read_index(storage, manifest)
        return cls(storage, manifest, index, index.ids())

    @property
    def identity(self) -> str:
        """The same for two openings of the same save, and for no others: the checksum of its index."""
        return self.manifest.file(self.manifest.index).checksum

    @property
    def untranslated(self) -> Sequence[str]:
        """Names of stored tensors that have no counterpart under the names that this one is read by."""
        return ()

    def override_boxes(self, position: int) -> list[Box]:
        """Regions of a derived tensor in which the saving job held something else than the cast."""
        return [self.index.box(row) for row in self.index.rows_of(position)]

    def info(self, name: str, state: str) -> TensorInfo | None:
        """The tensor of that name and state, if it is stored or derived."""
        at = self.ids.get((name, state))
        return None if at is None else self.index.tensors[at]

    def read(self, requests: Sequence[Request], *, verify: str = "always") -> ReadStats:
        """Fill every request's ``out``.

        Args:
            requests: regions of stored tensors; for derived tensors only the overriding fragments
                are copied and the rest of ``out`` is left as it is.
            verify: ``always``, ``sampled`` or ``off``, see ``reading.execute``.

        Raises:
            CorruptCheckpointError: a checksum does not match; names file, tensor and box.
            StorageError: a file cannot be read.
        """
        return self.fill(self.plan(requests), verify=verify)

    def plan(self, requests: Sequence[Request]) -> Planned:
        """Which fragments the requests need; the headers of their files are checked.

        Raises:
            CoverageError: a request is not covered by fragments.
            CorruptCheckpointError, StorageError: a header is damaged or cannot be read.
        """
        partial = frozenset(r.tensor_id for r in requests if self.index.tensors[r.tensor_id].derived_from is not None)
        plan = plan_reads(self.index, [Target(r.tensor_id, r.box) for r in requests], allow_partial=partial)
        for name in files_of(self.index, plan):
            check_header(self.storage, self.manifest.file(name))
        return Planned(requests, plan, int(self.index.size_bytes()[plan.rows()].sum()))

    def fill(self, planned: Planned, *, verify: str = "always", neighbours: Neighbours | None = None) -> ReadStats:
        """Fill every request's ``out``, as ``read`` does.

        Args:
            planned: what ``plan`` returned.
            neighbours: ranks of this host that fill theirs at the same time: what several of them want is read once.

        Raises:
            NeighbourFailedError: a neighbour failed; its own error is the one to show.
        """
        begin = time.monotonic()
        plan, stats = planned.plan, ReadStats()
        if neighbours is not None:
            stats, plan = handover.execute(self.storage, self.index, plan, planned.requests, neighbours, verify=verify)
        rest = execute(self.storage, self.index, plan, planned.requests, verify=verify)
        stats.bytes_read += rest.bytes_read
        stats.bytes_needed += rest.bytes_needed
        stats.seconds = time.monotonic() - begin
        return stats

    def read_tensor(self, name: str, state: str, *, verify: str = "always") -> torch.Tensor:
        """One whole tensor in its own dtype, on the CPU; a derived one is cast from what it derives from.

        Raises:
            KeyError: there is no such tensor.
        """
        info = self.index.tensors[self.ids[name, state]]
        return self.read_box(info, Box.whole(info.shape), verify=verify).reshape(info.shape)

    def read_box(self, info: TensorInfo, box: Box, *, verify: str = "always") -> torch.Tensor:
        """The elements of a region in row-major order, on the CPU, in the tensor's own dtype; of a derived tensor cast.

        Args:
            info: of this checkpoint's index.
            box: of it.
            verify: what is read against its checksum; ``always`` reads every fragment that has a part in it as a whole.
        """
        if info.derived_from is not None:
            parent = self.index.tensors[self.ids[info.name, info.derived_from]]
            out = self.read_box(parent, box, verify=verify).to(torch_dtype(info.dtype))
        else:
            out = torch.empty(box.numel, dtype=torch_dtype(info.dtype))
        if box.numel:
            self.read([Request(self.ids[info.key], box, out)], verify=verify)
        return out

    def objects(self, *, allow_pickle: bool = False) -> objects_module.Decoded:
        """The job's non-tensor state."""
        where = self.storage.where(MANIFEST_FILE)
        tensors = _Tensors(self, "objects/job")
        return objects_module.decode(self.manifest.objects, tensors=tensors, allow_pickle=allow_pickle, where=where)

    def rank_objects(self, rank: int, *, allow_pickle: bool = False) -> objects_module.Decoded:
        """Non-tensor state of one rank of the writing job; an empty dict if that rank stored none."""
        prefix = f"objects/rank{rank:05d}"
        if (prefix, "object") not in self.ids:
            return objects_module.Decoded({})
        return self._object_tensor(prefix, prefix, allow_pickle)

    def shared_names(self) -> list[str]:
        """Names of the objects that ``shared_object`` gives, sorted."""
        return sorted(key.removeprefix(SHARED_PREFIX) for key, _ in self.ids if key.startswith(SHARED_PREFIX))

    def shared_object(self, name: str, *, allow_pickle: bool = False) -> objects_module.Decoded:
        """Non-tensor state that one rank stored under a name for all.

        Raises:
            KeyError: there is none of that name.
        """
        if (f"{SHARED_PREFIX}{name}", "object") not in self.ids:
            raise KeyError(name)
        return self._object_tensor(f"{SHARED_PREFIX}{name}", f"{SHARED_TENSORS_PREFIX}{name}", allow_pickle)

    def _object_tensor(self, key: str, prefix: str, allow_pickle: bool) -> objects_module.Decoded:
        """An object outside the manifest: a tensor that holds its JSON, and the tensors ``prefix/N`` pulled out of it."""
        where = f"{self.storage}: {key}"
        text = bytes(self.read_tensor(key, "object").numpy())
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as err:
            raise FormatError(f"{where}: not JSON ({err})") from None
        return objects_module.decode(value, tensors=_Tensors(self, prefix), allow_pickle=allow_pickle, where=where)


class _Tensors(Mapping[str, torch.Tensor]):
    """The tensors that were pulled out of one object, read when they are asked for."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self._checkpoint, self._prefix = checkpoint, prefix

    def __getitem__(self, key: str) -> torch.Tensor:
        if not key.startswith(f"{self._prefix}/"):
            raise KeyError(key)
        return self._checkpoint.read_tensor(key, "object")

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.startswith(f"{self._prefix}/") and (key, "object") in self._checkpoint.ids

    def __iter__(self) -> Iterator[str]:
        return (name for name, state in self._checkpoint.ids if name.startswith(f"{self._prefix}/") and state == "object")

    def __len__(self) -> int:
        return sum(1 for _ in self)


def read_manifest(storage: Storage) -> Manifest:
    path = storage.where(MANIFEST_FILE)
    size = storage.size_bytes(MANIFEST_FILE)
    if size is None:
        raise NotACheckpointError(
            f"{storage}: no {MANIFEST_FILE}, so there is no checkpoint here: the save did not finish, "
            "or the directory is not a unickpt checkpoint"
        )
    if size > MAX_MANIFEST_BYTES:
        raise FormatError(f"{path}: {size:,} bytes are too many for a manifest; {MAX_MANIFEST_BYTES:,} are read")
    return manifest_module.from_bytes(storage.read(MANIFEST_FILE, 0, size), where=path)


def _check_files(storage: Storage, manifest: Manifest) -> None:
    problems = []
    sizes = storage.sizes_bytes([record.path for record in manifest.files])
    for record, size in zip(manifest.files, sizes, strict=True):
        if size is None:
            problems.append(f"{record.path} is missing")
        elif size != record.size_bytes:
            problems.append(f"{record.path} has {size:,} bytes, expected {record.size_bytes:,}")
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise CorruptCheckpointError(f"{storage}: {shown}. Resume from an older checkpoint.")


def read_index(storage: Storage, manifest: Manifest) -> Index:
    record = manifest.file(manifest.index)
    path = storage.where(record.path)
    if record.size_bytes > MAX_INDEX_BYTES:
        raise FormatError(f"{path}: {record.size_bytes:,} bytes are too many for an index")
    if record.size_bytes > _LARGE_INDEX_BYTES:
        # A sparse file costs its sender nothing: the header has to account for all bytes before they are read.
        check_header(storage, record)
        parse_header(storage.read(record.path, 0, record.header_bytes), file_bytes=record.size_bytes, where=path)
    try:
        data = storage.read(record.path, 0, record.size_bytes)
        if digest(data) != record.checksum:
            raise CorruptCheckpointError(f"{path}: checksum differs from the manifest's; the index is damaged").about(
                file=record.path
            )
        index = index_file.from_bytes(data, where=path)
    except MemoryError:
        raise FormatError(f"{path}: an index of {record.size_bytes:,} bytes needs more memory than there is") from None
    try:
        index_module.check_complete(index)
    except CoverageError as err:
        raise FormatError(f"{path}: {err}") from None
    check_places(index, {r.path: r for r in manifest.files if r.path != manifest.index}, path)
    return index


def check_places(index: Index, known: Mapping[str, FileRecord], where: str) -> None:
    """Fragments lie in the data of files that the manifest lists, and no byte serves two of them.

    The last is what bounds memory: a few bytes cannot pose as the content of a huge tensor.
    """
    if len(set(index.files)) != len(index.files):
        raise FormatError(f"{where}: lists a data file twice")
    unknown = [name for name in index.files if name not in known]
    if unknown:
        raise FormatError(f"{where}: names data file {unknown[0]!r}, which is not one of the manifest's")
    if sum(known[name].size_bytes for name in index.files) >= 2**62:
        raise FormatError(f"{where}: the data files are larger together than any storage")
    header = np.array([known[name].header_bytes for name in index.files] or [0], np.int64)
    limit = np.array([known[name].size_bytes for name in index.files] or [0], np.int64)
    sizes = index.size_bytes()
    first = np.cumsum(limit) - limit  # all files end to end
    begin, end, wrong = np.empty(len(index), np.int64), np.empty(len(index), np.int64), np.zeros(len(index), bool)
    for part in blocks(len(index)):
        file, offset, size = index.file[part], index.offset_bytes[part], sizes[part]
        wrong[part] = (offset < header[file]) | (size > limit[file] - offset)
        begin[part] = first[file] + offset
        end[part] = begin[part] + size
    if not wrong.any():
        # no two fragments share a byte if and only if, with the beginnings and the ends sorted each on their own, each
        # ends before the next begins
        begin.sort()
        end.sort()
        if np.all(begin[1:] >= end[:-1]):
            return
        order = np.lexsort((index.offset_bytes, index.file))
        file, begin = index.file[order], index.offset_bytes[order]
        wrong[order[1:]] = (file[1:] == file[:-1]) & (begin[1:] < (begin + sizes[order])[:-1])
    row = int(np.argmax(wrong))
    begin_byte = int(index.offset_bytes[row])
    raise FormatError(
        f"{where}: a fragment at bytes {begin_byte:,} to {begin_byte + int(sizes[row]):,} of "
        f"{index.files[int(index.file[row])]} overlaps another one or leaves the data of the file"
    )


def check_header(storage: Storage, record: FileRecord) -> None:
    """Compare a data file's header with what was written. Raises CorruptCheckpointError."""
    if digest(storage.read(record.path, 0, record.header_bytes)) != record.header_checksum:
        raise CorruptCheckpointError(
            f"{storage.where(record.path)}: the safetensors header differs from the one that was written; the file is damaged"
        ).about(file=record.path)
