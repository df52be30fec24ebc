"""Ranks whose processes have ended, as the agent of the host knows: a save that misses their part is given up at once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.rank_threads import on_all_ranks
from tests.support.saves import assert_holds, part
from tests.support.saving import save
from unickpt.base.errors import CoordinationError
from unickpt.base.round_folder import RINGS, RINGS_JOB, ends_of_job, folder_of_round, note_ended, read_ended, remove_note
from unickpt.checkpoint.coordination import ends as ends_module
from unickpt.checkpoint.coordination.ends import Ends
from unickpt.checkpoint.coordination.message_exchange import Message, MessageExchange
from unickpt.checkpoint.save.requests import PendingSave, SaveOptions
from unickpt.checkpoint.save.saver import Saver

AT_ONCE_S, LONG_S = 5.0, 60.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a round of two ranks, in which this process is rank 0."""
    round_ = tmp_path / "round"
    round_.mkdir()
    names = {RINGS: str(round_), RINGS_JOB: "job", "TORCHELASTIC_RUN_ID": "job", "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    return round_


def saved(exchange: MessageExchange, folder: Path) -> Any:
    return save(lambda _: part(1, exchange.rank), save_dir=str(folder), tag="a", save_latest=True, exchange=exchange)


def test_a_save_without_the_part_of_a_dead_rank_is_given_up_at_once(tmp_path: Path) -> None:
    dead = threading.Event()

    def run(exchange: MessageExchange) -> Any:
        if exchange.rank == 2:
            dead.set()
            return None
        return saved(exchange, tmp_path)

    begin = time.monotonic()
    found = on_all_ranks(run, timeout_s=LONG_S, ended=lambda: frozenset({2} if dead.is_set() else ()))
    assert time.monotonic() - begin < AT_ONCE_S
    for error in found[:2]:
        assert isinstance(error, CoordinationError)
        assert "process of rank 2 has ended" in str(error)
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_a_dead_rank_that_has_sent_its_part_is_not_missed(tmp_path: Path) -> None:
    sent = threading.Event()

    def run(exchange: MessageExchange) -> Any:
        gather = exchange.gather

        def gathered(topic: str, message: Message) -> list[Message] | None:
            if exchange.rank == 1 and topic == "written":  # until the coordinator has looked for rank 2 more than once
                sent.wait(LONG_S)
                time.sleep(0.8)
            result = gather(topic, message)
            if exchange.rank == 2 and topic == "written":
                exchange.timeout_s = 1.0  # it is not dead here, and may miss the verdict, which the others do not keep for it
                sent.set()
            return result

        exchange.gather = gathered  # type: ignore[method-assign]
        return saved(exchange, tmp_path)

    found = on_all_ranks(run, timeout_s=LONG_S, ended=lambda: frozenset({2} if sent.is_set() else ()))
    assert [result.committed for result in found[:2]] == [True] * 2
    assert_holds(tmp_path, "a", 1)


def test_the_coordinator_does_not_wait_for_dead_ranks_to_leave() -> None:
    begin = time.monotonic()
    on_all_ranks(lambda exchange: exchange.leave(LONG_S) if exchange.rank != 1 else None, ended=lambda: frozenset({1}))
    assert time.monotonic() - begin < AT_ONCE_S


def test_ranks_do_not_wait_for_a_dead_coordinator(tmp_path: Path) -> None:
    def run(exchange: MessageExchange) -> Any:
        return saved(exchange, tmp_path) if exchange.rank else None

    begin = time.monotonic()
    found = on_all_ranks(run, timeout_s=LONG_S, ended=lambda: frozenset({0}))
    assert time.monotonic() - begin < AT_ONCE_S
    assert all("process of rank 0 has ended" in str(error) for error in found[1:]), found


def test_the_end_of_a_process_does_not_wait_for_a_save_whose_coordinator_has_ended(tmp_path: Path) -> None:
    """Its thread hangs in a call of the store, which does not answer when the coordinator's host has lost its power."""
    ended: set[int] = set()
    saver = Saver(SaveOptions(asynchronous=True))
    saver._exchange = MessageExchange(dist.HashStore(), rank=1, world=3, prefix="t", ended=lambda: frozenset(ended))
    saver._pending.append(PendingSave(str(tmp_path / "a"), 1, saver.counts))
    assert not saver.leave(0.3)
    ended.add(2)
    begin = time.monotonic()
    assert not saver.leave(1.0)
    assert time.monotonic() - begin >= 1.0  # the coordinator decides whether this rank is missed
    threading.Timer(0.3, ended.add, (0,)).start()
    begin = time.monotonic()
    assert not saver.leave(LONG_S)
    assert time.monotonic() - begin < AT_ONCE_S


def test_the_agent_tells_the_workers_of_its_host(folder: Path) -> None:
    assert folder_of_round() == folder
    ended = ends_of_job(0, 2)
    assert ended() == frozenset()
    note_ended(folder, {1, 30})
    assert ended() == read_ended(folder) == {1, 30}
    (folder / "ended").write_text("1 x 2")
    assert ended() == {1, 2}
    remove_note(folder)
    assert ended() == frozenset()
    assert list(folder.iterdir()) == []


def test_ranks_that_torch_numbers_otherwise_are_never_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note_ended(folder, {1})
    assert ends_of_job(1, 2)() == ends_of_job(0, 3)() == frozenset()
    monkeypatch.delenv(RINGS)
    assert ends_of_job(0, 2)() == frozenset()


RANK = """
import sys, torch.distributed as dist
from unickpt.checkpoint.coordination import ends as ends_module
from unickpt.checkpoint.coordination.ends import Ends
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
ends = Ends(store, rank=1, prefix="job")
print(sorted(ends()), flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("how", ["in order", "killed"])
def test_the_end_of_a_rank_ends_the_wait_for_it(how: str) -> None:
    """Without an agent of steering: through the store, and by the processes of this host."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = subprocess.Popen([sys.executable, "-c", RANK, str(store.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin is not None
    assert other.stdout is not None
    assert other.stdout.readline() == b"[]\n"
    ends = Ends(store, rank=0, prefix="job")
    assert ends() == frozenset()
    exchange = MessageExchange(store, rank=0, world=2, prefix="save", timeout_s=600.0, ended=ends)
    if how == "killed":
        other.kill()
    other.stdin.close()
    with pytest.raises(CoordinationError, match="the process of rank 1 has ended without a message"):
        exchange.gather("written", {})
    other.wait()


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_a_rank_that_begins_again_has_not_ended(store: dist.TCPStore) -> None:
    observer, first = Ends(store, rank=0, prefix="job"), Ends(store, rank=1, prefix="job")
    first._write()
    assert observer() == {1}
    second = Ends(store, rank=1, prefix="job")
    assert observer() == frozenset()
    first._write()  # late
    assert observer() == frozenset()
    second._write()
    assert observer() == {1}


def test_a_rank_that_begins_again_on_another_host_has_not_ended(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    observer = Ends(store, rank=0, prefix="job")
    with subprocess.Popen(
        [sys.executable, "-c", RANK, str(store.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        other.kill()
    assert observer() == {1}
    monkeypatch.setattr(ends_module, "_host", lambda: "another")
    Ends(store, rank=1, prefix="job")
    assert observer() == frozenset()


@pytest.mark.parametrize("lost", ["no name of the host", "no file descriptor"])
def test_a_process_that_cannot_be_looked_up_has_not_ended(
    lost: str, store: dist.TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts without a boot id would share one list of processes."""
    if lost == "no name of the host":
        monkeypatch.setattr(ends_module, "_host", lambda: "")
    observer, other = Ends(store, rank=0, prefix="job"), Ends(store, rank=1, prefix="job")
    assert other() == frozenset()
    if lost == "no file descriptor":
        assert observer() == frozenset()
        (tmp_path / str(os.getpid())).mkdir()
        (tmp_path / str(os.getpid()) / "stat").mkdir()  # reading it is an OSError
    monkeypatch.setattr(ends_module, "_PROC", tmp_path)
    assert observer() == frozenset()
