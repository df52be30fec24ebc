"""Making a checkpoint exist: the ranks' tables into one index, then the manifest.

Until the manifest is renamed into place there is no checkpoint; afterwards it is whole.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unickpt import index_file, rows
from unickpt import manifest as manifest_module
from unickpt.checksums import digest
from unickpt.contribution import Prepared
from unickpt.errors import StorageError, UnickptError
from unickpt.index import check_coverage
from unickpt.manifest import MANIFEST_FILE, FileRecord, Manifest
from unickpt.storage import PosixStorage

DATA_FOLDER = "data"
ROWS_FOLDER = "rows"
LATEST_FILE = "latest"


@dataclass(frozen=True, slots=True)
class Names:
    """File names of one rank in one generation; a re-save never touches the files it replaces."""

    rank: int
    generation: int

    @property
    def _stem(self) -> str:
        return f"rank{self.rank:05d}" + (f".{self.generation}" if self.generation else "")

    @property
    def data(self) -> str:
        return f"{DATA_FOLDER}/{self._stem}.safetensors"

    @property
    def rows(self) -> str:
        return f"{ROWS_FOLDER}/{self._stem}.safetensors"


def index_name(generation: int) -> str:
    """File name of the index of one generation."""
    return f"index.{generation}.safetensors" if generation else "index.safetensors"


def next_generation(storage: PosixStorage) -> int:
    """The number of a new save under this tag: files of a checkpoint that is already there are left alone."""
    generation = 0
    try:
        if storage.size_bytes(MANIFEST_FILE) is not None:
            old = storage.root / MANIFEST_FILE
            generation = manifest_module.from_bytes(old.read_bytes(), where=str(old)).generation + 1
    except (UnickptError, OSError):
        generation = time.time_ns()  # an unreadable manifest: take a number that nothing can have used
    return generation


def commit(storage: PosixStorage, files: list[FileRecord], part: Prepared, generation: int) -> int:
    """Merge the ranks' rows, check that they make whole tensors, and write index and manifest.

    Returns:
        Bytes of all files of the checkpoint but the manifest.

    Raises:
        CoverageError: the ranks' fragments have holes or overlap; nothing is committed.
        StorageError: a rank's file cannot be seen from here, or the storage fails.
    """
    merged = rows.merge(read_rows(storage, files, generation))
    check_coverage(merged)
    table = index_file.to_bytes(merged)
    name = index_name(generation)
    with storage.create(name) as sink:
        sink.write([memoryview(table)])
    header_bytes = 8 + int.from_bytes(table[:8], "little")
    files = [*files, FileRecord(name, len(table), digest(table), header_bytes, digest(table[:header_bytes]))]
    manifest = Manifest(
        step=part.step,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        writer=part.writer,
        files=tuple(files),
        index=name,
        optimizer=part.optimizer,
        aliases=part.aliases,
        excluded=part.excluded,
        objects=part.objects,
        generation=generation,
    )
    storage.write_atomic(MANIFEST_FILE, manifest_module.to_bytes(manifest))
    _clean(storage, keep={record.path for record in files})
    return sum(record.size_bytes for record in files)


def read_rows(storage: PosixStorage, files: Sequence[FileRecord], generation: int) -> Iterator[tuple[str, bytes]]:
    """Every rank's data file and its rows, in the ranks' order.

    One by one: a pool of threads cannot begin anything once the interpreter is ending, and a save that was begun has to
    be finished then as well.

    Raises:
        StorageError: a rank's file cannot be seen from here, or the storage fails.
    """
    for rank, record in enumerate(files):
        yield record.path, _rows_of(storage, record, Names(rank, generation))


def _rows_of(storage: PosixStorage, record: FileRecord, names: Names) -> bytes:
    size = storage.size_bytes(record.path)
    if size != record.size_bytes:
        found = "is not there" if size is None else f"has {size:,} bytes"
        raise StorageError(
            f"{storage.root / record.path}: rank {names.rank} wrote {record.size_bytes:,} bytes, but seen from the "
            f"coordinator the file {found}. The checkpoint directory has to be on storage that all hosts share."
        )
    return storage.read(names.rows, 0, storage.size_bytes(names.rows) or 0)


def _clean(storage: PosixStorage, keep: set[str]) -> None:
    """Remove the rows, and the files of the generation that this one replaced."""
    storage.delete_folder(ROWS_FOLDER)
    for name in storage.names(DATA_FOLDER):
        if name not in keep:
            storage.delete(name)
    for path in storage.root.glob("index*.safetensors"):
        if path.name not in keep:
            storage.delete(path.name)
