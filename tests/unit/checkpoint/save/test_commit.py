"""A checkpoint is whole or absent: several writers, failures at every step, kills at any instant."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs.faults.calls import Call, watched
from tests.support.rank_threads import WORLD, on_all_ranks
from tests.support.saves import INFO, assert_holds, part, values
from tests.support.saving import save
from unickpt.base.errors import CoordinationError, UnickptError
from unickpt.checkpoint.coordination.failure import FailureKind
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.verify import verify_checkpoint
from unickpt.checkpoint.save.requests import SaveResult
from unickpt.checkpoint.save.shards import Contribution, shards_of_flat_range


def save_step(folder: Path, step: int, tag: str, change: Callable[[Contribution, int], None] | None = None) -> list[SaveResult]:
    def run(exchange: MessageExchange) -> SaveResult:
        def contribute(_: Any) -> Contribution:
            found = part(step, exchange.rank)
            if change is not None:
                change(found, exchange.rank)
            return found

        return save(contribute, save_dir=str(folder), tag=tag, save_latest=True, exchange=exchange)

    return on_all_ranks(run)


def test_every_rank_writes_its_part_and_the_whole_is_read_back(tmp_path: Path) -> None:
    assert all(result.committed for result in save_step(tmp_path, 1, "a"))
    assert_holds(tmp_path, "a", 1)
    assert (tmp_path / "latest").read_text() == "a"
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["data", "index.safetensors", "manifest.json"]


def test_a_hole_or_an_overlap_is_never_committed(tmp_path: Path) -> None:
    def hole(found: Contribution, rank: int) -> None:
        if rank == 1:
            found.shards.pop()

    def overlap(found: Contribution, rank: int) -> None:
        if rank == 1:
            found.shards += shards_of_flat_range(INFO, 0, 3, values(2)[:3])

    save_step(tmp_path, 1, "a")
    for change, message in ((hole, "fragments cover"), (overlap, "overlap")):
        results = save_step(tmp_path, 2, "a", change)
        assert not any(result.committed for result in results)
        assert all(message in result.failures[0].text for result in results), results
        assert_holds(tmp_path, "a", 1)


def test_the_failure_of_one_rank_is_known_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    def fail(_: Contribution, rank: int) -> None:
        if rank == 2:
            raise RuntimeError("lost my memory")

    save_step(tmp_path, 1, "a")
    for result in save_step(tmp_path, 2, "b", fail):
        assert [(f.kind, f.rank) for f in result.failures] == [(FailureKind.UNEXPECTED, 2)]
        assert result.failures[0].text.startswith("RuntimeError: lost my memory (at test_commit.py:")
    assert not (tmp_path / "b").exists()
    assert (tmp_path / "latest").read_text() == "a"
    assert_holds(tmp_path, "a", 1)


class AfterTheRename:
    """From the moment on at which the manifest is in its place, these calls fail."""

    def __init__(self, *names: str) -> None:
        self.names, self.renamed, self.hits = names, False, 0

    def __call__(self, call: Call) -> None:
        if self.renamed and call.name in self.names:
            self.hits += 1
            raise OSError(5, "Input/output error")
        if call.name == "replace" and call.after and call.path.endswith("manifest.json"):
            self.renamed = True
            if "replace" in self.names:  # it was done, and is reported as failed
                raise OSError(5, "Input/output error")


@pytest.mark.parametrize("names", [["fsync"], ["open"], ["listdir"], ["scandir"], ["stat"], ["unlink", "rmdir"], ["replace"]])
def test_a_failure_after_the_commit_does_not_undo_it(tmp_path: Path, names: list[str]) -> None:
    save_step(tmp_path, 1, "a")
    act = AfterTheRename(*names)
    with watched(tmp_path, act):
        results = save_step(tmp_path, 2, "a")
    assert act.renamed
    for result in results:  # where not even the manifest can be read back, all files stay, and the reason says so
        assert result.committed or "it is unknown whether the manifest was written" in result.failures[0].text
        if names == ["fsync"]:
            assert "may not survive a crash of the machine: " in result.shortfall
            assert "'latest' could not be updated: " in result.shortfall
            assert result.shortfall.count("Input/output error") == 2
    assert_holds(tmp_path, "a", 2)
    assert all(result.committed for result in save_step(tmp_path, 3, "a"))
    assert_holds(tmp_path, "a", 3)
    assert len(list((tmp_path / "a" / "data").iterdir())) == WORLD


def test_a_commit_that_fails_leaves_nothing(tmp_path: Path) -> None:
    save_step(tmp_path, 1, "a")
    before = sorted(p for p in tmp_path.rglob("*") if p.is_file())

    def refuse(call: Call) -> None:
        if call.name == "replace" and call.path.endswith("manifest.json"):
            raise OSError(28, "No space left on device")

    with watched(tmp_path, refuse):
        results = save_step(tmp_path, 2, "a")
    assert all("No space left" in result.failures[0].text for result in results)
    assert sorted(p for p in tmp_path.rglob("*") if p.is_file()) == before
    assert_holds(tmp_path, "a", 1)


def test_text_that_has_no_utf8_does_not_fail_a_save(tmp_path: Path) -> None:
    """A file name that is no UTF-8, somewhere in the job's state, is a string with lone surrogates."""
    odd = os.fsdecode(b"data-\xff.bin")

    def change(found: Contribution, rank: int) -> None:
        found.objects = {"file": odd}
        found.rank_objects = {"file": odd}

    assert all(result.committed for result in save_step(tmp_path, 1, "a", change))
    checkpoint = Checkpoint.open(tmp_path / "a")
    assert checkpoint.objects().value == checkpoint.rank_objects(2).value == {"file": odd}


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    def run(exchange: MessageExchange) -> Any:
        if exchange.rank == 1:
            return None
        return save(lambda _: part(1, exchange.rank), save_dir=str(tmp_path), tag="a", save_latest=True, exchange=exchange)

    found = on_all_ranks(run, timeout_s=1.5)
    assert isinstance(found[0], CoordinationError)
    assert "no message from rank 1" in str(found[0])
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_all_ranks_name_the_missing_rank_and_not_the_coordinator(tmp_path: Path) -> None:
    def run(exchange: MessageExchange) -> None:
        if exchange.rank < 2:
            exchange.agree("layout", None)

    found = on_all_ranks(run, timeout_s=0.5)
    assert found[2] is None
    for error in found[:2]:
        assert isinstance(error, CoordinationError)
        assert "no message from rank 2" in str(error)


def _save_for_ever(folder: Path, said: int) -> None:
    exchange = MessageExchange(None, rank=0, world=1, prefix="t")
    for step in range(1, 10**6):
        tag = "same" if step % 2 else f"step{step % 3}"
        save(lambda _, step=step: part(step, 0, 1), save_dir=str(folder), tag=tag, save_latest=True, exchange=exchange)
        os.write(said, b".")


def test_a_kill_at_any_time_leaves_only_complete_checkpoints(tmp_path: Path) -> None:
    """kill -9 of a process that does nothing but save, under new and old tags."""
    chance = random.Random(7)
    seen = 0
    for _ in range(20):
        heard, said = os.pipe()
        child = os.fork()
        if child == 0:
            _save_for_ever(tmp_path, said)
        os.read(heard, 1)
        begin = time.monotonic()
        os.read(heard, 1)
        time.sleep(chance.uniform(0.0, time.monotonic() - begin))  # somewhere in the next save, however fast this machine is
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(heard)
        os.close(said)
        for directory in (p for p in tmp_path.iterdir() if p.is_dir()):
            if (directory / "manifest.json").exists():
                assert verify_checkpoint(directory).problems == ()
                checkpoint = Checkpoint.open(directory)
                step = checkpoint.manifest.step
                assert torch.equal(checkpoint.read_tensor(*INFO.key).reshape(-1), values(step))
                seen += 1
            else:
                with pytest.raises(UnickptError, match=r"no manifest\.json"):
                    Checkpoint.open(directory)
        latest = tmp_path / "latest"
        if latest.exists():
            assert (tmp_path / latest.read_text() / "manifest.json").exists()
    assert seen >= 20
