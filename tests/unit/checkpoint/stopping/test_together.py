"""Ranks that are told to end stop at one step boundary, wherever each of them is then, or not at all."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from torch.distributed import HashStore

from tests.support.repository import REPO
from unickpt.checkpoint.stopping import together
from unickpt.checkpoint.stopping.agreement import Agreement, Decision, Look, decide
from unickpt.checkpoint.stopping.together import Job, StopTogether
from unickpt.testing.launch import environment


def test_the_greatest_boundary_counts() -> None:
    assert decide([Look(3, 7), Look(5, 7), Look(1)]) == Decision(5)
    assert decide([Look(3, 7), Look(3, 8)]).boundary == 0, "the ranks do not count alike"


@pytest.mark.parametrize("text", ["", "x", "-1 ", "²"])
def test_a_decision_that_cannot_be_read_is_none(text: str) -> None:
    assert Decision.of(text).boundary == 0
    for decision in (Decision(7), Decision(0, "rank 3 has ended")):
        assert Decision.of(decision.text) == decision


def test_the_first_decision_counts() -> None:
    store = HashStore()
    ranks = [Agreement(store, rank=rank, world=2, prefix="p") for rank in range(2)]
    ranks[0].look_from(Look(4, 0))
    assert ranks[0].decision() is None
    assert ranks[1].missing() == (1,)
    ranks[1].look_from(Look(6, 0))
    assert ranks[1].decision() is None, "rank 0 decides"
    assert ranks[0].decision() == Decision(6)
    assert ranks[1].give_up("too late") == ranks[1].decision() == Decision(6)


def job(
    ranks: int, body: Callable[[int, StopTogether], None], *, grace_s: float = 20.0,
    ended: Callable[[], frozenset[int]] = frozenset, hopeless: Callable[[], str] = str,
) -> list[int]:  # fmt: skip
    """Run ranks as threads until they end. Return those that ended without a boundary."""
    store, given_up = HashStore(), list[int]()
    parts = [
        StopTogether(
            lambda rank=rank: Job(rank, ranks, store, "p", ended, hopeless),  # type: ignore[misc]
            grace_s,
            lambda rank=rank: given_up.append(rank),  # type: ignore[misc]
        )
        for rank in range(ranks)
    ]
    threads = [threading.Thread(target=body, args=(rank, part), daemon=True) for rank, part in enumerate(parts)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20.0
    while any(thread.is_alive() for thread in threads) and len(given_up) < ranks and time.monotonic() < deadline:
        time.sleep(0.01)
    return given_up


@pytest.mark.parametrize("seed", range(4))
def test_all_ranks_stop_at_one_boundary(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of ranks wait for one another in every step, as in a pipeline, so the ranks are at different boundaries."""
    monkeypatch.setattr(together, "LISTEN_S", 0.05)
    draw, ranks = random.Random(seed), 4
    barriers = [threading.Barrier(2), threading.Barrier(2), threading.Barrier(ranks)]
    at = {draw.randrange(ranks): draw.randrange(1, 40) for _ in range(draw.choice([1, 1, 3]))}
    slow = {rank: draw.random() * 0.004 for rank in range(ranks)}
    stopped: dict[int, int] = {}

    def body(rank: int, part: StopTogether) -> None:
        for step in range(101, 2000):
            time.sleep(slow[rank])
            barriers[rank // 2].wait(20.0)
            if step % 3 == 0:
                barriers[2].wait(20.0)
            if step - 100 == at.get(rank):
                part.signalled.set()
            if part.due(step):
                stopped[rank] = step
                part.meet()
                return

    given_up = job(ranks, body)
    assert given_up == []
    assert len(stopped) == ranks
    assert len(set(stopped.values())) == 1, stopped
    assert stopped[0] - 100 >= min(at.values())


@pytest.mark.parametrize("what", ["dead", "hopeless", "hangs", "miscounts"])
def test_without_a_common_boundary_no_rank_saves(what: str, caplog: pytest.LogCaptureFixture) -> None:
    """One rank does not come, and the others do not wait for it longer than needed."""
    told, other = threading.Event(), threading.Event()

    def body(rank: int, part: StopTogether) -> None:
        for step in range(1, 5):
            assert not part.due(step)
        if rank == 1:
            part.signalled.set()
            told.set()
            other.wait(15.0)
        elif what == "miscounts":
            told.wait(15.0)
            assert not part.due(6)  # returns only if it were to go on
        else:
            other.wait(15.0)  # in a collective with the other rank

    began_s = time.monotonic()
    given_up = job(
        2, body, grace_s=1.5 if what == "hangs" else 20.0,
        ended=lambda: frozenset({1}) if what == "dead" and told.is_set() else frozenset(),
        hopeless=lambda: "rank 1 is at fault" if what == "hopeless" and told.is_set() else "",
    )  # fmt: skip
    other.set()
    assert sorted(given_up) == [0, 1]
    reason = {
        "dead": "rank 1 has ended", "hopeless": "rank 1 is at fault", "hangs": "not reached within 1.5 s",
        "miscounts": "the ranks count their steps differently",
    }[what]  # fmt: skip
    assert reason in caplog.text
    assert time.monotonic() - began_s < 10.0 or os.getloadavg()[0] > 4


def test_a_process_alone_stops_at_its_next_boundary() -> None:
    part = StopTogether(Job, 5.0, lambda: None)
    assert not part.due(1)
    part.signalled.set()
    deadline = time.monotonic() + 10.0
    steps = 1
    while time.monotonic() < deadline:
        steps += 1
        if part.due(steps):
            break
        time.sleep(0.01)
    assert part.due(steps + 1), "it stays true"
    with pytest.raises(SystemExit) as raised:
        part.leave()
    assert raised.value.code == 143


FORKS = """
import os, signal, sys, time
from unickpt import Preemption
if sys.argv[1] == "read":  # other code reads the signals of this process
    import socket
    ends = socket.socketpair()
    ends[1].setblocking(False)
    signal.set_wakeup_fd(ends[1].fileno())
preemption = Preemption()
reading, writing = os.pipe()
child = os.fork()
if not child:
    os.write(writing, b"x")
    time.sleep(30)
    os._exit(0)
os.read(reading, 1)
os.kill(child, signal.SIGTERM)
assert os.waitpid(child, 0)[1] == signal.SIGTERM, "a worker of a data loader ends"
time.sleep(0.3)
assert not preemption.due(1), "the signal was for the child alone"
os.kill(os.getpid(), signal.SIGTERM)
steps = 1
while not preemption.due(steps := steps + 1):
    time.sleep(0.01)
preemption.leave()
"""


@pytest.mark.parametrize("how", ["", "read"], ids=["signals are read", "other code reads them"])
def test_a_signal_to_a_child_is_none_to_the_training(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", FORKS, how], env=environment(REPO), capture_output=True, text=True, timeout=60)
    assert done.returncode == 143, done.stderr
