"""Small checkpoints without a framework, and functions that tamper with them.

The tampering functions implement ``docs/reference/format.md`` independently: they share no code with the package, so they
also check the description of the format.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.format import rank_rows as rows_module
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.index import FragmentRow, Index, TensorInfo
from unickpt.checkpoint.format.manifest import OptimizerRecord, ParameterGroup, Writer
from unickpt.checkpoint.format.witnessed import Passed
from unickpt.checkpoint.save.commit import commit
from unickpt.checkpoint.save.data_file import write_rank
from unickpt.checkpoint.save.requests import SaveRequest
from unickpt.checkpoint.save.saver import Saver
from unickpt.checkpoint.save.shards import Contribution, Shard, prepare, shards_of_flat_range
from unickpt.checkpoint.storage.posix import PosixStorage

WRITER = Writer("handmade", "1.2.3", "0.1.0", torch.__version__, "huggingface", {"world_size": 2, "zero_stage": 1})

LAYER_SHAPE = (4, 6)
MASTER = TensorInfo("layer.weight", "master", "F32", LAYER_SHAPE, "parameter")
MOMENT = TensorInfo("layer.weight", "exp_avg", "F32", LAYER_SHAPE, "optimizer")
WEIGHT = TensorInfo("layer.weight", "weight", "BF16", LAYER_SHAPE, "parameter", derived_from="master")
EMBED = TensorInfo("embed.weight", "weight", "F16", (8, 3), "parameter")
COUNT = TensorInfo("norm.count", "weight", "I64", (), "buffer")
EMPTY = TensorInfo("empty.weight", "weight", "F32", (0, 4), "parameter")

OBJECTS = {
    "client_state": {"hello": (1, 2), "scale": float("inf"), 7: "seven"},
    "history": torch.arange(5, dtype=torch.float64),
    "unknown": ipaddress.IPv4Address("127.0.0.1"),
}


def master() -> torch.Tensor:
    """Return the elements of MASTER; some of them are not exact in bfloat16."""
    return torch.arange(24, dtype=torch.float32).reshape(LAYER_SHAPE) / 7


def moment() -> torch.Tensor:
    """Return the elements of MOMENT."""
    return -torch.arange(24, dtype=torch.float32).reshape(LAYER_SHAPE)


def weight() -> torch.Tensor:
    """Return the elements of WEIGHT: the cast of the master, except for the last row, which differs."""
    values = master().to(torch.bfloat16)
    values[3] = torch.arange(6, dtype=torch.bfloat16)
    return values


def embed() -> torch.Tensor:
    """Return the elements of EMBED."""
    return torch.arange(24, dtype=torch.float16).reshape(8, 3)


def contribution(
    rank: int = 0,
    world: int = 1,
    *,
    step: int = 3,
    extra: list[Shard] | None = None,
    listed: list[TensorInfo] | None = None,
    witness: Passed | None = None,
) -> Contribution:
    """Return the part of a rank: flat ranges of masters and moments, rows of the frozen embedding, the rest on rank 0."""
    lo, hi = 24 * rank // world, 24 * (rank + 1) // world
    shards = shards_of_flat_range(MASTER, lo, hi, master().reshape(-1)[lo:hi])
    shards += shards_of_flat_range(MOMENT, lo, hi, moment().reshape(-1)[lo:hi])
    first, last = 8 * rank // world, 8 * (rank + 1) // world
    shards.append(Shard(EMBED, Box((first, 0), (last - first, 3)), embed()[first:last]))
    if rank == 0:
        shards.append(Shard(COUNT, Box((), ()), torch.tensor(42)))
    if rank == world - 1:
        shards.append(Shard(WEIGHT, Box((3, 0), (1, 6)), weight()[3]))
    return Contribution(
        shards=[*shards, *(extra or [])],
        tensors=[MASTER, MOMENT, WEIGHT, EMBED, COUNT, EMPTY, *(listed or [])],
        rank_objects={"rng": {"torch": torch.arange(16, dtype=torch.uint8), "words": [rank, 2]}},
        step=step,
        writer=WRITER,
        optimizer=OptimizerRecord(
            "AdamW",
            (ParameterGroup({"lr": 0.001, "betas": {"$tuple": [0.9, 0.999]}}, ("layer.weight",)),),
            (ParameterGroup({"step": 3.0}, ("layer.weight",)),),
        ),
        aliases={"head.weight": "embed.weight"},
        excluded=("frozen.weight",),
        objects=OBJECTS,
        witness=witness,
    )


def save_single(save_dir: Path, tag: str = "global_step3", **options: Any) -> Path:
    """Save a checkpoint of one rank through ``Saver``. Return its directory."""
    request = SaveRequest(lambda _: contribution(**options), str(save_dir), tag, save_latest=True)
    result = Saver().save(request, MessageExchange(None, rank=0, world=1, prefix="t")).result
    assert result is not None and result.committed, result  # noqa: PT018
    return save_dir / tag


def save_ranks(directory: Path, world: int) -> Path:
    """Write a checkpoint of several ranks sequentially. Return its directory."""
    storage = PosixStorage(directory)
    records = [
        write_rank(
            storage,
            f"data/rank{rank:05d}.safetensors",
            f"rows/rank{rank:05d}.safetensors",
            prepare(contribution(rank, world), rank),
            rank,
        )
        for rank in range(world)
    ]
    commit(storage, records, prepare(contribution(0, world), 0), generation=0)
    return directory


# ---------------------------------------------------------------- tampering


def digest(data: bytes) -> str:
    """Return the checksum of a file in the form of the manifest."""
    return "xxh3_128:" + xxhash.xxh3_128_hexdigest(data)


def flip_bit(path: Path, at: int) -> None:
    """Invert one bit of the byte at a position (negative positions count from the end)."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def read_manifest(directory: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((directory / "manifest.json").read_text())
    return body


def write_manifest(directory: Path, body: dict[str, Any]) -> None:
    """Write a manifest with a matching checksum."""
    (directory / "manifest.json").write_bytes(signed_manifest(body))


def signed_manifest(body: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest with a matching checksum."""
    rest = {key: value for key, value in body.items() if key != "checksum"}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**rest, "checksum": digest(canonical)}).encode()


def edit_manifest(directory: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest and update its checksum."""
    body = read_manifest(directory)
    edit(body)
    write_manifest(directory, body)


def split_safetensors(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return header and data of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join_safetensors(header: dict[str, Any] | bytes, data: bytes) -> bytes:
    """Return a safetensors file with the given header, which may be wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def replace_file(directory: Path, path: str, data: bytes, *, header_bytes: int | None = None) -> None:
    """Replace the bytes of a listed file and update its record in the manifest.

    ``header_bytes``: length of the header in the record. Default: the length in the file.
    """
    (directory / path).write_bytes(data)
    if header_bytes is None:
        header_bytes = min(8 + int.from_bytes(data[:8].ljust(8, b"\0"), "little"), len(data))

    def edit(body: dict[str, Any]) -> None:
        record = next(r for r in body["files"] if r["path"] == path)
        record.update(size_bytes=len(data), checksum=digest(data), header_bytes=header_bytes)
        record["header_checksum"] = digest(data[:header_bytes])

    edit_manifest(directory, edit)


class IndexParts:
    """The parts of an index: columns by name, and files and tensors of its metadata. ``to_bytes`` assembles them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = read_manifest(directory)["index"]
        header, data = split_safetensors((directory / self.path).read_bytes())
        self.metadata: dict[str, str] = header.pop("__metadata__")
        kinds = {"U8": "<u1", "U16": "<u2", "U32": "<u4", "U64": "<u8"}
        self.columns = {
            name: np.frombuffer(data[slice(*slot["data_offsets"])], kinds[slot["dtype"]]).reshape(slot["shape"]).copy()
            for name, slot in header.items()
        }
        self.files: list[Any] = json.loads(self.metadata["files"])
        self.tensors: list[Any] = json.loads(self.metadata["tensors"])

    def add_tensor(self, *entry: Any) -> None:
        """Append a tensor without fragments."""
        self.tensors.append(list(entry))
        for name in {"fragments", "same_boxes"} & set(self.columns):
            self.columns[name] = np.append(self.columns[name], self.columns[name].dtype.type(0))

    def to_bytes(self) -> bytes:
        """Return the bytes of the file, without validation."""
        self.metadata |= {"files": json.dumps(self.files), "tensors": json.dumps(self.tensors)}
        kinds = {"int32": "I32", "int64": "I64", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64"}
        header: dict[str, Any] = {"__metadata__": self.metadata}
        data = b""
        for name, column in sorted(self.columns.items(), key=lambda item: -item[1].itemsize):
            end = len(data) + column.nbytes
            offsets = [len(data), end]
            header[name] = {"dtype": kinds[str(column.dtype)], "shape": list(column.shape), "data_offsets": offsets}
            data += column.tobytes()
        return join_safetensors(header, data)

    def write(self) -> None:
        """Write the index and update the manifest."""
        replace_file(self.directory, self.path, self.to_bytes())


def index_of(rows: Sequence[FragmentRow], *, file: str = "data/x", tensors: Sequence[TensorInfo] = ()) -> Index:
    """Return the index of a single data file."""
    return rows_module.merge([(file, rows_module.to_bytes(rows, tensors))])


def as_record(tensor: TensorInfo) -> list[Any]:
    """Return a tensor as an entry of the table of the index."""
    return [list(value) if isinstance(value, tuple) else value for value in asdict(tensor).values()]
