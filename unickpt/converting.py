"""A checkpoint made of what can be read box by box: of the files of others, or of checkpoints of ours.

Nothing is ever in memory but a few blocks. The source is divided into portions, each of which becomes a data file; what is
done stays done, so that a conversion that was cut off goes on with the portions that are missing, unless the files of the
source have changed meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from unickpt.commit import ROWS_FOLDER, Names, commit
from unickpt.contribution import FRAGMENT_BYTES, Contribution, Prepared, Shard, prepare
from unickpt.dtypes import is_cast_of, itemsize_bytes, torch_dtype
from unickpt.errors import FormatError, MismatchError
from unickpt.fragments import Box, cut
from unickpt.index import TensorInfo
from unickpt.loading import is_checkpoint
from unickpt.manifest import FileRecord, JSONValue, OptimizerRecord, Writer
from unickpt.posix import PosixStorage
from unickpt.writing import DataFile, Pace, write_rows

BATCH_BYTES = 16 << 20  # of a portion that are in memory
_EMPTY = torch.empty(0)

Reading = Callable[[Box], torch.Tensor]  # of a box in the tensor's coordinates: its elements, 1-D in row-major order


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor, and how it is read.

    Attributes:
        tensor, box: what it is.
        read: of boxes within ``box``.
        unless: as ``read``; a fragment that is, bit for bit, the cast of this is not written (a weight that its master
            tells).
    """

    tensor: TensorInfo
    box: Box
    read: Reading
    unless: Reading | None = None

    @property
    def size_bytes(self) -> int:
        return self.box.numel * itemsize_bytes(self.tensor.dtype)


@dataclass(frozen=True, slots=True)
class Portion:
    """What becomes one data file.

    Attributes:
        name: by which it is known again; of letters that a file name may have.
        parts: in any order.
        inputs: files that it is made of.
    """

    name: str
    parts: Sequence[Part]
    inputs: Sequence[Path]

    def state(self) -> list[Any]:
        """By which it is known again: what it is, what it is made of, and when that was last changed in whatever way."""
        parts = hashlib.sha256(repr([(part.tensor, part.box, part.unless is None) for part in self.parts]).encode())
        files = []
        for path in self.inputs:
            found = path.stat()
            files.append([str(path.resolve()), found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns])
        return [files, parts.hexdigest()]


@dataclass
class Source:
    """A checkpoint to be.

    Attributes as of ``Contribution``; ``left_out``: what of the source is not in it, and why; ``encoded_objects``: those of a
    checkpoint of ours, as its manifest has them. Their tensors are among the parts.
    """

    kind: str
    portions: Sequence[Portion]
    writer: Writer
    step: int = 0
    tensors: Sequence[TensorInfo] = ()
    optimizer: OptimizerRecord | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    objects: dict[str, Any] = field(default_factory=dict)
    shared_objects: dict[str, Any] = field(default_factory=dict)
    left_out: Sequence[str] = ()
    encoded_objects: Mapping[str, JSONValue] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for portion in self.portions for part in portion.parts)


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written. Attributes: files with data, those of them that were there already, tensors, bytes."""

    files: int
    kept: int
    tensors: int
    size_bytes: int


@dataclass(frozen=True)
class Regions:
    """A tensor that is read from several places.

    Attributes:
        dtype: by the format's name.
        parts: boxes of it, disjoint, each with how it is read.
    """

    dtype: str
    parts: Sequence[tuple[Box, Reading]]

    def read(self, box: Box) -> torch.Tensor:
        """A box of it. Raises FormatError if some of it is nowhere."""
        target = torch.empty(box.shape, dtype=torch_dtype(self.dtype))
        left = box.numel
        for place, read in self.parts:
            common = place.intersect(box) if box.numel else None
            if common is not None:
                target[common.within(box).slices()] = read(common).view(common.shape)
                left -= common.numel
        if left:
            raise FormatError(f"{left:,} elements of {box} of a tensor are nowhere in the source")
        return target.reshape(-1)


def convert(
    source: Source, directory: Path, *, workers: int = 2, progress: Callable[[int], None] = lambda _: None
) -> Converted:
    """Write a checkpoint.

    Args:
        source: whose parts cover every tensor of it exactly once (what is derived may be left out).
        directory: of the checkpoint, which is not there yet, or of a conversion that was cut off.
        workers: portions at a time.
        progress: called with the bytes that are done.

    Raises:
        MismatchError: there is a checkpoint already.
        CoverageError: the parts have holes or overlap; there is no checkpoint.
        FormatError, OSError, StorageError: it cannot be read, or not written.
    """
    if is_checkpoint(directory):
        raise MismatchError(f"{directory}: holds a checkpoint already; name another directory")
    storage = PosixStorage(directory)
    contribution = Contribution(
        [], source.step, source.writer, tensors=list(source.tensors), optimizer=source.optimizer, aliases=source.aliases,
        excluded=source.excluded, objects=source.objects, shared_objects=source.shared_objects,
    )  # fmt: skip
    described = prepare(contribution, 0)
    described.objects = {**described.objects, **source.encoded_objects}
    first = _described(storage, described)
    stopped = threading.Event()
    with ThreadPoolExecutor(workers, "unickpt-convert") as pool:
        tasks = [
            pool.submit(_converted, storage, portion, Names(at, 0), source.step, progress, stopped)
            for at, portion in enumerate(source.portions, start=1)
        ]
        try:
            made = [task.result() for task in tasks]
        except BaseException:
            stopped.set()  # portions can be large: those that are being written end at their next block
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    size = commit(storage, [first, *(record for record, _ in made)], described, generation=0).size_bytes
    tensors = {part.tensor.key for portion in source.portions for part in portion.parts} | {info.key for info in source.tensors}
    return Converted(len(made), sum(kept for _, kept in made), len(tensors), size)


def _described(storage: PosixStorage, described: Prepared) -> FileRecord:
    """The file of what is no portion: tensors within objects, and those that have no elements."""
    names = Names(0, 0)
    with storage.create(names.data, about_bytes=sum(shard.size_bytes for shard in described.shards)) as sink:
        file = DataFile(sink, described.shards, rank=0, step=described.step, pace=Pace(None))
        file.write(described.shards)
        record = file.record(names.data)
    write_rows(storage, names.rows, file.rows, described.tensors)
    return record


def _converted(
    storage: PosixStorage, portion: Portion, names: Names, step: int, progress: Callable[[int], None], stopped: threading.Event
) -> tuple[FileRecord, bool]:
    """Write one portion; returns its file, and whether it was there already. Raises CancelledError once ``stopped`` is set."""
    note = f"{ROWS_FOLDER}/{names.rank:05d}.{portion.name}.done"
    before = portion.state()
    known = _done(storage, note, before, names)
    if known is not None:
        progress(sum(part.size_bytes for part in portion.parts))
        return known, True
    shards, readings = _shards(portion, progress)
    with storage.create(names.data, direct=True, about_bytes=sum(shard.size_bytes for shard in shards)) as sink:
        out = DataFile(sink, shards, rank=names.rank, step=step, pace=Pace(None))
        for lo, hi in _batches(shards):
            if stopped.is_set():
                raise CancelledError(f"{portion.name}: another portion failed, or the conversion was interrupted")
            read = [
                replace(shard, data=reading(shard.box)) for shard, reading in zip(shards[lo:hi], readings[lo:hi], strict=True)
            ]
            out.write(read)
            progress(sum(shard.size_bytes for shard in read))
        record = out.record(names.data)
    write_rows(storage, names.rows, out.rows, list({part.tensor.key: part.tensor for part in portion.parts}.values()))
    if portion.state() != before:
        raise FormatError(f"{', '.join(map(str, portion.inputs))}: changed while it was read; nothing of it is taken")
    storage.write_atomic(note, json.dumps({"source": before, "record": asdict(record)}).encode())
    return record, False


def _done(storage: PosixStorage, note: str, state: list[Any], names: Names) -> FileRecord | None:
    """What was written of a portion, if that is all there and the portion is the same."""
    try:
        size = storage.size_bytes(note)
        found = json.loads(storage.read(note, 0, size)) if size else {}
        record, known = FileRecord(**found["record"]), found["source"]
    except (ValueError, KeyError, TypeError):
        return None
    same = known == state and record.path == names.data and storage.size_bytes(names.data) == record.size_bytes
    return record if same and storage.size_bytes(names.rows) else None


def _shards(portion: Portion, progress: Callable[[int], None]) -> tuple[list[Shard], list[Reading]]:
    """What is to be written, those of large elements first, without their data; and how each is read."""
    found: list[tuple[Shard, Reading]] = []
    for part in portion.parts:
        limit = max(FRAGMENT_BYTES // itemsize_bytes(part.tensor.dtype), 1)
        for box in cut(part.box, limit) if part.box.numel else ():
            shard = Shard(part.tensor, box, _EMPTY)
            if part.unless is not None and is_cast_of(part.read(box), part.unless(box)):
                progress(shard.size_bytes)
            else:
                found.append((shard, part.read))
    found.sort(key=lambda each: -itemsize_bytes(each[0].tensor.dtype))
    return [shard for shard, _ in found], [reading for _, reading in found]


def _batches(shards: Sequence[Shard]) -> Iterator[tuple[int, int]]:
    lo = size = 0
    for at, shard in enumerate(shards):
        size += shard.size_bytes
        if size >= BATCH_BYTES:
            yield lo, at + 1
            lo, size = at + 1, 0
    if lo < len(shards):
        yield lo, len(shards)
