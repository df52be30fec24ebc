"""Changes to a committed checkpoint: a new index and manifest over the same data files, swapped in at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from unickpt import index_file
from unickpt.commit import index_record, publish
from unickpt.errors import CoverageError
from unickpt.index import Index, check_complete
from unickpt.loading import read_index, read_manifest
from unickpt.storage import open_storage


def remove_tensors(directory: str | os.PathLike[str], unwanted: Callable[[str, str], bool]) -> list[str]:
    """Take tensors out of a checkpoint. Their bytes stay in the data files; the checkpoint no longer has them.

    Args:
        directory: the checkpoint. One process calls this, and no load or save runs meanwhile.
        unwanted: ``(name, state) -> bool``; objects are never asked about.

    Returns:
        ``name (state)`` of what was removed.

    Raises:
        CoverageError: a tensor that stays is derived from one that would go; nothing is changed.
    """
    storage = open_storage(directory)
    manifest = read_manifest(storage)
    index = read_index(storage, manifest)
    keep = [info.kind == "object" or not unwanted(info.name, info.state) for info in index.tensors]
    removed = [f"{info.name} ({info.state})" for info, kept in zip(index.tensors, keep, strict=True) if not kept]
    if not removed:
        return []
    smaller = _filtered(index, np.array(keep))
    check_complete(smaller)
    generation = manifest.generation + 1
    table = index_file.to_bytes(smaller)
    record = index_record(table, generation)
    files = (*(f for f in manifest.files if f.path != manifest.index), record)
    publish(storage, replace(manifest, files=files, index=record.path, generation=generation), table)
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
