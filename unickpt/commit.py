"""Making a checkpoint exist: the ranks' tables into one index, then the manifest.

Until the manifest is renamed into place there is no checkpoint; afterwards it is whole.
"""

from __future__ import annotations

import contextlib
import datetime
import fnmatch
import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from unickpt import index_file, rows
from unickpt import manifest as manifest_module
from unickpt.checksums import digest
from unickpt.contribution import Prepared
from unickpt.errors import StorageError, UncertainCommitError, UnickptError
from unickpt.index import check_coverage
from unickpt.manifest import MANIFEST_FILE, FileRecord, Manifest
from unickpt.storage import Storage

logger = logging.getLogger("unickpt")

DATA_FOLDER = "data"
ROWS_FOLDER = "rows"
LATEST_FILE = "latest"
_READERS = 8
HOLD_FILE = "saving.lock"  # held by the coordinator while a save into this directory is under way


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


def next_generation(storage: Storage) -> int:
    """The number of a new save under this tag: files of a checkpoint that is already there are left alone."""
    generation = 0
    try:
        size = storage.size_bytes(MANIFEST_FILE)
        if size is not None:
            old = storage.read(MANIFEST_FILE, 0, size)
            generation = manifest_module.from_bytes(old, where=storage.where(MANIFEST_FILE)).generation + 1
    except (UnickptError, OSError):
        generation = time.time_ns()  # an unreadable manifest: take a number that nothing can have used
    return generation


@dataclass(frozen=True, slots=True)
class Committed:
    """A checkpoint that exists now.

    Attributes:
        size_bytes: of all files but the manifest.
        durable: it outlasts a crash of the machine, as far as the storage says.
    """

    size_bytes: int
    durable: bool


def commit(
    storage: Storage, files: list[FileRecord], part: Prepared, generation: int, *, proceed: Callable[[], None] | None = None
) -> Committed:
    """Merge the ranks' rows, check that they make whole tensors, and write index and manifest.

    Args:
        storage: the checkpoint's directory.
        files: of all ranks, in the ranks' order.
        part: the coordinator's.
        generation: of this save.
        proceed: called right before the manifest is written; raises if it shall not be.

    Raises:
        CoverageError: the ranks' fragments have holes or overlap; nothing is committed.
        StorageError: a rank's file cannot be seen from here, or the storage fails; nothing is committed.
        UncertainCommitError: the storage failed so that nobody knows whether it is.
    """
    merged = rows.merge(read_rows(storage, files, generation))
    check_coverage(merged)
    table = index_file.to_bytes(merged)
    record = index_record(table, generation)
    manifest = Manifest(
        step=part.step,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        writer=part.writer,
        files=(*files, record),
        index=record.path,
        optimizer=part.optimizer,
        aliases=part.aliases,
        excluded=part.excluded,
        objects=part.objects,
        generation=generation,
        notes=part.notes,
    )
    durable = publish(storage, manifest, table, proceed=proceed)
    return Committed(sum(record.size_bytes for record in manifest.files), durable)


def index_record(table: bytes, generation: int) -> FileRecord:
    """What the manifest says about an index."""
    header_bytes = 8 + int.from_bytes(table[:8], "little")
    return FileRecord(index_name(generation), len(table), digest(table), header_bytes, digest(table[:header_bytes]))


def renumbered(manifest: Manifest, table: bytes, generation: int, *, where: str) -> tuple[Manifest, bytes]:
    """The same checkpoint with file names of another generation.

    Args:
        manifest, table: of the checkpoint, the table as the bytes of its index.
        generation: the new one.
        where: names the index in messages.

    Returns:
        Manifest and index; the data files keep their bytes under the names of ``Names(rank, generation)``.
    """
    if generation == manifest.generation:
        return manifest, table
    data = [record for record in manifest.files if record.path != manifest.index]
    names = {record.path: Names(rank, generation).data for rank, record in enumerate(data)}
    index = index_file.from_bytes(table, where=where)
    table = index_file.to_bytes(replace(index, files=tuple(names[path] for path in index.files)))
    record = index_record(table, generation)
    files = (*(replace(old, path=names[old.path]) for old in data), record)
    return replace(manifest, files=files, index=record.path, generation=generation), table


def publish(storage: Storage, manifest: Manifest, table: bytes, *, proceed: Callable[[], None] | None = None) -> bool:
    """Write the index and then the manifest: now the checkpoint exists. Remove what it has replaced.

    Returns:
        Whether it outlasts a crash of the machine, as far as the storage says.

    Raises:
        StorageError: there is no such checkpoint.
        UncertainCommitError: nobody knows whether there is.
    """
    with storage.create(manifest.index) as sink:
        sink.write([memoryview(table)])
    try:
        if proceed is not None:
            proceed()
        durable = _put_in_place(storage, manifest_module.to_bytes(manifest))
    except UncertainCommitError:
        raise
    except BaseException:
        storage.delete(manifest.index)
        raise
    if durable:
        with contextlib.suppress(UnickptError, OSError):  # the checkpoint is there; what is left over takes room, no more
            _clean(storage, keep={record.path for record in manifest.files})
    return durable


def _put_in_place(storage: Storage, data: bytes) -> bool:
    """Make the manifest exist.

    Returns:
        Whether it will surely be there after a crash of the machine; if not, the old one may come back.

    Raises:
        UncertainCommitError: whether it exists cannot be found out.
        StorageError: it does not.
    """
    try:
        storage.write_atomic(MANIFEST_FILE, data)
    except StorageError as err:
        if not _holds(storage, data, err):
            raise
        logger.warning("unickpt: %s is committed, but may not outlast a crash of the machine: %s", storage, err)
        return False
    return True


def _holds(storage: Storage, data: bytes, failure: StorageError) -> bool:
    """Whether a manifest whose writing has failed is there all the same: of a request, the answer may be what was lost."""
    try:
        return storage.size_bytes(MANIFEST_FILE) == len(data) and storage.read(MANIFEST_FILE, 0, len(data)) == data
    except (UnickptError, OSError) as err:
        raise UncertainCommitError(
            f"{failure}; whether it was written all the same cannot be seen ({err}), so the files of this save stay"
        ) from failure


def forget(storage: Storage, names: Names) -> None:
    """Remove what one rank has written of a save without a manifest, and the folders if nothing is left in them."""
    storage.delete(names.data)
    storage.delete(names.rows)
    forget_folders(storage)


def forget_all(storage: Storage, generation: int) -> None:
    """On the coordinator: ``forget`` for all ranks of a save that can no longer get a manifest."""
    storage.delete(index_name(generation))
    own = re.compile(r"rank\d+" + (re.escape(f".{generation}") if generation else "") + r"\.safetensors")
    with contextlib.suppress(UnickptError, OSError):
        for name in [*storage.names(DATA_FOLDER), *storage.names(ROWS_FOLDER)]:
            if own.fullmatch(name.rpartition("/")[2]):
                storage.delete(name)
    forget_folders(storage)


def forget_folders(storage: Storage) -> None:
    """Remove the folders of a checkpoint in which nothing is left."""
    for folder in (DATA_FOLDER, ROWS_FOLDER, ""):
        storage.delete_if_empty(folder)


def read_rows(storage: Storage, files: Sequence[FileRecord], generation: int) -> Iterator[tuple[str, bytes]]:
    """Every rank's data file and its rows, in the ranks' order; several ranks' at a time, as each is a wait for the storage.

    Raises:
        StorageError: a rank's file cannot be seen from here, or the storage fails.
    """

    def one(rank: int) -> bytes:
        return _rows_of(storage, files[rank], Names(rank, generation))

    with ThreadPoolExecutor(_READERS, "unickpt-rows") as pool:
        try:
            found: Iterable[bytes] = pool.map(one, range(len(files)))
        except RuntimeError:  # the interpreter is ending and begins no more threads; this save has to finish all the same
            found = map(one, range(len(files)))
        yield from zip((record.path for record in files), found, strict=True)


def _rows_of(storage: Storage, record: FileRecord, names: Names) -> bytes:
    size = storage.size_bytes(record.path)
    if size != record.size_bytes:
        found = "is not there" if size is None else f"has {size:,} bytes"
        raise StorageError(
            f"{storage.where(record.path)}: rank {names.rank} wrote {record.size_bytes:,} bytes, but seen from the "
            f"coordinator the file {found}. The checkpoint directory has to be on storage that all hosts share."
        )
    return storage.read(names.rows, 0, storage.size_bytes(names.rows) or 0)


def _clean(storage: Storage, keep: set[str]) -> None:
    """Remove the rows, and the files of the generation that this one replaced."""
    storage.delete_folder(ROWS_FOLDER)
    for name in storage.names(DATA_FOLDER):
        if name not in keep:
            storage.delete(name)
    for name in fnmatch.filter(storage.names(), "index*.safetensors"):
        if name not in keep:
            storage.delete(name)
