"""Verify a checkpoint: read every byte and list all problems."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from unickpt.base.errors import CorruptCheckpointError, CoverageError, FormatError, StorageError, UnsafePathError
from unickpt.checkpoint.checkpoint_folder import read_manifest
from unickpt.checkpoint.format import index as index_module
from unickpt.checkpoint.format.checksums import RunningBlocks, RunningDigest, combined
from unickpt.checkpoint.format.index import Index
from unickpt.checkpoint.format.layout import fragment_key
from unickpt.checkpoint.format.manifest import MANIFEST_FILE, FileRecord, Manifest
from unickpt.checkpoint.format.safetensors_header import parse_header
from unickpt.checkpoint.load.validation import read_index
from unickpt.checkpoint.storage.base import Reader, Storage
from unickpt.checkpoint.storage.open import open_storage

_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of a verification. Without problems, every byte is as written and every tensor is covered exactly once.

    Attributes:
        problems: problems found, one line each.
        files: number of files read.
        fragments: number of fragments in the index. 0 if the index is damaged.
        size_bytes: size of all files.
    """

    problems: tuple[str, ...]
    files: int
    fragments: int
    size_bytes: int


def verify_checkpoint(directory: str | os.PathLike[str], *, progress: Callable[[int], None] | None = None) -> Verification:
    """Read every byte of a checkpoint and compare it with the checksums.

    Example:
        Stop if a checkpoint is damaged::

            problems = unickpt.verify_checkpoint("out/step100").problems
            if problems:
                raise SystemExit("\\n".join(problems))

    Args:
        directory: checkpoint directory, ``<save_dir>/<tag>``. A path or a URL.
        progress: called with the size in bytes of every file that has been read.

    Returns:
        Problems found, and how much was read.

    Raises:
        NotACheckpointError: the directory has no manifest.
        NewerFormatError: a later release wrote the checkpoint.
        UnsafePathError, FormatError: the manifest is malformed, so there is nothing to verify against.
        StorageError: the manifest cannot be read. Other files that cannot be read are problems.
    """
    storage = open_storage(directory)
    return verify_files(storage, read_manifest(storage), progress=progress)


def verify_files(storage: Storage, manifest: Manifest, *, progress: Callable[[int], None] | None = None) -> Verification:
    """Read every byte of a checkpoint whose manifest has been read, as ``verify_checkpoint`` does."""
    problems: list[str] = []
    index: Index | None = None
    try:
        index = read_index(storage, manifest)
        problems += _alias_problems(storage.where(MANIFEST_FILE), manifest, index)
        index_module.check_coverage(index)
    except UnsafePathError:
        raise
    except (CorruptCheckpointError, CoverageError, StorageError, FormatError) as err:
        problems.append(str(err))
    for record in manifest.files:
        try:
            problems += _file_problems(storage, record, index if record.path != manifest.index else None)
        except (StorageError, FormatError) as err:
            problems.append(str(err))
        if progress is not None:
            progress(record.size_bytes)
    return Verification(
        problems=tuple(dict.fromkeys(problems)),
        files=len(manifest.files),
        fragments=0 if index is None else len(index),
        size_bytes=sum(record.size_bytes for record in manifest.files),
    )


def _alias_problems(where: str, manifest: Manifest, index: Index) -> list[str]:
    """Check the aliases of tied parameters: each must name a stored tensor or an excluded one, and not another alias."""
    stored = {info.name for info in index.tensors}
    known = stored | set(manifest.excluded)
    problems = []
    for alias, name in manifest.aliases.items():
        if alias in stored:
            problems.append(f"{where}: {alias[:200]!r} is an alias of {name[:200]!r} and also a stored tensor")
        elif name in manifest.aliases:
            problems.append(f"{where}: {alias[:200]!r} is an alias of {name[:200]!r}, which is an alias itself")
        elif name not in known:
            problems.append(f"{where}: {alias[:200]!r} is an alias of {name[:200]!r}, which is not stored")
    return problems


def _file_problems(storage: Storage, record: FileRecord, index: Index | None) -> list[str]:
    path = storage.where(record.path)
    size = storage.size_bytes(record.path)
    if size != record.size_bytes:
        return [f"{path}: {'missing' if size is None else f'{size:,} bytes'}, expected {record.size_bytes:,} bytes"]
    whole = RunningDigest()
    with storage.reader(record.path) as reader:
        for block in _blocks(reader, 0, size):
            whole.update(block)
    problems = []
    if index is not None:
        problems += _header_problems(storage, record, index)
        problems += _damaged_fragments(storage, record, index)
    if whole.value() != record.checksum and not problems:
        problems.append(f"{path}: checksum differs from the manifest")
    return problems


def _rows_of_file(index: Index, name: str) -> list[int]:
    if name not in index.files:
        return []
    rows: list[int] = np.flatnonzero(index.file == index.files.index(name)).tolist()
    return rows


def _header_problems(storage: Storage, record: FileRecord, index: Index) -> list[str]:
    """Compare the safetensors header with the index: any safetensors reader must see the same tensors."""
    path = storage.where(record.path)
    header = parse_header(storage.read(record.path, 0, record.header_bytes), file_bytes=record.size_bytes, where=path)
    slots = {header.header_bytes + slot.begin_byte: slot for slot in header.slots if slot.end_byte > slot.begin_byte}
    problems = []
    for row in _rows_of_file(index, record.path):
        info, box, offset = index.tensors[int(index.tensor[row])], index.box(row), int(index.offset_bytes[row])
        slot = slots.get(offset)
        same = slot is not None and (slot.name, slot.dtype, slot.shape) == (fragment_key(info, box), info.dtype, box.shape)
        if not same:
            problems.append(
                f"{path}: at byte {offset:,} the header has {slot} and the index has {info.name} ({info.state}) {box}"
            )
    return problems


def _damaged_fragments(storage: Storage, record: FileRecord, index: Index) -> list[str]:
    path = storage.where(record.path)
    sizes = index.size_bytes()
    problems = []
    with storage.reader(record.path) as reader:
        for row in _rows_of_file(index, record.path):
            offset, size = int(index.offset_bytes[row]), int(sizes[row])
            running = RunningBlocks(size, index.block_bytes)
            for block in _blocks(reader, offset, size):
                running.update(block)
            if combined(running.value()) != int(index.checksum[row]):
                info = index.tensors[int(index.tensor[row])]
                problems.append(
                    f"{path}: {info.name} ({info.state}) {index.box(row)} is damaged (bytes {offset:,} to {offset + size:,})"
                )
    return problems


def _blocks(reader: Reader, begin: int, size: int) -> Iterator[bytearray]:
    """Yield the bytes of a file in blocks of at most 16 MiB."""
    for at in range(begin, begin + size, _CHUNK_BYTES):
        buffer = bytearray(min(_CHUNK_BYTES, begin + size - at))
        reader.read_into([memoryview(buffer)], at)
        yield buffer
