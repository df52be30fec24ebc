"""Saving: every rank writes what it holds, one coordinator commits.

    contribute -> write data + rows -> report -> merge -> index -> manifest -> latest

Until the manifest is renamed into place the checkpoint does not exist; afterwards it is whole.
Data is never gathered: the coordinator sees only the other ranks' fragment tables. The steps are
separate functions, so that they can run behind training later without changing the format.
"""

from __future__ import annotations

import datetime
import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from unickpt import index as index_module
from unickpt import manifest as manifest_module
from unickpt import objects
from unickpt.checksums import RunningDigest, digest, fragment_checksum
from unickpt.coordination import Message, Rendezvous
from unickpt.dtypes import itemsize_bytes, name_of
from unickpt.errors import CoverageError, StorageError, UnickptError, UnsupportedLayoutError
from unickpt.fragments import Box, split_flat_range
from unickpt.index import FragmentRow, Index, TensorInfo
from unickpt.loading import SHARED_PREFIX, SHARED_TENSORS_PREFIX
from unickpt.manifest import MANIFEST_FILE, FileRecord, Manifest, OptimizerRecord, Writer
from unickpt.safetensors_io import build_header
from unickpt.storage import PosixStorage

logger = logging.getLogger("unickpt")

DATA_FOLDER = "data"
ROWS_FOLDER = "rows"
LATEST_FILE = "latest"


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a global tensor and its elements on this rank.

    ``data`` holds ``box.numel`` elements whose row-major order is the box's; any device, any strides.
    """

    tensor: TensorInfo
    box: Box
    data: torch.Tensor


def shards_of_flat_range(tensor: TensorInfo, lo: int, hi: int, data: torch.Tensor) -> list[Shard]:
    """Shards for the flat range ``[lo, hi)`` of a tensor, from its ``hi - lo`` elements in a 1-D tensor."""
    shards = []
    at = 0
    for box in split_flat_range(tensor.shape, lo, hi):
        shards.append(Shard(tensor, box, data.narrow(0, at, box.numel)))
        at += box.numel
    return shards


@dataclass
class Contribution:
    """What one rank brings to a checkpoint.

    Attributes:
        shards: what this rank writes; together the ranks cover every stored tensor exactly once.
        tensors: tensors to list although this rank has no fragment of them (derived, empty).
        rank_objects: non-tensor state of this rank alone (such as RNG).
        shared_objects: non-tensor state that any rank may ask for by its name; one rank brings each.
        optimizer_part: groups and scalars of parameters that the coordinator does not hold (other
            pipeline stages, other experts); merged into ``optimizer``.
        step, writer, optimizer, aliases, excluded, objects: of the job; the coordinator's count.
    """

    shards: list[Shard]
    step: int
    writer: Writer
    tensors: list[TensorInfo] = field(default_factory=list)
    rank_objects: dict[str, Any] = field(default_factory=dict)
    shared_objects: dict[str, Any] = field(default_factory=dict)
    optimizer_part: OptimizerRecord | None = None
    optimizer: OptimizerRecord | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    objects: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SaveResult:
    """How a save ended, the same on every rank.

    Attributes:
        committed: the checkpoint exists.
        unsupported: reason why the layout cannot be described, if that is why there is none.
        failures: rank -> reason, if that is why there is none.
        size_bytes: bytes of all files (0 unless committed).
        seconds: wall time on this rank.
    """

    committed: bool
    unsupported: str = ""
    failures: dict[int, str] = field(default_factory=dict)
    size_bytes: int = 0
    seconds: float = 0.0


def save(
    contribute: Callable[[Message], Contribution],
    *,
    save_dir: str,
    tag: str,
    save_latest: bool,
    meet: Rendezvous,
    announce: Message | None = None,
    on_commit: Callable[[], None] | None = None,
) -> SaveResult:
    """Save one checkpoint. Every rank calls this; nothing that goes wrong on one is raised.

    Args:
        contribute: gives this rank's part; receives the coordinator's announcement.
        save_dir, tag: the checkpoint is ``<save_dir>/<tag>``.
        save_latest: whether ``<save_dir>/latest`` shall name it.
        meet: message exchange of the job's ranks.
        announce: on the coordinator, a message that all ranks receive before they contribute.
        on_commit: on the coordinator, called when the checkpoint exists and before any rank returns.

    Returns:
        The outcome, agreed by all ranks. If it is not committed, this save's files are removed and
        what was committed before, under this tag or another, is untouched.

    Raises:
        CoordinationError: a rank did not arrive in time.
    """
    begin = time.monotonic()
    storage = PosixStorage(f"{save_dir}/{tag}")
    opening = meet.broadcast("save", _opening(storage, announce) if meet.rank == 0 else None)
    generation = opening["generation"]
    names = _Names(meet.rank, generation)
    contribution, message = _try_write(storage, names, contribute, opening["announce"], meet)
    messages = meet.gather("written", message)
    conclusion = None
    if messages is not None:
        conclusion = _conclude(storage, messages, contribution, save_dir, tag, save_latest, generation)
        if conclusion["committed"] and on_commit is not None:
            _notify(on_commit, storage)
    verdict = meet.broadcast("verdict", conclusion, notice=False)
    if not verdict["committed"]:
        storage.delete(names.data)
        storage.delete(names.rows)
    return SaveResult(
        committed=verdict["committed"],
        unsupported=verdict["unsupported"],
        failures={int(rank): reason for rank, reason in verdict["failures"].items()},
        size_bytes=verdict["size_bytes"],
        seconds=time.monotonic() - begin,
    )


def _notify(on_commit: Callable[[], None], storage: PosixStorage) -> None:
    try:
        on_commit()
    except Exception as err:  # the checkpoint is there, whatever was to be told about it
        logger.warning("unickpt: %s is saved, but what should follow failed (%s: %s)", storage, type(err).__name__, err)


@dataclass(frozen=True, slots=True)
class _Names:
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


def _opening(storage: PosixStorage, announce: Message | None) -> Message:
    """The next generation under this tag: files of a checkpoint that is already there are left alone."""
    generation = 0
    try:
        if storage.size_bytes(MANIFEST_FILE) is not None:
            old = storage.root / MANIFEST_FILE
            generation = manifest_module.from_bytes(old.read_bytes(), where=str(old)).generation + 1
    except (UnickptError, OSError):
        generation = time.time_ns()  # an unreadable manifest: take a number that nothing can have used
    return {"generation": generation, "announce": announce or {}}


def _try_write(
    storage: PosixStorage, names: _Names, contribute: Callable[[Message], Contribution], announce: Message, meet: Rendezvous
) -> tuple[Contribution | None, Message]:
    try:
        contribution = contribute(announce)
        record = write_rank(storage, names.data, names.rows, contribution, meet.rank)
        message: Message = {"outcome": "written", "file": asdict(record)}
        if meet.rank and contribution.optimizer_part is not None:
            message["optimizer"] = asdict(contribution.optimizer_part)
        return contribution, message
    except UnsupportedLayoutError as err:
        return None, {"outcome": "unsupported", "reason": str(err)}
    except Exception as err:
        if not isinstance(err, StorageError):
            logger.exception("unickpt: rank %d could not write its part of %s", meet.rank, storage)
        return None, {"outcome": "failed", "reason": f"{type(err).__name__}: {err}"}


def write_rank(storage: PosixStorage, data_name: str, rows_name: str, contribution: Contribution, rank: int) -> FileRecord:
    """Write one rank's data file and, beside it, its rows of the index."""
    shards = list(contribution.shards)
    if contribution.rank_objects:
        shards += _object_shards(contribution.rank_objects, f"objects/rank{rank:05d}", f"objects/rank{rank:05d}")
    for name, value in contribution.shared_objects.items():
        shards += _object_shards(value, f"{SHARED_PREFIX}{name}", f"{SHARED_TENSORS_PREFIX}{name}")
    if rank == 0:
        shards += _tensor_shards(_encode_objects(contribution.objects).tensors)
    shards.sort(key=lambda shard: -itemsize_bytes(shard.tensor.dtype))  # keeps every fragment aligned to its item size
    head, header = build_header(
        ((fragment_key(s.tensor, s.box), s.tensor.dtype, s.box.shape) for s in shards),
        {"format": "unickpt-data", "rank": str(rank), "step": str(contribution.step)},
    )
    rows: list[FragmentRow] = []
    whole = RunningDigest()
    with storage.create(data_name) as sink:
        whole.update(head)
        sink.write(memoryview(head))
        for shard, slot in zip(shards, header.slots, strict=True):
            data = host_bytes(shard.data)
            if len(data) != slot.end_byte - slot.begin_byte:
                raise CoverageError(f"{slot.name}: {len(data)} bytes where its box has {slot.end_byte - slot.begin_byte}")
            whole.update(data)
            rows.append(FragmentRow(shard.tensor, shard.box, header.header_bytes + slot.begin_byte, fragment_checksum(data)))
            sink.write(data)
    part = index_module.build(rows, file=data_name, tensors=contribution.tensors)
    with storage.create(rows_name) as sink:
        sink.write(memoryview(index_module.to_bytes(part)))
    size = header.header_bytes + (header.slots[-1].end_byte if header.slots else 0)
    return FileRecord(data_name, size, whole.value(), header.header_bytes, digest(head))


def host_bytes(data: torch.Tensor) -> memoryview:
    """The elements' bytes in row-major order; a view of the tensor where it is dense and on the CPU."""
    dense = data.detach().reshape(-1).to("cpu").contiguous()
    return memoryview(dense.view(torch.uint8).numpy().data) if dense.numel() else memoryview(b"")


def fragment_key(tensor: TensorInfo, box: Box) -> str:
    """The key of a fragment in its data file: ``name:state``, with its box unless it is all of the tensor."""
    key = f"{tensor.name}:{tensor.state}"
    return key if box == Box.whole(tensor.shape) else f"{key}{box}"


def _encode_objects(values: dict[str, Any]) -> objects.Encoded:
    encoded = objects.encode(values, prefix="objects/job")
    if encoded.opaque:
        logger.warning("unickpt: stored as opaque blobs, which only load with allow_pickle: %s", "; ".join(encoded.opaque[:8]))
    return encoded


def _object_shards(value: Any, key: str, prefix: str) -> list[Shard]:
    """An object outside the manifest: its JSON as a tensor of bytes, and the tensors that were in it."""
    encoded = objects.encode(value, prefix=prefix)
    text = bytearray(json.dumps(encoded.value).encode())
    return _tensor_shards({key: torch.frombuffer(text, dtype=torch.uint8), **encoded.tensors})


def _tensor_shards(tensors: dict[str, torch.Tensor]) -> list[Shard]:
    shards = []
    for key, tensor in tensors.items():
        info = TensorInfo(key, "object", name_of(tensor.dtype), tuple(tensor.shape), "object")
        shards += shards_of_flat_range(info, 0, info.numel, tensor.reshape(-1))
    return shards


def _conclude(
    storage: PosixStorage,
    messages: list[Message],
    contribution: Contribution | None,
    save_dir: str,
    tag: str,
    save_latest: bool,
    generation: int,
) -> Message:
    """On the coordinator: commit if every rank has written, otherwise say why not."""
    verdict: Message = {"committed": False, "unsupported": "", "failures": {}, "size_bytes": 0}
    for rank, message in enumerate(messages):
        if message["outcome"] == "unsupported":
            verdict["unsupported"] = message["reason"]
        elif message["outcome"] == "failed":
            verdict["failures"][str(rank)] = message["reason"]
    if verdict["unsupported"] or verdict["failures"] or contribution is None:
        return verdict
    try:
        files = [FileRecord(**message["file"]) for message in messages]
        parts = [manifest_module.optimizer_from_json(m["optimizer"]) for m in messages if m.get("optimizer")]
        contribution.optimizer = manifest_module.merge_optimizers(contribution.optimizer, parts)
        verdict["size_bytes"] = commit(storage, files, contribution, generation)
        verdict["committed"] = True
    except Exception as err:
        logger.exception("unickpt: the coordinator could not commit %s", storage)
        verdict["failures"]["0"] = f"{type(err).__name__}: {err}"
        return verdict
    if save_latest:
        try:
            PosixStorage(save_dir).write_atomic(LATEST_FILE, tag.encode())
        except StorageError as err:
            logger.warning("unickpt: %s/%s is saved, but 'latest' could not be updated: %s", save_dir, tag, err)
    return verdict


def commit(storage: PosixStorage, files: list[FileRecord], contribution: Contribution, generation: int) -> int:
    """Merge the ranks' rows, check that they make whole tensors, and write index and manifest.

    Returns:
        Bytes of all files of the checkpoint but the manifest.

    Raises:
        CoverageError: the ranks' fragments have holes or overlap; nothing is committed.
        StorageError: a rank's file cannot be seen from here, or the storage fails.
    """
    parts = [_read_rows(storage, record, _Names(rank, generation)) for rank, record in enumerate(files)]
    merged = index_module.merge(parts)
    index_module.check_coverage(merged)
    table = index_module.to_bytes(merged)
    name = index_name(generation)
    with storage.create(name) as sink:
        sink.write(memoryview(table))
    header_bytes = 8 + int.from_bytes(table[:8], "little")
    files = [*files, FileRecord(name, len(table), digest(table), header_bytes, digest(table[:header_bytes]))]
    manifest = Manifest(
        step=contribution.step,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        writer=contribution.writer,
        files=tuple(files),
        index=name,
        optimizer=contribution.optimizer,
        aliases=contribution.aliases,
        excluded=contribution.excluded,
        objects=_encode_objects(contribution.objects).value,
        generation=generation,
    )
    storage.write_atomic(MANIFEST_FILE, manifest_module.to_bytes(manifest))
    _clean(storage, keep={record.path for record in files})
    return sum(record.size_bytes for record in files)


def _read_rows(storage: PosixStorage, record: FileRecord, names: _Names) -> Index:
    size = storage.size_bytes(record.path)
    if size != record.size_bytes:
        found = "is not there" if size is None else f"has {size:,} bytes"
        raise StorageError(
            f"{storage.root / record.path}: rank {names.rank} wrote {record.size_bytes:,} bytes, but seen from the "
            f"coordinator the file {found}. The checkpoint directory has to be on storage that all hosts share."
        )
    rows = storage.root / names.rows
    return index_module.from_bytes(storage.read(names.rows, 0, storage.size_bytes(names.rows) or 0), where=str(rows))


def _clean(storage: PosixStorage, keep: set[str]) -> None:
    """Remove the rows, and the files of the generation that this one replaced."""
    storage.delete_folder(ROWS_FOLDER)
    for name in storage.names(DATA_FOLDER):
        if name not in keep:
            storage.delete(name)
    for path in storage.root.glob("index*.safetensors"):
        if path.name not in keep:
            storage.delete(path.name)
