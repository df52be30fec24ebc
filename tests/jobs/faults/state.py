"""A training state that is a function of (job, step, tensor, element), and the judge of what a job resumes from.

Whatever is resumed must hold exactly its own step's bits: any mixture of two saves is seen.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from unickpt.base.errors import UnickptError
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import Writer
from unickpt.checkpoint.load.candidates import Candidates
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.failure import DAMAGE, failure_of
from unickpt.checkpoint.save.shards import Contribution, Shard, shards_of_flat_range

JOBS = 1_000_000  # steps of job j begin at j * JOBS

_KINDS = {"F32": (torch.float32, np.uint32), "BF16": (torch.bfloat16, np.uint16), "I64": (torch.int64, np.uint64)}


def tensors(rows: int) -> list[TensorInfo]:
    """What a job holds: some ``66 * rows`` bytes."""
    return [
        TensorInfo("layer.weight", "master", "F32", (rows, 7), "parameter"),
        TensorInfo("layer.weight", "exp_avg", "F32", (rows, 7), "optimizer"),
        TensorInfo("layer.weight", "weight", "BF16", (rows, 7), "parameter", derived_from="master"),
        TensorInfo("seen", "weight", "I64", (rows,), "buffer"),
        TensorInfo("scale", "weight", "BF16", (), "parameter"),
    ]


def values(step: int, number: int, info: TensorInfo, lo: int, hi: int) -> torch.Tensor:
    """Elements ``[lo, hi)`` of a tensor at a step: splitmix64 of all of it, cut to the type's bits."""
    kind, bits = _KINDS[info.dtype]
    x = np.arange(lo, hi, dtype=np.uint64) + np.uint64((step * 1_000_003 + number * 7919) << 20)
    x += np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    signed = {2: np.int16, 4: np.int32, 8: np.int64}[bits().itemsize]
    return torch.from_numpy(x.astype(bits).view(signed)).view(kind)


def contribution(step: int, rank: int, world: int, rows: int) -> Contribution:
    """One rank's share of every stored tensor."""
    infos = tensors(rows)
    shards: list[Shard] = []
    for number, info in enumerate(infos):
        lo, hi = (info.numel * r // world for r in (rank, rank + 1))
        if info.derived_from is None and lo < hi:
            shards += shards_of_flat_range(info, lo, hi, values(step, number, info, lo, hi))
    writer = Writer("faults", "1", "0", torch.__version__, "none", {"world_size": world})
    return Contribution(
        shards, step, writer, tensors=infos, rank_objects={"rank": rank, "step": step}, objects={"step": step, "rows": rows}
    )


@dataclass(frozen=True)
class Resumed:
    """What a job resumed from.

    Attributes:
        tag, step: of the checkpoint; None if there is none.
        skipped: what was tried before, and why it could not be used.
        wrong: in what it differs from what that step's save was given. Must be empty.
    """

    tag: str | None
    step: int | None
    skipped: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()


def resume(folder: Path) -> Resumed:
    """Choose and fall back as the adapters do, read everything, and judge it."""
    candidates = Candidates(folder)
    skipped: list[str] = []
    while True:
        choice = candidates.next()
        skipped += choice.notes
        if choice.tag is None:
            return Resumed(None, None, tuple(skipped))
        try:
            step, wrong = read(folder / choice.tag)
        except UnickptError as err:
            if failure_of(err, rank=0, where=str(folder)).kind not in DAMAGE:
                raise
            skipped.append(f"{choice.tag}: {type(err).__name__}: {err}")
            continue
        return Resumed(choice.tag, step, tuple(skipped), tuple(wrong))


def read(directory: Path) -> tuple[int, list[str]]:
    """Step of a checkpoint, and what in it is not that step's. Raises ``UnickptError`` if it is damaged."""
    return judged(Checkpoint.open(directory))


def judged(checkpoint: Checkpoint) -> tuple[int, list[str]]:
    """As ``read``, of an opened checkpoint."""
    step = checkpoint.manifest.step
    objects = checkpoint.objects().value
    wrong = []
    if objects["step"] != step:
        wrong.append(f"objects are of step {objects['step']}")
    infos = tensors(objects["rows"])
    if sorted(i.key for i in infos) != sorted(i.key for i in checkpoint.index.tensors if i.kind != "object"):
        wrong.append("other tensors")
    for number, info in enumerate(infos):
        expected = values(step, number, info, 0, info.numel)
        if info.derived_from is not None:
            expected = values(step, 0, infos[0], 0, info.numel).to(expected.dtype)
        found = checkpoint.read_tensor(info.name, info.state).reshape(-1)
        if found.dtype != expected.dtype or not torch.equal(found.view(torch.uint8), expected.view(torch.uint8)):
            wrong.append(f"{info.name} ({info.state})")
    for rank in range(checkpoint.manifest.writer.topology["world_size"]):
        if checkpoint.rank_objects(rank).value != {"rank": rank, "step": step}:
            wrong.append(f"objects of rank {rank}")
    return step, wrong


def files(folder: Path) -> dict[str, int]:
    """Sizes of all files below a folder."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            found[str(path.relative_to(folder))] = path.stat().st_size
    return found


def copied(source: Path, target: Path) -> Path:
    """A fresh copy in the place of whatever was there."""
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))
