"""Checkpoints that others have written, made into one of ours, a block at a time.

Every file of the source becomes a data file. What is done stays done: a conversion that was cut off goes on with the files
that are missing, if those of the source have not changed meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from unickpt import __version__
from unickpt.commit import ROWS_FOLDER, Names, commit
from unickpt.contribution import FRAGMENT_BYTES, Contribution, Shard, prepare
from unickpt.dtypes import itemsize_bytes, torch_dtype
from unickpt.errors import FormatError, MismatchError, NotACheckpointError
from unickpt.exporting import CONFIG, INDEX
from unickpt.fragments import Box, cut, flat_range
from unickpt.index import TensorInfo
from unickpt.language.facts import Model
from unickpt.loading import is_checkpoint
from unickpt.manifest import FileRecord, Writer
from unickpt.posix import PosixStorage
from unickpt.reading import bytes_of
from unickpt.safetensors_io import Header, TensorSlot, header_bytes_of, parse_header
from unickpt.translated import HUGGINGFACE
from unickpt.writing import DataFile, Pace, write_rows

BATCH_BYTES = 64 << 20  # of a file that are in memory
_EMPTY = torch.empty(0)


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written. Attributes: files with data, those of them that were there already, tensors, bytes."""

    files: int
    kept: int
    tensors: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SourceFile:
    """Attributes: where it is, and its header."""

    path: Path
    header: Header

    def state(self) -> list[Any]:
        """By which it is known again: what and where it is, and when it was last changed, in whatever way."""
        found = self.path.stat()
        tensors = hashlib.sha256(repr(self.header.slots).encode()).hexdigest()
        return [str(self.path.resolve()), found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, tensors]


def huggingface_files(folder: Path) -> list[SourceFile]:
    """The safetensors files of a model of transformers.

    Raises:
        NotACheckpointError: there are none.
        FormatError: one of them is damaged, or two have a tensor of one name.
    """
    paths = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not paths:
        raise NotACheckpointError(f"{folder}: no safetensors files are there")
    _check_whole(folder, paths)
    found = [SourceFile(path, _header(path)) for path in paths]
    seen: dict[str, Path] = {}
    for file in found:
        for slot in file.header.slots:
            if slot.name in seen:
                raise FormatError(f"{folder}: {slot.name} is in {seen[slot.name].name} and in {file.path.name}")
            seen[slot.name] = file.path
    return found


def _check_whole(folder: Path, paths: Sequence[Path]) -> None:
    """All files that there should be are there, and no others."""
    strange = [path for path in paths if not path.is_file()]
    if strange:
        raise FormatError(f"{strange[0]}: is no file")
    names = {path.name for path in paths}
    index = folder / INDEX
    if index.is_file():
        try:
            listed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
            raise FormatError(f"{index}: cannot be read as an index ({err})") from None
        missing, more = sorted(map(str, listed - names)), sorted(names - listed)
    else:
        parts = [match for name in names if (match := re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})(\.safetensors)", name))]
        wanted = {f"{m[1]}-{at:05d}-of-{m[3]}{m[4]}" for m in parts for at in range(1, int(m[3]) + 1)}
        missing, more = sorted(wanted - names), []
    if missing or more:
        told = f"{missing[0]} is not there" if missing else f"{more[0]} is not one of the files that {INDEX} lists"
        raise FormatError(f"{folder}: {told}: the model is not whole")


def _header(path: Path) -> Header:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = header_bytes_of(prefix, file_bytes=size, where=str(path))
        return parse_header(prefix + file.read(length - 8), file_bytes=size, where=str(path))


def convert_huggingface(
    folder: Path, directory: Path, *, workers: int = 2, progress: Callable[[int], None] = lambda _: None
) -> Converted:
    """A folder of transformers as a checkpoint of weights: step 0, without an optimizer.

    Args:
        folder: with safetensors files and ``config.json``.
        directory: of the checkpoint, which is not there yet, or of a conversion that was cut off.
        workers: files at a time.
        progress: called with the bytes that were written.

    Raises:
        MismatchError: there is a checkpoint already.
        NotACheckpointError, FormatError, OSError, StorageError: it cannot be read, or not written.
    """
    if is_checkpoint(directory):
        raise MismatchError(f"{directory}: holds a checkpoint already; name another directory")
    files = huggingface_files(folder)
    infos = {
        slot.name: TensorInfo(slot.name, "weight", slot.dtype, slot.shape, "parameter")
        for file in files for slot in file.header.slots
    }  # fmt: skip
    writer = Writer("transformers", str(_config(folder).get("transformers_version") or ""), __version__, torch.__version__,
                    HUGGINGFACE, {}, Model.of_config(_config(folder)).as_json())  # fmt: skip
    storage = PosixStorage(directory)
    with ThreadPoolExecutor(workers, "unickpt-convert") as pool:
        tasks = [pool.submit(_converted, storage, file, infos, at, progress) for at, file in enumerate(files)]
        made = [task.result() for task in tasks]
    size = commit(storage, [record for record, _ in made], prepare(Contribution([], 0, writer), 0), generation=0)
    return Converted(len(files), sum(kept for _, kept in made), len(infos), size)


def _config(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


def _converted(
    storage: PosixStorage, file: SourceFile, infos: dict[str, TensorInfo], number: int, progress: Callable[[int], None]
) -> tuple[FileRecord, bool]:
    """One file; and whether it was there already."""
    names = Names(number, 0)
    note = f"{ROWS_FOLDER}/{file.path.name}.done"
    known = _done(storage, note, file, names)
    if known is not None:
        progress(known.size_bytes)
        return known, True
    before = file.state()
    shards, slots = _shards(file, infos), {slot.name: slot for slot in file.header.slots}
    with storage.create(names.data, about_bytes=file.path.stat().st_size) as sink, file.path.open("rb") as source:
        out = DataFile(sink, shards, rank=number, step=0, pace=Pace(None))
        for batch in _batches(shards):
            read = [_read(source.fileno(), file, slots[shard.tensor.name], shard) for shard in batch]
            out.write(read)
            progress(sum(shard.size_bytes for shard in read))
        record = out.record(names.data)
    write_rows(storage, names.rows, out.rows, [infos[name] for name in slots if not infos[name].numel])
    if file.state() != before:
        raise FormatError(f"{file.path}: was changed while it was read")
    text = json.dumps({"source": before, "record": asdict(record)})
    storage.write_atomic(note, text.encode())
    return record, False


def _done(storage: PosixStorage, note: str, file: SourceFile, names: Names) -> FileRecord | None:
    """What was written of a file, if that is all there and the file is the same."""
    try:
        size = storage.size_bytes(note)
        found = json.loads(storage.read(note, 0, size)) if size else {}
        record, state = FileRecord(**found["record"]), found["source"]
    except (ValueError, KeyError, TypeError):
        return None
    same = state == file.state() and record.path == names.data and storage.size_bytes(names.data) == record.size_bytes
    return record if same and storage.size_bytes(names.rows) else None


def _shards(file: SourceFile, infos: dict[str, TensorInfo]) -> list[Shard]:
    """Boxes of its tensors, those of large elements first, without their data."""
    found = []
    for slot in file.header.slots:
        info = infos[slot.name]
        limit = max(FRAGMENT_BYTES // itemsize_bytes(info.dtype), 1)
        found += [Shard(info, box, _EMPTY) for box in cut(Box.whole(info.shape), limit) if info.numel]
    return sorted(found, key=lambda shard: -itemsize_bytes(shard.tensor.dtype))


def _batches(shards: Sequence[Shard]) -> Iterator[list[Shard]]:
    batch: list[Shard] = []
    size = 0
    for shard in shards:
        batch.append(shard)
        size += shard.box.numel * itemsize_bytes(shard.tensor.dtype)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _read(descriptor: int, file: SourceFile, slot: TensorSlot, shard: Shard) -> Shard:
    """The shard with its data."""
    place = flat_range(shard.box, shard.tensor.shape)
    assert place is not None  # cut gives contiguous boxes
    data = torch.empty(shard.box.numel, dtype=torch_dtype(shard.tensor.dtype))
    view = bytes_of(data)
    at = file.header.header_bytes + slot.begin_byte + place[0] * itemsize_bytes(shard.tensor.dtype)
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], at + done)
        if count <= 0:
            raise FormatError(f"{file.path}: ends at byte {at + done:,}, within {slot.name}")
        done += count
    return replace(shard, data=data)
