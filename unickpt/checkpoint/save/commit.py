"""Commit of a checkpoint: merge the rows of the ranks into the index, then write the manifest.

The checkpoint exists, complete, from the moment the manifest is renamed into place.
"""

from __future__ import annotations

import contextlib
import datetime
import fnmatch
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from unickpt.base.errors import NotACheckpointError, OtherModelError, StorageError, UncertainCommitError, UnickptError
from unickpt.base.logs import logger
from unickpt.checkpoint.checkpoint_folder import read_manifest
from unickpt.checkpoint.coordination.owners import Claim
from unickpt.checkpoint.format import index_codec, rank_rows
from unickpt.checkpoint.format import manifest as manifest_module
from unickpt.checkpoint.format.checksums import digest
from unickpt.checkpoint.format.index import Index, check_coverage
from unickpt.checkpoint.format.layout import DATA_FOLDER, ROWS_FOLDER, RankFiles, index_name
from unickpt.checkpoint.format.manifest import MANIFEST_FILE, FileRecord, Manifest
from unickpt.checkpoint.save.shards import Prepared
from unickpt.checkpoint.storage.base import Storage, is_url

_READERS = 8
_SLOW_SECONDS = 0.002  # a file that takes longer to read is on storage with latency


def next_generation(storage: Storage, claim: Claim | None = None) -> int:
    """Return the generation of a new save under this tag. Its files do not overwrite those of an existing checkpoint.

    An object store has no locks, so another copy of the job may be writing files under this tag: they are not overwritten
    either.

    Raises:
        OtherModelError: it is the checkpoint of another model.
    """
    old: Manifest | None = None
    try:
        old = read_manifest(storage)
    except NotACheckpointError:
        pass
    except (UnickptError, OSError):
        return time.time_ns()  # the manifest is unreadable: use a number that is certainly new
    generation = 0 if old is None else old.generation + 1
    if old is not None and claim is not None:
        refused = claim.refusal(old)
        if refused:
            raise OtherModelError(f"in {storage} {refused}")
        if notice := claim.notice(old):
            logger.warning("unickpt: in %s %s", storage, notice)
    if is_url(storage.where()):
        with contextlib.suppress(UnickptError):
            if {RankFiles(0, generation).data, RankFiles(1, generation).data} & set(storage.names(DATA_FOLDER)):
                return time.time_ns()
    return generation


def check_structure(storage: Storage, claim: Claim, structure: str) -> None:
    """Raise OtherModelError if a checkpoint of another model lies under this tag. ``structure``: as in ``Origin``."""
    refused = ""
    with contextlib.suppress(UnickptError, OSError):
        refused = claim.structure_refusal(read_manifest(storage), structure)
    if refused:
        raise OtherModelError(f"in {storage} {refused}")


def _structure(index: Index, excluded: Sequence[str]) -> str:
    """Return a digest of names and shapes of the parameters; '' if some are left out: the rest does not tell the model."""
    if excluded:
        return ""
    found = sorted((info.name, info.shape) for info in index.tensors if info.kind == "parameter")
    return digest(repr(found).encode())


@dataclass(frozen=True, slots=True)
class CommittedCheckpoint:
    """A committed checkpoint.

    Attributes:
        size_bytes: size of all files except the manifest.
        at_risk: why the checkpoint may not survive a crash of the machine; '' if the storage reported that it does.
    """

    size_bytes: int
    at_risk: str


def commit(
    storage: Storage,
    files: list[FileRecord],
    part: Prepared,
    generation: int,
    *,
    proceed: Callable[[], None] | None = None,
    claim: Claim | None = None,
) -> CommittedCheckpoint:
    """Merge the rows of all ranks, check that the tensors are complete, and write index and manifest.

    Args:
        files: data files of all ranks, in rank order.
        part: part of the coordinator.
        proceed: called directly before the manifest is written; raises to prevent the commit.

    Raises:
        OtherModelError: the directory has the checkpoint of another model. Nothing is committed.
        CoverageError: the fragments have holes or overlap. Nothing is committed.
        StorageError: the coordinator cannot see the file of a rank, or the storage fails. Nothing is committed.
        UncertainCommitError: the storage failed, and it is unknown whether the manifest was written.
    """
    merged = rank_rows.merge(read_rows(storage, files, generation))
    check_coverage(merged)
    writer = part.writer
    if claim is not None:
        structure = _structure(merged, part.excluded)
        check_structure(storage, claim, structure)
        writer = replace(writer, origin={**writer.origin, "structure": structure})
    table = index_codec.to_bytes(merged)
    record = index_record(table, generation)
    manifest = Manifest(
        step=part.step,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        writer=writer,
        files=(*files, record),
        index=record.path,
        optimizer=part.optimizer,
        aliases=part.aliases,
        excluded=part.excluded,
        objects=part.objects,
        generation=generation,
        notes=part.notes,
        witness=part.witness,
    )
    at_risk = publish(storage, manifest, table, proceed=proceed)
    return CommittedCheckpoint(sum(record.size_bytes for record in manifest.files), at_risk)


def index_record(table: bytes, generation: int) -> FileRecord:
    """Return the manifest's record of an index file."""
    header_bytes = 8 + int.from_bytes(table[:8], "little")
    return FileRecord(index_name(generation), len(table), digest(table), header_bytes, digest(table[:header_bytes]))


def with_generation(manifest: Manifest, table: bytes, generation: int, *, where: str) -> tuple[Manifest, bytes]:
    """Return manifest and bytes of the index file of a checkpoint with the file names of another generation.

    The unchanged data files get the names of ``RankFiles(rank, generation)``. ``where``: name of the index in messages.
    """
    if generation == manifest.generation:
        return manifest, table
    data = [record for record in manifest.files if record.path != manifest.index]
    names = {record.path: RankFiles(rank, generation).data for rank, record in enumerate(data)}
    index = index_codec.from_bytes(table, where=where)
    table = index_codec.to_bytes(replace(index, files=tuple(names[path] for path in index.files)))
    record = index_record(table, generation)
    files = (*(replace(old, path=names[old.path]) for old in data), record)
    return replace(manifest, files=files, index=record.path, generation=generation), table


def publish(storage: Storage, manifest: Manifest, table: bytes, *, proceed: Callable[[], None] | None = None) -> str:
    """Write the index and then the manifest, which commits the checkpoint. Remove the replaced generation.

    Returns:
        Why the checkpoint may not survive a crash of the machine; '' if the storage reported that it does.

    Raises:
        StorageError: the checkpoint is not committed.
        UncertainCommitError: it is unknown whether the checkpoint is committed.
    """
    with storage.create(manifest.index) as sink:
        sink.write([memoryview(table)])
    try:
        if proceed is not None:
            proceed()
        at_risk = _put_in_place(storage, manifest_module.to_bytes(manifest))
    except UncertainCommitError:
        raise
    except Exception:
        storage.delete(manifest.index)
        raise
    except BaseException:  # Ctrl-C
        if not is_committed(storage, manifest.generation):
            storage.delete(manifest.index)
        raise
    if not at_risk:
        try:
            _clean(storage, keep={record.path for record in manifest.files})
        except (UnickptError, OSError):  # the checkpoint is committed; remaining old files only take space
            pass
        except Exception as err:  # such as of a signal handler of the program
            logger.warning(
                "unickpt: %s is saved, but the step after the commit failed (%s: %s)", storage, type(err).__name__, err
            )
    return at_risk


def is_committed(storage: Storage, generation: int) -> bool:
    """Return whether the manifest of a save is in place, or may be: the storage cannot tell."""
    try:
        return read_manifest(storage).generation == generation
    except NotACheckpointError:
        return False
    except (UnickptError, OSError):
        return True


def _put_in_place(storage: Storage, data: bytes) -> str:
    """Write the manifest. Return '' if it is durable, and otherwise why the old one may reappear after a crash of the machine.

    Raises:
        UncertainCommitError: it is unknown whether the manifest was written.
        Exception: the manifest was not written. From the storage, or from a signal handler of the program.
    """
    try:
        storage.write_atomic(MANIFEST_FILE, data)
    except Exception as err:
        if not _was_written(storage, data, err):
            raise
        logger.warning("unickpt: %s is committed, but may not survive a crash of the machine: %s", storage, err)
        return str(err) or type(err).__name__
    return ""


def _was_written(storage: Storage, data: bytes, failure: Exception) -> bool:
    """Return whether the manifest exists although writing it failed: a store may execute a request and lose the reply.

    Raises:
        UncertainCommitError: the storage cannot be read.
    """
    try:
        return storage.size_bytes(MANIFEST_FILE) == len(data) and storage.read(MANIFEST_FILE, 0, len(data)) == data
    except (UnickptError, OSError) as err:
        raise UncertainCommitError(
            f"{failure}; it is unknown whether the manifest was written ({err}), so the files of this save are kept"
        ) from failure


def remove_rank_files(storage: Storage, names: RankFiles) -> None:
    """Remove the files of one rank of an uncommitted save, and the folders if they are empty then."""
    storage.delete(names.data)
    storage.delete(names.rows)
    remove_empty_folders(storage)


def remove_uncommitted_files(storage: Storage, generation: int) -> None:
    """Remove the files of all ranks of a save that cannot be committed any more. The coordinator calls this."""
    storage.delete(index_name(generation))
    own = re.compile(r"rank\d+" + (re.escape(f".{generation}") if generation else "") + r"\.safetensors")
    with contextlib.suppress(UnickptError, OSError):
        for name in [*storage.names(DATA_FOLDER), *storage.names(ROWS_FOLDER)]:
            if own.fullmatch(name.rpartition("/")[2]):
                storage.delete(name)
    remove_empty_folders(storage)


def remove_empty_folders(storage: Storage) -> None:
    """Remove the empty folders of a checkpoint."""
    for folder in (DATA_FOLDER, ROWS_FOLDER, ""):
        storage.delete_if_empty(folder)


def read_rows(storage: Storage, files: Sequence[FileRecord], generation: int) -> Iterator[tuple[str, bytes]]:
    """Yield path of the data file and rows of every rank, in rank order.

    Files are read one by one while that takes little time, as on a local disk, where threads would only wait for each other.
    On storage with latency several are read at a time.

    Raises:
        StorageError: the file of a rank is not visible from this host, or the storage fails.
    """

    def one(rank: int) -> bytes:
        return _rows_of(storage, files[rank], RankFiles(rank, generation))

    rank = slow = 0
    while rank < len(files) and slow < 2:  # a single delay has other causes
        begin = time.perf_counter()
        data = one(rank)
        slow = slow + 1 if time.perf_counter() - begin > _SLOW_SECONDS else 0
        yield files[rank].path, data
        rank += 1
    rest = range(rank, len(files))
    if not rest:
        return
    with ThreadPoolExecutor(_READERS, "unickpt-rows") as pool:
        try:
            found: Iterable[bytes] = pool.map(one, rest)
        except RuntimeError:  # the interpreter is shutting down and starts no threads, but this save has to finish
            found = map(one, rest)
        yield from zip((files[rank].path for rank in rest), found, strict=True)


def _rows_of(storage: Storage, record: FileRecord, names: RankFiles) -> bytes:
    size = storage.size_bytes(record.path)
    if size != record.size_bytes:
        found = "does not exist" if size is None else f"has {size:,} bytes"
        raise StorageError(
            f"{storage.where(record.path)}: rank {names.rank} wrote {record.size_bytes:,} bytes, but on the host of the "
            f"coordinator the file {found}. Put the checkpoint directory on storage that all hosts share."
        )
    return storage.read(names.rows, 0, storage.size_bytes(names.rows) or 0)


def _clean(storage: Storage, keep: set[str]) -> None:
    """Remove the rows and the files of the replaced generation."""
    storage.delete_folder(ROWS_FOLDER)
    for name in storage.names(DATA_FOLDER):
        if name not in keep:
            storage.delete(name)
    for name in fnmatch.filter(storage.names(), "index*.safetensors"):
        if name not in keep:
            storage.delete(name)
