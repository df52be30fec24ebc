"""Open a checkpoint and read the requested boxes.

Checks run in order of cost: manifest and index with their checksums, presence and size of every file, headers of the
files that are read, checksum of every fragment that is used. The first failed check ends the load with an error that
names the file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

import torch

from unickpt.base.arrays import Ints
from unickpt.base.errors import FormatError
from unickpt.checkpoint.checkpoint_folder import read_manifest
from unickpt.checkpoint.coordination.host_peers import HostPeers
from unickpt.checkpoint.format import objects as objects_module
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.dtypes import torch_dtype
from unickpt.checkpoint.format.index import Index, TensorInfo
from unickpt.checkpoint.format.layout import SHARED_PREFIX, SHARED_TENSORS_PREFIX
from unickpt.checkpoint.format.manifest import MANIFEST_FILE, Manifest
from unickpt.checkpoint.load import shared_read
from unickpt.checkpoint.load.fragments import Request, files_of
from unickpt.checkpoint.load.needed_blocks import BlockTables
from unickpt.checkpoint.load.read_plan import ReadPlan, Target, plan_reads
from unickpt.checkpoint.load.reader import ReadStats, are_cached, execute
from unickpt.checkpoint.load.validation import check_header, checked_index
from unickpt.checkpoint.storage.base import Storage
from unickpt.checkpoint.storage.open import open_storage

TWINS = {"weight": "master", "master": "weight"}  # one value in two precisions: each serves for the other
_LARGE_BYTES = 1 << 20  # plans from this size on ask whether the page cache holds their data
_SMALL_BYTES = 64 << 10  # tensors of an object up to this size are read together


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned read.

    Attributes:
        requests: regions to fill.
        plan: fragments that serve the requests.
        shareable: rows of the fragments that are needed for the most part, int64, sorted.
        size_bytes: total size of these fragments.
        cached: the page cache holds most of them. Unknown, so False, for a small plan.
    """

    requests: Sequence[Request]
    plan: ReadPlan
    shareable: Ints
    size_bytes: int
    cached: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. Its manifest and index are valid, and all its files exist with the expected sizes.

    Attributes:
        storage: place of the checkpoint.
        manifest: commit record: step, writer, files, optimizer groups, objects.
        index: table of all tensors and fragments.
        ids: position of each tensor in ``index.tensors``, by (name, state).
    """

    storage: Storage
    manifest: Manifest
    index: Index
    ids: Mapping[tuple[str, str], int] = field(repr=False)
    _checked: set[str] = field(default_factory=set, repr=False, compare=False)  # files whose headers have been checked
    _fetched: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)  # of objects, by name

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Checkpoint:
        """Open a checkpoint and check everything except the data. No data file is read.

        Args:
            directory: checkpoint directory, ``<save_dir>/<tag>``. A path or a URL.

        Raises:
            NotACheckpointError: the directory has no manifest.
            NewerFormatError: a later release wrote the checkpoint.
            UnsafePathError: the manifest names a file outside the directory.
            FormatError: the manifest or the index is malformed.
            CorruptCheckpointError: a file is missing or has the wrong size, or the index fails its checksum.
            StorageError: the storage cannot be read.
        """
        storage = open_storage(directory)
        return cls.of(storage, read_manifest(storage))

    @classmethod
    def of(cls, storage: Storage, manifest: Manifest) -> Checkpoint:
        """Open a checkpoint whose manifest has been read.

        Raises:
            FormatError, CorruptCheckpointError, StorageError: as for ``open``.
        """
        index = checked_index(storage, manifest)
        return cls(storage, manifest, index, index.ids())

    @cached_property
    def tables(self) -> BlockTables:
        """Checksums of the blocks of its fragments."""
        return BlockTables.of(self.manifest)

    @property
    def identity(self) -> str:
        """Checksum of the index. Two opened checkpoints with the same identity come from the same save."""
        return self.manifest.file(self.manifest.index).checksum

    @property
    def untranslated(self) -> Sequence[str]:
        """Names of stored tensors without a counterpart in the dialect that the checkpoint is read in."""
        return ()

    @property
    def unread(self) -> Sequence[str]:
        """Names of stored tensors that no model of the stored dialect reads. They have no counterpart either."""
        return ()

    def override_boxes(self, position: int) -> list[Box]:
        """Boxes of a derived tensor that are stored because the saving job held values other than the cast there."""
        return [self.index.box(row) for row in self.index.rows_of(position)]

    def info(self, name: str, state: str) -> TensorInfo | None:
        """Return the stored or derived tensor of this name and state, or None."""
        at = self.ids.get((name, state))
        return None if at is None else self.index.tensors[at]

    def serving(self, name: str, state: str) -> TensorInfo | None:
        """Return the tensor that serves for one of this name and state: it, or a weight for a master and back."""
        found = self.info(name, state)
        return self.info(name, TWINS[state]) if found is None and state in TWINS else found

    def read(self, requests: Sequence[Request], *, verify: str = "always") -> ReadStats:
        """Fill the output tensor of every request.

        Args:
            requests: regions of stored tensors. For a derived tensor only the stored fragments, which override the
                cast, are copied; the rest of ``out`` is unchanged.
            verify: which checksums are checked: ``always``, ``sampled`` or ``off`` (see ``reader.execute``).

        Returns:
            Bytes read and needed, and the wall time in seconds.

        Raises:
            CoverageError: no fragments cover a request.
            CorruptCheckpointError: a checksum does not match. The message names file, tensor and box.
            StorageError: a file cannot be read.
        """
        return self.fill(self.plan(requests), verify=verify)

    def plan(self, requests: Sequence[Request]) -> Planned:
        """Find the fragments that the requests need, and check the headers of their files.

        Raises:
            CoverageError: no fragments cover a request.
            CorruptCheckpointError: a header is damaged.
            StorageError: a header cannot be read.
        """
        partial = frozenset(r.tensor_id for r in requests if self.index.tensors[r.tensor_id].derived_from is not None)
        plan = plan_reads(self.index, [Target(r.tensor_id, r.box) for r in requests], allow_partial=partial)
        for name in files_of(self.index, plan):
            if name not in self._checked:
                check_header(self.storage, self.manifest.file(name))
                self._checked.add(name)
        shareable = plan.mostly_needed(self.index)
        size = int(self.index.size_bytes()[shareable].sum())
        return Planned(requests, plan, shareable, size, size >= _LARGE_BYTES and are_cached(self.storage, self.index, plan))

    def fill(self, planned: Planned, *, verify: str = "always", host_peers: HostPeers | None = None) -> ReadStats:
        """Fill the output tensors of planned requests.

        Args:
            planned: return value of ``plan``.
            verify: as for ``read``.
            host_peers: ranks of the same host that load at the same time. A fragment that several of them need, most of it, is
                read once, unless all of them find their data in the page cache.

        Raises:
            CorruptCheckpointError, StorageError: as for ``read``.
            HostPeerFailedError: another rank of the host failed. Its own error names the cause.
        """
        begin = time.monotonic()
        plan, stats = planned.plan, ReadStats()
        if host_peers is not None and shared_read.is_faster(self.index, host_peers):
            stats, plan = shared_read.execute(self.storage, self.index, plan, planned.requests, host_peers, verify=verify)
        ranks = 1 if host_peers is None else len(host_peers.ranks)
        rest = execute(self.storage, self.index, plan, planned.requests, tables=self.tables, verify=verify, ranks=ranks)
        stats.bytes_read += rest.bytes_read
        stats.bytes_needed += rest.bytes_needed
        stats.seconds = time.monotonic() - begin
        for request in planned.requests:  # torch does not see what the extension writes
            if not request.out.is_inference():
                torch.autograd.graph.increment_version(request.out)
        return stats

    def fill_from_page_cache(self, requests: Sequence[Request], *, ranks: int) -> bool:
        """Fill the output tensors of requests if the page cache holds most of what they need. Return whether it does.

        All checksums are checked. ``ranks``: those of this host that read at the same time. The headers have been checked.

        Raises:
            CoverageError, CorruptCheckpointError, StorageError: as for ``read``.
        """
        plan = plan_reads(self.index, [Target(r.tensor_id, r.box) for r in requests])
        if not are_cached(self.storage, self.index, plan):
            return False
        execute(self.storage, self.index, plan, requests, tables=self.tables, ranks=ranks)
        return True

    def read_tensor(self, name: str, state: str, *, verify: str = "always") -> torch.Tensor:
        """Read a whole tensor.

        Args:
            name: parameter or buffer name.
            state: ``weight``, ``master``, or an optimizer key such as ``exp_avg``.
            verify: as for ``read``.

        Returns:
            The tensor in its stored shape and dtype, on the CPU. A derived tensor is cast from the tensor that it derives from.

        Raises:
            KeyError: the checkpoint has no such tensor.
            CorruptCheckpointError, StorageError: as for ``read``.
        """
        info = self.index.tensors[self.ids[name, state]]
        return self.read_box(info, Box.whole(info.shape), verify=verify).reshape(info.shape)

    def read_box(self, info: TensorInfo, box: Box, *, verify: str = "always") -> torch.Tensor:
        """Read a region of a tensor.

        Args:
            info: tensor of this checkpoint's index.
            box: region of the tensor.
            verify: as for ``read``.

        Returns:
            1-D tensor ``[box.numel]`` in row-major order, in the tensor's dtype, on the CPU. A derived tensor is cast.

        Raises:
            CorruptCheckpointError, StorageError: as for ``read``.
        """
        if info.derived_from is not None:
            parent = self.index.tensors[self.ids[info.name, info.derived_from]]
            out = self.read_box(parent, box, verify=verify).to(torch_dtype(info.dtype))
        else:
            out = torch.empty(box.numel, dtype=torch_dtype(info.dtype), device="cpu")
        if box.numel:
            self.read([Request(self.ids[info.key], box, out)], verify=verify)
        return out

    def objects(self, *, allow_pickle: bool = False) -> objects_module.Decoded:
        """Decode the job's non-tensor state.

        Args:
            allow_pickle: unpickle values that are stored as opaque blobs. This can run code: only for checkpoints that you
                trust. Otherwise such values are left out.
        """
        where = self.storage.where(MANIFEST_FILE)
        tensors = _ObjectTensors(self, objects_module.JOB_PREFIX)
        return objects_module.decode(self.manifest.objects, tensors=tensors, allow_pickle=allow_pickle, where=where)

    def rank_objects(self, rank: int, *, allow_pickle: bool = False) -> objects_module.Decoded:
        """Decode the non-tensor state of one rank of the saving job. Empty dict if the rank stored none."""
        prefix = objects_module.rank_prefix(rank)
        if (prefix, "object") not in self.ids:
            return objects_module.Decoded({})
        return self._object_tensor(prefix, prefix, allow_pickle)

    def shared_names(self) -> list[str]:
        """Names that ``shared_object`` accepts, sorted."""
        return list(self._shared_names)

    @cached_property
    def _shared_names(self) -> list[str]:
        return sorted(key.removeprefix(SHARED_PREFIX) for key, _ in self.ids if key.startswith(SHARED_PREFIX))

    def shared_object(self, name: str, *, allow_pickle: bool = False) -> objects_module.Decoded:
        """Decode non-tensor state that one rank stored under a name for all ranks.

        Raises:
            KeyError: no object has this name.
        """
        if (f"{SHARED_PREFIX}{name}", "object") not in self.ids:
            raise KeyError(name)
        return self._object_tensor(f"{SHARED_PREFIX}{name}", f"{SHARED_TENSORS_PREFIX}{name}", allow_pickle)

    def fetch_shared(self, names: Iterable[str]) -> None:
        """Read the objects of these names at once if they are small: ``shared_object`` takes them from memory.

        Raises:
            CorruptCheckpointError, StorageError: as for ``read``.
        """
        wanted = [name for name in names if (f"{SHARED_PREFIX}{name}", "object") in self.ids]
        keys = [f"{SHARED_PREFIX}{name}" for name in wanted]
        keys += [key for name in wanted for key in _tensors_below(f"{SHARED_TENSORS_PREFIX}{name}", self.ids)]
        self._fetch(keys)

    def _fetch(self, keys: Iterable[str]) -> None:
        """Read small tensors of objects at once, and keep them."""
        requests = []
        for key in keys:
            position = self.ids[key, "object"]
            info = self.index.tensors[position]
            box = Box.whole(info.shape)
            if key not in self._fetched and 0 < box.numel * torch_dtype(info.dtype).itemsize <= _SMALL_BYTES:
                requests.append(Request(position, box, torch.empty(info.shape, dtype=torch_dtype(info.dtype), device="cpu")))
        if requests:
            self.read(requests)
            self._fetched.update({self.index.tensors[request.tensor_id].name: request.out for request in requests})

    def object_tensor(self, key: str) -> torch.Tensor:
        """Read a tensor of an object, or return a copy of it if it has been read.

        Raises:
            CorruptCheckpointError, StorageError: as for ``read``.
        """
        found = self._fetched.get(key)
        return self.read_tensor(key, "object") if found is None else found.clone()

    def _object_tensor(self, key: str, prefix: str, allow_pickle: bool) -> objects_module.Decoded:
        """Decode an object outside the manifest: tensor ``key`` holds its JSON, tensors ``prefix/N`` its arrays."""
        where = f"{self.storage}: {key}"
        text = bytes(self.object_tensor(key).numpy())
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as err:
            raise FormatError(f"{where}: not JSON ({err})") from None
        return objects_module.decode(value, tensors=_ObjectTensors(self, prefix), allow_pickle=allow_pickle, where=where)


def _tensors_below(prefix: str, ids: Mapping[tuple[str, str], int]) -> Iterator[str]:
    """Yield the names of the tensors of one object."""
    for key in map(f"{prefix}/{{}}".format, count()):
        if (key, "object") not in ids:
            return
        yield key


class _ObjectTensors(Mapping[str, torch.Tensor]):
    """Tensors that were pulled out of one object. The first access reads all small ones at once."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self._checkpoint, self._prefix, self._is_fetched = checkpoint, prefix, False

    def __getitem__(self, key: str) -> torch.Tensor:
        if key not in self:
            raise KeyError(key)
        if not self._is_fetched:
            self._checkpoint._fetch(_tensors_below(self._prefix, self._checkpoint.ids))
            self._is_fetched = True
        return self._checkpoint.object_tensor(key)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.startswith(f"{self._prefix}/") and (key, "object") in self._checkpoint.ids

    def __iter__(self) -> Iterator[str]:
        return (name for name, state in self._checkpoint.ids if name.startswith(f"{self._prefix}/") and state == "object")

    def __len__(self) -> int:
        return sum(1 for _ in self)
