"""Removal of tensors from a committed checkpoint: a new index and manifest atomically replace the old ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from unickpt.base.errors import CoverageError
from unickpt.checkpoint.checkpoint_folder import read_manifest
from unickpt.checkpoint.format import index_codec
from unickpt.checkpoint.format.index import Index, check_complete
from unickpt.checkpoint.load.validation import read_index
from unickpt.checkpoint.save.commit import index_record, publish
from unickpt.checkpoint.storage.open import open_storage


def remove_tensors(directory: str | os.PathLike[str], unwanted: Callable[[str, str], bool]) -> list[str]:
    """Remove tensors from a checkpoint. Their bytes stay in the data files.

    Args:
        directory: directory of the checkpoint. Only one process may call this, without concurrent loads and saves.
        unwanted: ``(name, state) -> bool``. It is not called for objects.

    Returns:
        ``name (state)`` of the removed tensors.

    Raises:
        CoverageError: a remaining tensor is derived from a removed one. Nothing is changed.
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
    table = index_codec.to_bytes(smaller)
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
    found = Index.of_rows(
        tensors=tuple(info for info, kept in zip(index.tensors, keep, strict=True) if kept),
        files=index.files,
        tensor=renumbered[index.tensor[rows]],
        file=index.file[rows],
        offset_bytes=index.offset_bytes[rows],
        checksum=index.checksum[rows],
        start=index.start[rows],
        shape=index.shape[rows],
    )
    return replace(found, block_bytes=index.block_bytes)
