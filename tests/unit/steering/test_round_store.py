"""The store in which torchrun's agents assign ranks: it answers while the round runs, and never holds an agent after that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

from unickpt.steering.wire.round_store import RoundStore, StoreLostError, answer

SERVER = """
import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.fixture
def server() -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Port and process of a store."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline()), process
    finally:
        process.kill()
        process.wait()


def _stop(process: subprocess.Popen[str]) -> None:
    """Stop a process, and wait until it is: on a busy machine it may answer once more."""
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def _workers(store: Any, rank: int) -> int:
    """Assign ranks with torch's own code, as the agent of one of two hosts. Return the number of workers."""
    spec: Any = SimpleNamespace(role="default", local_world_size=1)
    return len(SimpleElasticAgent._assign_worker_ranks(None, store, rank, 2, spec))  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_agent_is_not_held_by_a_machine_that_went_dark(rank: int, server: tuple[int, subprocess.Popen[str]]) -> None:
    """A stopped process answers like a machine without power: not at all, and without an error."""
    port, process = server
    client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2))
    over = time.monotonic() + 1.0
    _stop(process)
    begin = time.monotonic()
    assert _workers(RoundStore(client, lambda: time.monotonic() > over), rank) == 1
    assert time.monotonic() - begin < 15.0


def test_a_connection_to_a_machine_that_went_dark_ends(server: tuple[int, subprocess.Popen[str]]) -> None:
    """The constructor connects to a stopped process, and waits for its answer."""
    port, process = server
    _stop(process)
    wait = timedelta(seconds=1)
    begin = time.monotonic()
    with pytest.raises(StoreLostError, match="does not answer"):
        answer(lambda: TCPStore("127.0.0.1", port, None, False, wait, wait_for_workers=False), lambda: False, 2.0)
    assert time.monotonic() - begin < 15.0


def test_no_question_follows_one_without_an_answer(
    server: tuple[int, subprocess.Popen[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """The client of the store is locked by the first question."""
    port, process = server
    client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    store = RoundStore(client, lambda: False, limit_s=1.0)
    _stop(process)
    for _ in range(3):
        with pytest.raises(StoreLostError):
            store.add("n", 1)
    assert store.timeout == client.timeout, "not a question"
    assert caplog.text.count(f"the store of the round at 127.0.0.1:{port} does not answer") == 1, "said once"


@pytest.mark.parametrize("rank", [0, 1])
def test_an_agent_survives_a_round_that_ends_while_ranks_are_assigned(rank: int) -> None:
    """torch's own code, on a store to which the other member never writes."""
    spec: Any = SimpleNamespace(role="default", local_world_size=2)
    over = time.monotonic() + 0.3
    store: Any = RoundStore(HashStore(), lambda: time.monotonic() > over)
    workers = SimpleElasticAgent._assign_worker_ranks(None, store, rank, 2, spec)  # type: ignore[arg-type]
    assert [worker.local_rank for worker in workers] == [0, 1]
    assert [worker.global_rank for worker in workers] == [2 * rank, 2 * rank + 1]


def test_an_agent_survives_the_loss_of_the_store_while_ranks_are_assigned() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    store: Any = RoundStore(client, lambda: False)
    del server
    spec: Any = SimpleNamespace(role="default", local_world_size=1)
    assert len(SimpleElasticAgent._assign_worker_ranks(None, store, 1, 2, spec)) == 1  # type: ignore[arg-type]


def test_the_store_of_a_round_is_an_ordinary_store_while_the_round_runs() -> None:
    stores = [RoundStore(shared, lambda: False) for shared in [HashStore()] * 2]
    stores[0].set("torchelastic/role_info/0", b"{}")
    stores[1].set("torchelastic/role_info/1", b"[]")
    assert stores[0].multi_get(["torchelastic/role_info/0", "torchelastic/role_info/1"]) == [b"{}", b"[]"]
    stores[0].multi_set(["torchelastic/assigned_ranks/1", "x"], ["[1]", "2"])
    assert (stores[1].get("torchelastic/assigned_ranks/1"), stores[1].get("x"), stores[1].add("n", 2)) == (b"[1]", b"2", 2)
