"""Check a checkpoint's manifest, index, file sizes and headers before any of its data is used.

A checkpoint is untrusted: a wrong number must neither lead outside its directory nor exhaust memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from unickpt.base.errors import CorruptCheckpointError, CoverageError, FormatError, UnsafePathError
from unickpt.base.listing import some
from unickpt.checkpoint.format import index as index_module
from unickpt.checkpoint.format import index_codec
from unickpt.checkpoint.format.checksums import digest
from unickpt.checkpoint.format.index import Index
from unickpt.checkpoint.format.linear_order import blocks
from unickpt.checkpoint.format.manifest import MANIFEST_FILE, FileRecord, Manifest
from unickpt.checkpoint.format.safetensors_header import parse_header
from unickpt.checkpoint.storage.base import Storage
from unickpt.checkpoint.storage.open import open_storage

MAX_INDEX_BYTES = 1 << 32  # about 50 million fragments
_LARGE_INDEX_BYTES = 64 << 20


def is_checkpoint(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory or URL holds a unickpt checkpoint, damaged or not: it has a manifest.

    Raises:
        StorageError: the storage cannot be read.
    """
    try:
        return open_storage(directory).size_bytes(MANIFEST_FILE) is not None
    except UnsafePathError:
        return True


def files_of_deepspeed(place: Storage) -> list[str]:
    """Return the names of the files with which DeepSpeed's own format describes a model or an optimizer."""
    return [name for name in place.names() if name.endswith(("model_states.pt", "optim_states.pt"))]


def newer_of_deepspeed(place: Storage) -> str:
    """Return a file of DeepSpeed that is newer than the manifest: DeepSpeed has saved over a unickpt checkpoint. '' for none.

    Raises:
        StorageError: the storage cannot be read.
    """
    files = files_of_deepspeed(place)
    if not files or place.size_bytes(MANIFEST_FILE) is None:
        return ""
    newest = max(files, key=place.modified_ns)
    return newest if place.modified_ns(newest) > place.modified_ns(MANIFEST_FILE) else ""


def check_files(storage: Storage, manifest: Manifest) -> None:
    """Compare presence and size of every file with the manifest. Reads no file.

    Raises:
        CorruptCheckpointError: files are missing or have the wrong size; names up to eight of them.
        StorageError: the storage cannot be read.
    """
    problems = []
    sizes = storage.sizes_bytes([record.path for record in manifest.files])
    for record, size in zip(manifest.files, sizes, strict=True):
        if size is None:
            problems.append(f"{record.path} is missing")
        elif size != record.size_bytes:
            problems.append(f"{record.path} has {size:,} bytes, expected {record.size_bytes:,}")
    if problems:
        raise CorruptCheckpointError(f"{storage}: {some(problems, separator='; ')}")


def checked_index(storage: Storage, manifest: Manifest) -> Index:
    """Check everything of a checkpoint except the data, and return its index. No data file is read.

    Raises:
        FormatError: the manifest or the index is malformed.
        CorruptCheckpointError: a file is missing or has the wrong size, or the index fails its checksum.
        StorageError: the storage cannot be read.
    """
    check_files(storage, manifest)
    return read_index(storage, manifest)


def read_index(storage: Storage, manifest: Manifest) -> Index:
    """Read and validate the index of a checkpoint.

    Raises:
        CorruptCheckpointError: the index fails its checksum.
        FormatError: the index is malformed, too large, or does not fit the data files.
        StorageError: the index cannot be read.
    """
    record = manifest.file(manifest.index)
    path = storage.where(record.path)
    if record.size_bytes > MAX_INDEX_BYTES:
        raise FormatError(f"{path}: {record.size_bytes:,} bytes; an index has at most {MAX_INDEX_BYTES:,}")
    if record.size_bytes > _LARGE_INDEX_BYTES:
        # A sparse file of any size costs an attacker nothing, so the header must account for all bytes before they are read.
        check_header(storage, record)
        parse_header(storage.read(record.path, 0, record.header_bytes), file_bytes=record.size_bytes, where=path)
    try:
        data = storage.read(record.path, 0, record.size_bytes)
        if digest(data) != record.checksum:
            raise CorruptCheckpointError(f"{path}: checksum differs from the manifest; the index is damaged").about(
                file=record.path
            )
        index = index_codec.from_bytes(data, where=path)
    except MemoryError:
        raise FormatError(f"{path}: not enough memory for an index of {record.size_bytes:,} bytes") from None
    try:
        index_module.check_complete(index)
    except CoverageError as err:
        raise FormatError(f"{path}: {err}") from None
    check_places(index, {r.path: r for r in manifest.files if r.path != manifest.index}, path)
    return index


def check_places(index: Index, known: Mapping[str, FileRecord], where: str) -> None:
    """Check that all fragments lie in the data of listed files, ``known`` by path, and do not overlap.

    Without the second check a few bytes could pose as the content of a huge tensor and exhaust memory.

    Raises:
        FormatError: names the first wrong file or byte range.
    """
    if len(set(index.files)) != len(index.files):
        raise FormatError(f"{where}: the index lists a data file twice")
    unknown = [name for name in index.files if name not in known]
    if unknown:
        raise FormatError(f"{where}: the index names data file {unknown[0]!r}, which the manifest does not list")
    if sum(known[name].size_bytes for name in index.files) >= 2**62:
        raise FormatError(f"{where}: the sizes of the data files add up to more than 2**62 bytes")
    header = np.array([known[name].header_bytes for name in index.files] or [0], np.int64)
    limit = np.array([known[name].size_bytes for name in index.files] or [0], np.int64)
    first = np.cumsum(limit) - limit  # all files end to end
    sizes, itemsize, box_file = index.box_numel(), index.itemsizes(), index.box_file
    begin, end, wrong = np.empty(len(index), np.int64), np.empty(len(index), np.int64), -1
    for part in blocks(len(index)):
        box, offset = index.boxes_of(part), index.offset[part].astype(np.int64, copy=False)
        file, size = box_file[box], sizes[box]
        size *= index.per_row(itemsize, part)
        bad = (offset < header[file]) | (size > limit[file] - offset)
        if wrong < 0 and bad.any():
            wrong = part.start + int(np.argmax(bad))
        begin[part] = first[file] + offset
        end[part] = begin[part] + size
    if wrong < 0:
        # Fragments do not overlap if and only if, with begins and ends sorted separately, each end is at most the next begin.
        begin.sort(kind="stable")  # they consist of ascending runs
        end.sort(kind="stable")
        if np.all(begin[1:] >= end[:-1]):
            return
        file, begin, size = index.file, index.offset_bytes, index.size_bytes()
        order = np.lexsort((begin, file))
        file, begin, size = file[order], begin[order], size[order]
        clash = (file[1:] == file[:-1]) & (begin[1:] < (begin + size)[:-1])
        wrong = int(order[1:][clash].min())
    row = wrong
    begin_byte, size_bytes = int(index.offset[row]), int(index.size_bytes()[row])
    raise FormatError(
        f"{where}: a fragment at bytes {begin_byte:,} to {begin_byte + size_bytes:,} of "
        f"{index.files[int(index.file[row])]} overlaps another fragment or lies outside the data of the file"
    )


def check_header(storage: Storage, record: FileRecord) -> None:
    """Compare the safetensors header of a file with the checksum in the manifest.

    Raises:
        CorruptCheckpointError: the header was altered.
        StorageError: the header cannot be read.
    """
    if digest(storage.read(record.path, 0, record.header_bytes)) != record.header_checksum:
        raise CorruptCheckpointError(
            f"{storage.where(record.path)}: checksum of the safetensors header differs from the manifest; the file is damaged"
        ).about(file=record.path)
