"""Changes to a committed checkpoint: a new index and manifest over the same data files, swapped in at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from unickpt import index_file
from unickpt import manifest as manifest_module
from unickpt.checksums import digest
from unickpt.commit import index_name
from unickpt.errors import CoverageError
from unickpt.index import Index, check_complete
from unickpt.loading import read_index, read_manifest
from unickpt.manifest import MANIFEST_FILE, FileRecord
from unickpt.storage import PosixStorage


def remove_tensors(directory: str | Path, unwanted: Callable[[str, str], bool]) -> list[str]:
    """Take tensors out of a checkpoint. Their bytes stay in the data files; the checkpoint no longer has them.

    Args:
        directory: the checkpoint. One process calls this, and no load or save runs meanwhile.
        unwanted: ``(name, state) -> bool``; objects are never asked about.

    Returns:
        ``name (state)`` of what was removed.

    Raises:
        CoverageError: a tensor that stays is derived from one that would go; nothing is changed.
    """
    storage = PosixStorage(directory)
    manifest = read_manifest(storage)
    index = read_index(storage, manifest)
    keep = [info.kind == "object" or not unwanted(info.name, info.state) for info in index.tensors]
    removed = [f"{info.name} ({info.state})" for info, kept in zip(index.tensors, keep, strict=True) if not kept]
    if not removed:
        return []
    smaller = _filtered(index, np.array(keep))
    check_complete(smaller)
    generation = manifest.generation + 1
    table, name = index_file.to_bytes(smaller), index_name(generation)
    with storage.create(name) as sink:
        sink.write([memoryview(table)])
    header_bytes = 8 + int.from_bytes(table[:8], "little")
    record = FileRecord(name, len(table), digest(table), header_bytes, digest(table[:header_bytes]))
    files = (*(f for f in manifest.files if f.path != manifest.index), record)
    changed = replace(manifest, files=files, index=name, generation=generation)
    storage.write_atomic(MANIFEST_FILE, manifest_module.to_bytes(changed))
    storage.delete(manifest.index)
    return removed


def _filtered(index: Index, keep: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Index:
    renumbered = np.cumsum(keep, dtype=np.int32) - np.int32(1)
    rows = keep[index.tensor] if len(index) else np.zeros(0, bool)
    ids = index.ids()
    for info, kept in zip(index.tensors, keep, strict=True):
        if kept and info.derived_from is not None:
            source = ids.get((info.name, info.derived_from))
            if source is not None and not keep[source]:
                raise CoverageError(
                    f"{info.name} ({info.state}) is derived from its {info.derived_from}, which cannot be removed"
                )
    return Index(
        tensors=tuple(info for info, kept in zip(index.tensors, keep, strict=True) if kept),
        files=index.files,
        tensor=renumbered[index.tensor[rows]],
        file=index.file[rows],
        offset_bytes=index.offset_bytes[rows],
        checksum=index.checksum[rows],
        start=index.start[rows],
        shape=index.shape[rows],
    )
