"""Generations in the memory of hosts: ranks are threads, a host is a folder with a keeper process of its own."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.memory_jobs import HOSTS, Job, request
from tests.support.saves import INFO, values
from unickpt.base.errors import CorruptCheckpointError, StorageError
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.verify import verify_checkpoint
from unickpt.checkpoint.memory import saver
from unickpt.checkpoint.memory.generations import Inventory, folder_of
from unickpt.checkpoint.memory.keeper_process import KeeperProcess
from unickpt.checkpoint.memory.tier import MemoryLoad, MemoryTier, choose
from unickpt.checkpoint.save import task
from unickpt.checkpoint.save.requests import PendingSave
from unickpt.checkpoint.save.task import SaveTask


def data_of(inventory: Inventory) -> list[list[str]]:
    return [
        [name[len("data/rank0000") : -len(".safetensors")] for name in sorted(files) if name.startswith("data/")]
        for _, files in sorted(inventory.files.items())
    ]


def test_two_generations_stay_and_every_file_has_a_copy(job: Callable[..., Job]) -> None:
    running = job()
    running.save(1, 2, 3)
    for host in (0, 1):
        assert data_of(running.inventory(host)) == [["0", "1", "2"]] * 2
        assert all("manifest.json" in files for files in running.inventory(host).files.values())


def test_ranks_may_know_the_folder_by_links_to_one_place(job: Callable[..., Job], tmp_path: Path) -> None:
    running = job()
    (tmp_path / "link").symlink_to(tmp_path)

    def one(tier: MemoryTier, exchange: MessageExchange) -> Any:
        folder = tmp_path / "link" if exchange.rank == len(HOSTS) - 1 else tmp_path
        save = tier.save(request(str(folder / "checkpoints"), 1, exchange.rank, len(HOSTS)), exchange)
        assert save is not None
        assert save.wait(30)
        return save.committed, save.cause()

    assert {committed for committed, _ in running.everywhere(one)} == {True}


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_lost_host_costs_nothing_and_the_number_of_ranks_may_change(
    job: Callable[..., Job], tmp_path: Path, lost: int, world: int
) -> None:
    job().save(1, 2)
    shutil.rmtree(tmp_path / f"host{lost}")
    steps, read = job([1 - lost] * world).load()
    assert steps == [2, 1]
    assert all(torch.equal(tensor.reshape(-1), values(2)) for tensor in read)  # type: ignore[union-attr]


def test_ranks_read_from_the_host_that_has_the_file(job: Callable[..., Job], tmp_path: Path) -> None:
    job(replicas=0).save(5)
    steps, read = job([0, 1, 1]).load()
    assert steps == [5]
    assert all(torch.equal(tensor.reshape(-1), values(5)) for tensor in read)  # type: ignore[union-attr]
    shutil.rmtree(tmp_path / "host1")
    assert job([0, 0, 0]).load()[0] == []  # the third of rank 2 is gone


def test_a_generation_that_cannot_be_completed_is_skipped_for_an_older_one(job: Callable[..., Job], tmp_path: Path) -> None:
    running = job()
    running.save(1, 2)
    newest = max(running.inventory(0).files)
    for host in (0, 1):
        (next((tmp_path / f"host{host}").iterdir()) / folder_of(newest) / "data" / "rank00001.safetensors").unlink()
    assert job().load()[0] == [1]


def test_a_generation_without_copies_does_not_replace_one_that_has_them(job: Callable[..., Job], tmp_path: Path) -> None:
    running = job()
    running.save(1)
    for rank in (0, 1):  # the keeper of host 1 cannot write these
        (next((tmp_path / "host1").iterdir()) / "spare" / f"copy-rank{rank:05d}.safetensors").mkdir()
    assert running.turns(2, 3, 4, 5, 6, 7) == ["memory", "disk", "memory", "disk", "disk", "memory"]
    shutil.rmtree(tmp_path / "host0")
    steps, read = job([1]).load()
    assert steps == [1]
    assert all(torch.equal(tensor.reshape(-1), values(1)) for tensor in read)  # type: ignore[union-attr]


def test_after_a_commit_that_failed_behind_training_the_next_save_goes_to_disk(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    running = job()
    running.save(1)
    real, full = task.write_rows, True

    def write_rows(storage: Any, name: str, *more: Any) -> None:
        if full and "rank00001" in name:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(storage, name, *more)

    monkeypatch.setattr(task, "write_rows", write_rows)
    with caplog.at_level(logging.WARNING, "unickpt"):
        assert running.turns(2, 3, 4, 5, 6) == ["failed", "disk", "failed", "disk", "disk"]
    assert sum("is not saved in memory" in line for line in caplog.messages) == 1, caplog.messages
    assert sum("goes to disk" in line for line in caplog.messages) == 1
    full = False
    assert running.turns(7, 8) == ["memory", "memory"]
    assert running.load()[0] == [8, 7]


def test_a_generation_whose_first_file_does_not_fit_harms_no_rank(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_about(folder: Path, *, tag: str) -> None:
        raise StorageError("full")

    running = job()
    running.save(1)
    monkeypatch.setattr(saver, "write_about", write_about)
    assert running.turns(2, 3) == ["failed", "disk"]
    assert running.load()[0] == [1]


def test_a_clock_that_jumps_back_does_not_make_an_older_generation_the_newest(
    job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time_ns
    job().save(1)
    shutil.rmtree(tmp_path / "host0")
    monkeypatch.setattr(time, "time_ns", lambda: real() - 3_600_000_000_000)  # of the host that takes the place of host 0
    again = job([2, 1, 1])

    def resume(tier: MemoryTier, exchange: MessageExchange) -> None:
        load = tier.look(again.checkpoints, exchange)
        tier.loaded(again.checkpoints, load, 1, load.found[0].number)

    again.everywhere(resume)
    again.save(2)
    assert again.load()[0] == [2, 1]
    monkeypatch.setattr(time, "time_ns", lambda: real() - 7_200_000_000_000)
    again.save(3)
    assert again.load()[0] == [3, 2]


def test_a_generation_older_than_the_checkpoint_on_disk_is_not_flushed_whatever_the_clock_says(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time_ns
    running = job()
    running.save(1)
    running.everywhere(lambda tier, _: tier.saved_to_disk(running.checkpoints, 0.0))
    monkeypatch.setattr(time, "time_ns", lambda: real() + 3_600_000_000_000)
    running.save(2)
    monkeypatch.setattr(time, "time_ns", real)
    running.everywhere(lambda tier, _: tier.saved_to_disk(running.checkpoints, 0.0))
    savers = [next(iter(tier._folders.values())).saver for tier in running.tiers]
    assert all(each is not None and each._newest is None for each in savers), "an older generation would replace it"


def test_a_flipped_bit_is_found_and_the_copy_serves(job: Callable[..., Job], tmp_path: Path) -> None:
    running = job()
    running.save(1)
    (number,) = running.inventory(0).files
    path = next((tmp_path / "host0").iterdir()) / folder_of(number) / "data" / "rank00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)
    again = job([0, 1, 1, 2])

    def both(tier: MemoryTier, exchange: MessageExchange) -> list[Any]:
        load, tried, out = tier.look(again.checkpoints, exchange), list[tuple[int, bool]](), list[Any]()
        while (choice := choose(load, lambda: None, tried)) is not None:
            if choice[1]:
                tier.check(again.checkpoints, choice[0].number)
            exchange.agree("check", None)
            checkpoint = tier.open(again.checkpoints, load, choice[0].number)
            try:
                out.append(checkpoint.read_tensor(*INFO.key))
            except CorruptCheckpointError:
                out.append(None)
        return out

    every = again.everywhere(both)
    assert every[0][0] is None  # the own file
    assert all(torch.equal(each[1].reshape(-1), values(1)) for each in every)
    assert not path.exists()


def test_a_checkpoint_on_disk_that_is_newer_wins() -> None:
    assert choose(MemoryLoad(), lambda: None, []) is None
    from unickpt.checkpoint.memory.finding import FoundGeneration

    load = MemoryLoad([FoundGeneration(2, 20, "b"), FoundGeneration(1, 10, "a")])
    assert choose(load, lambda: 20, []) is None
    tried: list[tuple[int, bool]] = []
    assert [choose(load, lambda: 15, tried) for _ in range(3)] == [(load.found[0], False), (load.found[0], True), None]


def test_every_nth_save_goes_to_disk(job: Callable[..., Job]) -> None:
    running = job(to_disk_every=3)

    def turns(tier: MemoryTier, exchange: MessageExchange) -> list[bool]:
        found = []
        for step in range(1, 7):
            save = tier.save(request(running.checkpoints, step, exchange.rank, len(HOSTS)), exchange)
            found.append(save is not None and save.wait(30))
        return found

    assert running.everywhere(turns) == [[True, True, False] * 2] * len(HOSTS)


def test_a_save_is_left_out_while_the_copies_of_the_one_before_are_not_complete(job: Callable[..., Job]) -> None:
    running, gate = job(to_disk_every=1000, on_busy="skip"), threading.Event()

    def saves(tier: MemoryTier, exchange: MessageExchange) -> list[bool]:
        def saved(step: int) -> PendingSave:
            save = tier.save(request(running.checkpoints, step, exchange.rank, len(HOSTS)), exchange)
            assert save is not None
            assert save.agreed
            return save

        assert saved(1).wait(30)
        memory = tier._folders[str(running.checkpoints)].saver
        assert memory is not None
        confirm = memory._confirm

        def late(task: SaveTask) -> None:
            gate.wait(30)
            confirm(task)

        memory._confirm = late  # type: ignore[method-assign]
        second, third = saved(2), saved(3)
        assert third.done
        gate.set()
        assert second.wait(30)
        fourth = saved(4)
        assert fourth.wait(30)
        return [save.committed for save in (second, third, fourth)]

    assert running.everywhere(saves) == [[True, False, True]] * len(HOSTS)


def test_memory_is_within_its_budget(job: Callable[..., Job]) -> None:
    def failed(tier: MemoryTier, exchange: MessageExchange) -> str:
        save = tier.save(request(running.checkpoints, 1, exchange.rank, len(HOSTS)), exchange)
        assert save is not None
        assert save.done
        return save.cause()

    running = job(gigabytes=1e-7)
    assert all("memory.gigabytes" in cause for cause in running.everywhere(failed))
    assert running.inventory(0).files == running.inventory(1).files == {}


@pytest.mark.parametrize("signalled", [False, True])
def test_the_newest_generation_goes_to_disk_at_the_end_of_the_job(job: Callable[..., Job], signalled: bool) -> None:
    running = job()
    running.save(1, 2)

    def end(tier: MemoryTier, exchange: MessageExchange) -> bool:
        saver = next(iter(tier._folders.values())).saver
        assert saver is not None
        saver.closing(signalled=signalled)
        return saver.leave(30)

    assert all(running.everywhere(end))
    assert verify_checkpoint(Path(running.checkpoints) / "step2").problems == ()
    assert torch.equal(Checkpoint.open(Path(running.checkpoints) / "step2").read_tensor(*INFO.key).reshape(-1), values(2))
    assert (Path(running.checkpoints) / "latest").read_text() == "step2"


@pytest.mark.parametrize("interactive", [False, True])
def test_after_a_crash_the_newest_generation_stays_in_memory(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, interactive: bool
) -> None:
    """Python keeps the exception that ends a process, and an interactive session that of any statement."""
    running = job()
    running.save(1, 2)
    monkeypatch.setattr(sys, "last_value", ZeroDivisionError("division by zero"), raising=False)
    if interactive:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)

    def end(tier: MemoryTier, exchange: MessageExchange) -> bool:
        saver = next(iter(tier._folders.values())).saver
        assert saver is not None
        saver.closing(signalled=False)
        return saver.leave(30)

    assert all(running.everywhere(end)) or not interactive  # after a crash nothing is waited for
    assert (Path(running.checkpoints) / "step2" / "manifest.json").exists() == interactive
    assert ("the newest checkpoint stays in memory: the program ended with ZeroDivisionError" in caplog.text) != interactive


def test_the_job_may_end_when_some_ranks_have_begun_a_save_and_others_have_not(job: Callable[..., Job]) -> None:
    """SIGTERM comes at once, and each rank is somewhere else then. A rank that has it refuses the save."""
    running = job()
    running.save(1, 2)

    def end(tier: MemoryTier, exchange: MessageExchange) -> bool:
        saver = next(iter(tier._folders.values())).saver
        assert saver is not None
        refused = request(running.checkpoints, 3, exchange.rank, len(HOSTS))
        refused.failed = InterruptedError("received SIGTERM")

        def train() -> None:
            if exchange.rank % 2:
                time.sleep(0.5)
            tier.save(refused, exchange)

        training = threading.Thread(target=train)
        training.start()
        time.sleep(0.2)
        saver.closing(signalled=True)
        training.join()
        return saver.leave(30)

    assert all(running.everywhere(end))
    assert verify_checkpoint(Path(running.checkpoints) / "step2").problems == ()
    assert (Path(running.checkpoints) / "latest").read_text() == "step2"


def test_ranks_that_are_ended_without_the_others_leave_at_once(job: Callable[..., Job]) -> None:
    """As when a host is lost and the other workers are started again: they must not wait for it."""
    running = job()
    running.save(1)

    def end(tier: MemoryTier, exchange: MessageExchange) -> float:
        saver = next(iter(tier._folders.values())).saver
        assert saver is not None
        begin = time.monotonic()
        if exchange.rank != 2:
            saver.closing(signalled=True)
            saver.leave(30)
        return time.monotonic() - begin

    assert all(seconds < 10 for seconds in running.everywhere(end))
    assert not Path(running.checkpoints, "latest").exists()
    assert job().load()[0] == [1]


def test_other_jobs_do_not_find_a_generation(job: Callable[..., Job], tmp_path: Path) -> None:
    job().save(1)
    shutil.rmtree(tmp_path / "checkpoints")  # and begun again under the same name
    fresh = job()
    assert fresh.load()[0] == []
    fresh.save(7)
    assert job().load()[0] == [7]


def test_a_keeper_that_died_is_started_again(job: Callable[..., Job]) -> None:
    running = job()
    running.save(1)
    running.end()  # the keepers alone
    running.save(2)
    assert data_of(running.inventory(1)) == [["0", "1", "2"]] * 2


def test_a_keeper_that_is_killed_during_a_copy_is_replaced_and_the_copy_is_made(job: Callable[..., Job]) -> None:
    running = job(copy_megabytes_per_second=0.02)
    keepers: list[KeeperProcess] = []

    def killed() -> None:
        time.sleep(0.4)
        for keeper in keepers:
            os.kill(keeper.pid, signal.SIGKILL)

    running.save(1)
    keepers = [each.keeper for tier in running.tiers for each in running.hosts_of(tier) if each.keeper is not None]
    assert len(keepers) == 2
    before = [keeper.pid for keeper in keepers]
    killer = threading.Thread(target=killed)
    killer.start()
    running.save(2)
    killer.join()
    assert data_of(running.inventory(1)) == [["0", "1", "2"]] * 2
    assert running.statuses[-1].confirmed == 2, running.statuses[-1]
    assert all(keeper.runs and keeper.pid != pid for keeper, pid in zip(keepers, before, strict=True))
