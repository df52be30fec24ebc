"""Staging memory that becomes the data file of a generation: a mapped file in shared memory.

The copy of the state into this memory is the only copy of a save. The header of the file lies in front of it, and checksums are
computed where the data are. A file is used again two generations later: a copy into its warm pages costs a fraction of one into
fresh pages.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch

from unickpt.base.errors import StorageError
from unickpt.base.private_files import no_room
from unickpt.checkpoint.format.block_table import TABLE_KEY, room_bytes
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.dtype_names import names
from unickpt.checkpoint.format.file_names import DATA_FORMAT
from unickpt.checkpoint.format.layout import fragment_key
from unickpt.checkpoint.format.safetensors_header import MAX_HEADER_BYTES, build_header
from unickpt.checkpoint.format.tensor_info import TensorInfo
from unickpt.checkpoint.memory.host_folder import HostFolder
from unickpt.checkpoint.save.kept import BoundShards, KeptShards
from unickpt.checkpoint.save.shards import Shard
from unickpt.checkpoint.save.staging import Staged, StagingBuffer
from unickpt.checkpoint.storage.base import Sink
from unickpt.checkpoint.storage.direct_io import BLOCK_BYTES, address_of

_STEP_DIGITS = 20
# most bytes of the header, with numbers of 20 digits: of its metadata, of an entry without names, and of a dimension
_METADATA_BYTES = 256
_ENTRY_BYTES = len('":[]":{"dtype":"","shape":[],"data_offsets":[,]},') + max(map(len, names())) + 2 * 20
_DIMENSION_BYTES = len(",:,") + 3 * 20
_SPARE_BYTES = 64 << 10
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class MemoryBudgetError(StorageError):
    """A generation does not fit into the memory that the host may use."""


class MappedFile:
    """A file in shared memory that is mapped as a whole.

    Attributes:
        path: present name of the file.
        tensor: uint8 ``[bytes]``, the mapped pages.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        """Open or create the file and give it pages.

        Raises:
            StorageError: there is not enough shared memory.
        """
        self.path = path
        try:
            self._descriptor = os.open(path, _FLAGS, 0o600)
            try:
                os.ftruncate(self._descriptor, size_bytes)
                os.posix_fallocate(self._descriptor, 0, size_bytes)  # writing to a hole raises SIGBUS if the memory is full
                region = mmap.mmap(self._descriptor, size_bytes)
            except BaseException:
                os.close(self._descriptor)
                path.unlink(missing_ok=True)
                raise
        except OSError as err:
            raise StorageError(no_room(path, size_bytes, err)) from err
        self.tensor = torch.frombuffer(region, dtype=torch.uint8)

    def extend(self) -> None:
        """Give the pages behind the end of a file that ``finish`` has cut."""
        size = os.fstat(self._descriptor).st_size
        if size < len(self.tensor):
            os.ftruncate(self._descriptor, len(self.tensor))
            os.posix_fallocate(self._descriptor, size, len(self.tensor) - size)

    def finish(self, path: Path, size_bytes: int) -> None:
        """Cut the file to its size and give it its name."""
        os.ftruncate(self._descriptor, size_bytes)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        os.rename(self.path, path)
        self.path = path

    def is_at(self, path: Path) -> bool:
        """Return whether a path still names this file."""
        try:
            found, own = os.stat(path), os.fstat(self._descriptor)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)

    def close(self) -> None:
        """Close the file. The mapping lives as long as the tensor."""
        os.close(self._descriptor)


class MappedBuffer(StagingBuffer):
    """Staging buffer whose memory is a file. The header of the data file fits in front of the data."""

    def __init__(self, slots: MappedSlots, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes, memory=torch.empty(0, dtype=torch.uint8, device="cpu"))
        self._slots = slots

    def fill(self, shards: Sequence[Shard], *, lead_bytes: int = 0, late: bool = False) -> Staged | None:
        """As ``StagingBuffer.fill``. There is space for the header of all shards in front, and for their table behind."""
        assert not lead_bytes  # nothing is written ahead: a generation is in memory as a whole
        head = header_space(shards)
        self.tensor = self._slots.map(head + self.capacity_bytes + room_bytes(self.capacity_bytes)).tensor
        return super().fill(shards, lead_bytes=head, late=late)

    def fill_kept(self, bound: BoundShards, shards: Sequence[Shard], *, lead_bytes: int = 0) -> Staged | None:
        assert not lead_bytes
        head = _kept_space(bound.kept) + header_space(shards)
        if head > MAX_HEADER_BYTES:
            return None
        self.tensor = self._slots.map(head + self.capacity_bytes + room_bytes(self.capacity_bytes)).tensor
        return super().fill_kept(bound, shards, lead_bytes=head)

    def _beyond(self, like: torch.Tensor) -> torch.Tensor:
        raise MemoryBudgetError(
            f"{like.nbytes:,} bytes of weights are no casts of their masters any more, and have no room in the file of "
            f"{self.capacity_bytes:,} bytes. The next save gets more"
        )


def header_space(shards: Sequence[Shard]) -> int:
    """Return a size in bytes, of whole blocks, that holds the header of a data file with these shards or fewer.

    Training waits, so it is a bound: encoding the header takes 20 times as long.
    """
    size = _space((shard.tensor, shard.box) for shard in shards)
    return size if size <= MAX_HEADER_BYTES else _exact_space(shards)


@lru_cache(maxsize=4)  # the same at every save
def _kept_space(kept: KeptShards) -> int:
    return _space(kept.boxes())


def _space(boxes: Iterable[tuple[TensorInfo, Box]]) -> int:
    size = _METADATA_BYTES + _ENTRY_BYTES + len(TABLE_KEY)
    for tensor, box in boxes:
        size += _ENTRY_BYTES + _text_bytes(tensor.name) + _text_bytes(tensor.state) + _DIMENSION_BYTES * len(box.shape)
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _text_bytes(text: str) -> int:
    plain = text.isascii() and text.isprintable() and '"' not in text and "\\" not in text
    return len(text) * (1 if plain else 6)  # as JSON


def _exact_space(shards: Sequence[Shard]) -> int:
    metadata = {"format": DATA_FORMAT, "rank": "0" * _STEP_DIGITS, "step": "0" * _STEP_DIGITS}
    slots = [(fragment_key(s.tensor, s.box), s.tensor.dtype, s.box.shape) for s in shards]
    slots.append((TABLE_KEY, "U8", (room_bytes(sum(s.size_bytes for s in shards)),)))
    _, header = build_header(slots, metadata, alignment=BLOCK_BYTES)
    return header.header_bytes


class MappedSlots:
    """The mapped files of one rank: a pool of one buffer (``staging_pool.BufferPool``) and the sink of its data file.

    Args:
        folder: folder of the job on this host.
        rank: this rank.
        budget_bytes: memory for one generation of this rank; None for no limit.
    """

    def __init__(self, folder: HostFolder, rank: int, budget_bytes: int | None) -> None:
        self._folder, self._rank, self.budget_bytes = folder, rank, budget_bytes
        self._files: list[MappedFile] = []  # of kept generations, and at most one that is free
        self._current: MappedFile | None = None

    @property
    def _spare_name(self) -> str:
        return f"rank{self._rank:05d}.safetensors"

    def acquire(self, size_bytes: int, *, notice: Callable[[], None] | None = None, notice_s: float = 20.0) -> MappedBuffer:  # noqa: ARG002
        """Return the buffer of the next generation.

        Raises:
            MemoryBudgetError: the state is larger than the budget.
        """
        if self.budget_bytes is not None and size_bytes > self.budget_bytes:
            raise MemoryBudgetError(
                f"rank {self._rank}: {size_bytes:,} bytes of state do not fit into the {self.budget_bytes:,} bytes of memory "
                "that the option memory.gigabytes leaves for one generation of this rank"
            )
        return MappedBuffer(self, size_bytes)

    def release(self, buffer: StagingBuffer) -> None:
        """Forget the buffer. Its file is part of a generation now, or serves the next save."""

    def set_aside(self, number: int, name: str) -> None:
        """Use the pages of this rank's file in a generation that was given up."""
        path = self._folder.path(number, name)
        spare = self._folder.set_aside(number, name, as_name=self._spare_name)
        for file in self._files:
            if spare is not None and file.is_at(spare):
                file.path = spare
            elif file.path == path:
                file.path = Path()  # gone

    def map(self, size_bytes: int) -> MappedFile:
        """Return the mapped file of the next generation, with at least this size. Warm pages are used again.

        A new file is somewhat larger, until ``finish`` cuts it, so that it serves states whose objects grow.
        """
        spare = self._folder.spare(self._spare_name)
        for file in [file for file in self._files if not file.is_at(file.path)]:
            file.close()
            self._files.remove(file)
        found = next((file for file in self._files if file.path == spare), None)
        if found is None or len(found.tensor) < size_bytes:
            if found is not None:
                found.close()
                self._files.remove(found)
            found = MappedFile(spare, size_bytes + _SPARE_BYTES)
            self._files.append(found)
        else:
            try:
                found.extend()
            except OSError as err:
                raise StorageError(no_room(spare, size_bytes, err)) from err
        self._current = found
        return found

    @contextmanager
    def sink(self, path: Path) -> Iterator[Sink]:
        """Yield the sink of the data file. The file has its name and size when the block ends without error."""
        assert self._current is not None
        sink = InPlaceSink(self._current.tensor)
        yield sink
        self._current.finish(path, sink.size_bytes)


class InPlaceSink:
    """Sink of a data file whose data lie in the memory of the file already. Only the header and the table are copied.

    Attributes:
        size_bytes: bytes written so far.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory, self.size_bytes = memory, 0

    def write(self, parts: Sequence[memoryview]) -> None:
        """Append parts.

        Raises:
            StorageError: there is no room for a part, or it lies at another place of this memory.
        """
        begin = self._memory.data_ptr()
        end = begin + len(self._memory)
        for part in parts:
            place = begin + self.size_bytes
            if place + len(part) > end:
                raise StorageError(f"a file in memory has room for {len(self._memory):,} bytes, but more are written")
            if len(part) and (address := address_of(part)) != place:
                if begin <= address < end:
                    raise StorageError(f"data of a file in memory do not lie at byte {self.size_bytes:,} of it")
                ctypes.memmove(place, address, len(part))
            self.size_bytes += len(part)
