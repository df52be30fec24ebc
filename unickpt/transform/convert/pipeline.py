"""Writer of a checkpoint from a source that is read box by box: files of other programs, or unickpt checkpoints.

Only a few blocks are in memory at a time. The source is divided into portions; each becomes one data file. Finished portions
are kept: an interrupted conversion continues with the missing ones, unless files of the source have changed.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from unickpt.base.errors import FormatError, MismatchError
from unickpt.checkpoint.format.boxes import Box, cut
from unickpt.checkpoint.format.casts import is_cast_of
from unickpt.checkpoint.format.dtype_names import itemsize_bytes
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.layout import ROWS_FOLDER, RankFiles
from unickpt.checkpoint.format.manifest import FORMAT_VERSION, FileRecord, JSONValue, OptimizerRecord, Writer
from unickpt.checkpoint.load.validation import is_checkpoint
from unickpt.checkpoint.save.commit import commit
from unickpt.checkpoint.save.data_file import DataFile, Pace, create_data_file, write_rows
from unickpt.checkpoint.save.shards import FRAGMENT_BYTES, Contribution, Prepared, Shard, prepare
from unickpt.checkpoint.storage.posix import PosixStorage
from unickpt.transform.convert.huggingface.model_files import ModelFiles
from unickpt.transform.convert.pickles.lazy_tensor import Located
from unickpt.transform.convert.read_ahead import Unread, WriteBehind, write_all
from unickpt.transform.convert.readings import BoxOf, Reading

_EMPTY = torch.empty(0)
OnBytes = Callable[[int], None]  # is told how many more bytes are done


@dataclass(frozen=True, slots=True)
class SourcePart:
    """A box of a tensor, and the function that reads it.

    Attributes:
        tensor, box: the tensor and the box.
        read: reads boxes within ``box``.
        unless: reads like ``read``, or None. A fragment that is the bit-exact cast of it is not written (a weight that is the
            cast of its master).
    """

    tensor: TensorInfo
    box: Box
    read: Reading
    unless: Reading | None = None

    @classmethod
    def whole(cls, tensor: TensorInfo, data: Located) -> SourcePart:
        """Return all of a tensor that is in a file."""
        box = Box.whole(tensor.shape)
        return cls(tensor, box, BoxOf(box, data))

    @property
    def size_bytes(self) -> int:
        return self.box.numel * itemsize_bytes(self.tensor.dtype)


@dataclass(frozen=True, slots=True)
class Portion:
    """The contents of one data file.

    Attributes:
        name: identity for resuming, made of characters allowed in file names.
        parts: parts, in any order.
        inputs: files that the parts are read from.
    """

    name: str
    parts: Sequence[SourcePart]
    inputs: Sequence[Path]

    def state(self) -> list[Any]:
        """Return the identity for resuming: a digest of the parts, and size, inode and times of every input file."""
        parts = hashlib.sha256(repr([(part.tensor, part.box, part.unless is None) for part in self.parts]).encode())
        files = []
        for path in self.inputs:
            found = path.stat()
            files.append([str(path.resolve()), found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns])
        return [files, parts.hexdigest()]


@dataclass
class Source:
    """The contents of a checkpoint to write.

    Attributes:
        kind: name of the source format.
        portions: contents of the data files.
        writer, step, tensors, optimizer, aliases, excluded, objects, shared_objects: as in ``Contribution``.
        left_out: parts of the source that the checkpoint does not contain, each with the reason.
        encoded_objects: objects of a unickpt checkpoint as in its manifest. Their tensors are among the parts.
        model_files: configuration and tokenizer of the model, which the checkpoint keeps; None: there are none.
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
    model_files: ModelFiles | None = None

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for portion in self.portions for part in portion.parts)


@dataclass(frozen=True, slots=True)
class Converted:
    """Result of a conversion.

    Attributes:
        files: number of data files.
        kept: number of data files reused from an interrupted conversion.
        tensors: number of tensors.
        size_bytes: size of the checkpoint.
        model_files: names of the files of the model that the checkpoint keeps.
    """

    files: int
    kept: int
    tensors: int
    size_bytes: int
    model_files: tuple[str, ...] = ()


def convert(
    source: Source, directory: Path, *, workers: int = 2, progress: Callable[[int], None] = lambda _: None
) -> Converted:
    """Write a checkpoint.

    Args:
        source: source whose parts cover every tensor exactly once. Derived tensors may be partly left out.
        directory: directory of the checkpoint: new, or left by an interrupted conversion.
        workers: number of portions that are written at a time.
        progress: called with the number of bytes read. Up to two batches of each file are not written by then.

    Raises:
        MismatchError: the directory already contains a checkpoint, or its folder for the files of a model contains one.
        CoverageError: the parts have holes or overlap. No checkpoint is written.
        FormatError, OSError, StorageError: the source cannot be read, or the checkpoint cannot be written.
    """
    if is_checkpoint(directory):
        raise MismatchError(f"{directory}: already contains a checkpoint; choose another directory")
    storage = PosixStorage(directory)
    model_files = source.model_files.keep(directory) if source.model_files is not None else ()
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
            pool.submit(_converted, storage, portion, RankFiles(at, 0), source.step, progress, stopped)
            for at, portion in enumerate(source.portions, start=1)
        ]
        try:
            made = [task.result() for task in tasks]
        except BaseException:
            stopped.set()  # portions can be large: those being written stop at their next block
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    size = commit(storage, [first, *(record for record, _ in made)], described, generation=0).size_bytes
    tensors = {part.tensor.key for portion in source.portions for part in portion.parts} | {info.key for info in source.tensors}
    return Converted(len(made), sum(kept for _, kept in made), len(tensors), size, model_files)


def _described(storage: PosixStorage, described: Prepared) -> FileRecord:
    """Write the file with tensors inside objects and tensors without elements, which belong to no portion."""
    names = RankFiles(0, 0)
    with storage.create(names.data, about_bytes=sum(shard.size_bytes for shard in described.shards)) as sink:
        file = DataFile(sink, described.shards, rank=0, step=described.step, pace=Pace(None))
        file.write(described.shards)
        record = file.record(names.data)
    write_rows(storage, names.rows, file.rows, described.tensors)
    return record


def _converted(
    storage: PosixStorage,
    portion: Portion,
    names: RankFiles,
    step: int,
    progress: Callable[[int], None],
    stopped: threading.Event,
) -> tuple[FileRecord, bool]:
    """Write one portion. Return its file record, and whether it was reused. Raises CancelledError once ``stopped`` is set."""
    note = f"{ROWS_FOLDER}/{names.rank:05d}.{portion.name}.done"
    before = portion.state()
    known = _done(storage, note, before, names)
    if known is not None:
        progress(sum(part.size_bytes for part in portion.parts))
        return known, True
    unread = _unread(portion, progress)
    shards = [each.shard for each in unread]

    def advance(size_bytes: int) -> None:
        if stopped.is_set():
            raise CancelledError(f"{portion.name}: another portion failed, or the conversion was interrupted")
        progress(size_bytes)

    with create_data_file(storage, names.data, shards, direct=True) as file, WriteBehind(file) as sink:
        out = DataFile(sink, shards, rank=names.rank, step=step, pace=Pace(None))
        write_all(unread, out, sink, advance)
        record = out.record(names.data)
    write_rows(storage, names.rows, out.rows, list({part.tensor.key: part.tensor for part in portion.parts}.values()))
    if portion.state() != before:
        raise FormatError(
            f"{', '.join(map(str, portion.inputs))}: the file changed during the conversion; run the command again"
        )
    storage.write_atomic(note, json.dumps({"format": FORMAT_VERSION, "source": before, "record": asdict(record)}).encode())
    return record, False


def _done(storage: PosixStorage, note: str, state: list[Any], names: RankFiles) -> FileRecord | None:
    """Return the file record of a finished portion, or None if it is incomplete or the source has changed."""
    try:
        size = storage.size_bytes(note)
        found = json.loads(storage.read(note, 0, size)) if size else {}
        record, known, version = FileRecord(**found["record"]), found["source"], found["format"]
    except (ValueError, KeyError, TypeError):
        return None
    same = (
        (version, known) == (FORMAT_VERSION, state)
        and record.path == names.data
        and storage.size_bytes(names.data) == record.size_bytes
    )
    return record if same and storage.size_bytes(names.rows) else None


def _unread(portion: Portion, progress: Callable[[int], None]) -> list[Unread]:
    """Return the shards to write, largest elements first."""
    found: list[Unread] = []
    for part in portion.parts:
        limit = max(FRAGMENT_BYTES // itemsize_bytes(part.tensor.dtype), 1)
        for box in cut(part.box, limit) if part.box.numel else ():
            shard = Shard(part.tensor, box, _EMPTY)
            if part.unless is not None and is_cast_of(part.read(box), part.unless(box)):
                progress(shard.size_bytes)
            else:
                found.append(Unread(shard, part.read))
    found.sort(key=lambda each: -itemsize_bytes(each.shard.tensor.dtype))
    return found
