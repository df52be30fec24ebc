"""Small saves with known content, and assertions on their results."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.jobs.faults.calls import Call, watched
from tests.jobs.faults.stalling import Stall
from tests.support.rank_threads import WORLD, alone
from unickpt.checkpoint.format.index import TensorInfo
from unickpt.checkpoint.format.manifest import Writer
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.verify import verify_checkpoint
from unickpt.checkpoint.save.requests import SaveOptions, SaveRequest
from unickpt.checkpoint.save.saver import Saver
from unickpt.checkpoint.save.shards import Contribution, Shard, shards_of_flat_range
from unickpt.testing.launch import environment

WRITER = Writer("test", "1", "0", torch.__version__, "none", {"world_size": WORLD})
MIB = 1 << 20
INFO = TensorInfo("layer.weight", "master", "F32", (7, 5), "parameter")


def values(step: int) -> torch.Tensor:
    return torch.arange(INFO.numel, dtype=torch.float32) + 1000 * step


def part(step: int, rank: int, world: int = WORLD) -> Contribution:
    """Return one rank's third of the tensor."""
    lo, hi = (INFO.numel * r // world for r in (rank, rank + 1))
    shards = shards_of_flat_range(INFO, lo, hi, values(step)[lo:hi])
    return Contribution(shards, step, WRITER, tensors=[INFO], rank_objects={"rank": rank}, objects={"step": step})


def assert_holds(folder: Path, tag: str, step: int) -> None:
    """Assert that the checkpoint is valid and has the values of this step."""
    assert verify_checkpoint(folder / tag).problems == ()
    checkpoint = Checkpoint.open(folder / tag)
    assert checkpoint.manifest.step == step
    assert torch.equal(checkpoint.read_tensor(*INFO.key).reshape(-1), values(step))
    assert checkpoint.objects().value == {"step": step}
    assert [checkpoint.rank_objects(rank).value for rank in range(WORLD)] == [{"rank": rank} for rank in range(WORLD)]


def background() -> Saver:
    """Return a saver with asynchronous saves."""
    return Saver(SaveOptions(asynchronous=True))


@contextlib.contextmanager
def stalled(folder: Path) -> Iterator[Stall]:
    """Blocks writes below a folder, except by the training thread, until the gate is opened."""
    stall = Stall("pwrite")
    with watched(folder, stall, ("pwrite",)):
        yield stall


def large(count: int = 8, mib: int = 1) -> list[Shard]:
    """Return float32 tensors of ``mib`` MiB each, with increasing values."""
    return numbered(count, mib * MIB // 4)


def numbered(count: int, elements: int) -> list[Shard]:
    """Return float32 tensors, each with its number as the value of all elements."""
    infos = [TensorInfo(f"t{at}", "master", "F32", (elements,), "parameter") for at in range(count)]
    return [s for at, i in enumerate(infos) for s in shards_of_flat_range(i, 0, i.numel, torch.full(i.shape, float(at)))]


def request(folder: Path | str, tag: str, shards: list[Shard], **more: Any) -> SaveRequest:
    writer = type(WRITER)("test", "1", "0", torch.__version__, "none", {"world_size": 1})
    return SaveRequest(lambda _: Contribution(shards, 3, writer, rank_objects={"r": 1}), str(folder), tag, True, **more)


def assert_counts(directory: Path | str, count: int = 8) -> None:
    assert verify_checkpoint(directory).problems == ()
    checkpoint = Checkpoint.open(directory)
    for at in range(count):
        assert set(checkpoint.read_tensor(f"t{at}", "master").tolist()) == {float(at)}


def saved(folder: Path, *tags: str) -> None:
    """Save checkpoints of steps 1, 2, ..."""
    for step, tag in enumerate(tags, 1):
        wanted = request(folder, tag, large(1))
        part = wanted.contribute({})
        part.step = step
        wanted.contribute = lambda _, part=part: part
        assert Saver(SaveOptions(asynchronous=False)).save(wanted, alone()).committed


class Broken:
    """Makes writes of data fail while ``on``."""

    def __init__(self) -> None:
        self.on = True

    def __call__(self, call: Call) -> None:
        if self.on and call.name == "pwrite":
            raise OSError(28, "No space left on device")


def files(folder: Path) -> list[str]:
    """Everything below a folder, empty folders included."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def run_alone(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment(), capture_output=True, text=True, timeout=120
    )
