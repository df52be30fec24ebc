"""Workers that have ended: the agent of their host tells the leader, and every host tells its own workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.repository import REPO
from tests.unit.steering.checked_events import members, run, started
from tests.unit.steering.peers import until
from unickpt.base.round_folder import note_saved, ranks_saved, ranks_willing, read_ended, remove_note
from unickpt.steering.host.patience import Patience
from unickpt.steering.host.workers import EndedWorkers
from unickpt.steering.state.membership import Arrived, JobPhase, Joined, Left, Lost, Membership, WorkersEnded
from unickpt.testing.launch import environment

VARIABLES = (b"TORCHELASTIC_RUN_ID=job", b"UNICKPT_ROUND=1.1")


def job() -> Membership:
    """Return a job on three hosts with two ranks each."""
    state = started(3, 1, 3)
    return run(state, *(Joined(name, "1", f"{name}:1", 2) for name in ("h1", "h2", "h3")))


def epoch_of(state: Membership) -> tuple[int, int]:
    assert state.round is not None
    return state.round.epoch


def test_the_state_names_the_ranks_of_the_round_that_have_ended() -> None:
    state = job()
    told = run(state, WorkersEnded("h2", "1", epoch_of(state), (3,)))
    assert (told.ended, told.phase) == ({3}, JobPhase.RUNNING)
    assert run(state, WorkersEnded("h2", "1", (1, 99), (3,))).ended == frozenset()
    assert run(state, WorkersEnded("h2", "2", epoch_of(state), (3,))).ended == frozenset()


def test_all_ranks_of_a_lost_host_have_ended_and_none_of_the_next_round() -> None:
    state = job()
    for gone in (Lost("h2", "1"), Left("h2", "1")):
        assert run(state, gone).ended == {2, 3}
    assert run(state, Lost("h1", "1"), Lost("h2", "1")).ended == {0, 1}  # the ranks of h2 cannot be told without those of h1
    state = run(state, WorkersEnded("h3", "1", epoch_of(state), (4,)), Lost("h2", "1"))
    assert state.ended == {2, 3, 4}
    later = run(state, *(Arrived(name, "1", epoch_of(state)) for name in ("h1", "h3")))
    assert (later.phase, members(later), later.ended) == (JobPhase.OPENING, ["h1", "h3"], frozenset())


def test_the_end_of_a_worker_is_told_while_the_agent_is_busy(tmp_path: Path) -> None:
    told: list[tuple[int, ...]] = []
    elsewhere: set[int] = set()
    here = {name: value for name, value in os.environ.items() if name != "RANK"}
    here |= {"TORCHELASTIC_RUN_ID": "job", "UNICKPT_ROUND": "1.1"}
    others = [here | {"UNICKPT_ROUND": "1.2", "RANK": "9"}, {"RANK": "8"}]
    watch = EndedWorkers(VARIABLES, tmp_path, lambda: frozenset(elsewhere), told.append)
    started_ = [subprocess.Popen(["sleep", "60"], env=here | {"RANK": str(rank)}) for rank in (4, 5)]
    strangers = [subprocess.Popen(["/bin/sleep", "60"], env=env) for env in others]
    try:
        time.sleep(0.5)
        assert (told, read_ended(tmp_path)) == ([], frozenset())
        for process in (started_[1], *strangers):  # a dead worker stays a zombie until torchrun looks at it
            process.kill()
        assert until(lambda: read_ended(tmp_path) == {5})
        elsewhere.add(0)
        assert until(lambda: read_ended(tmp_path) == {0, 5})
        started_[1].wait()
        time.sleep(0.5)
        assert told == [(5,)]
        watch.close()
        started_[0].kill()
        started_[0].wait()
        time.sleep(0.5)
        assert (told, read_ended(tmp_path)) == ([(5,)], {0, 5})
    finally:
        watch.close()
        for process in (*started_, *strangers):
            process.kill()
            process.wait()


@pytest.mark.parametrize("code", [-15, 143, 1])
def test_workers_that_were_told_to_end_are_known_before_the_thread_has_seen_it(tmp_path: Path, code: int) -> None:
    """torchrun polls, and asks at once, while the thread may be busy."""
    here = dict(os.environ) | {"TORCHELASTIC_RUN_ID": "job", "UNICKPT_ROUND": "1.1", "RANK": "4"}
    seen, free = threading.Event(), threading.Event()

    def begun(_: Mapping[int, int]) -> None:
        seen.set()
        free.wait(60)

    watch = EndedWorkers(VARIABLES, tmp_path, frozenset, lambda _: None, begun)
    command = [sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(int(sys.argv[1]))", str(code)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=here) as worker:
        assert seen.wait(60)
        assert not watch.told_to_end()
        if code < 0:
            worker.send_signal(-code)
        worker.communicate()
        if code != 1:
            note_saved(tmp_path, 4)  # before Linux 6.15, the status is lost now
        assert worker.returncode == code
        assert watch.told_to_end() is (code != 1)
    free.set()
    watch.close()


STAYS = """
import os, signal, sys, time
from pathlib import Path
from unickpt.base.round_folder import must_stay, note_saved, note_willing
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
folder = Path(sys.argv[1])
note_willing(folder, 3)
while not told: time.sleep(0.01)
time.sleep(float(sys.argv[2]))
note_saved(folder, 3)
while must_stay(folder) and len(told) < 2: time.sleep(0.01)
sys.exit(143)
"""


@pytest.mark.parametrize(("save_s", "waits"), [(0.3, True), (60.0, False)], ids=["saves", "hangs"])
def test_an_agent_lets_its_workers_save_for_longer_than_torchrun_does(tmp_path: Path, save_s: float, waits: bool) -> None:
    assert Patience.begin(tmp_path, 60.0) is None, "no worker of this host saves together with the others"
    variables = environment(REPO) | {"TORCHELASTIC_RUN_ID": "id", "RANK": "3"}
    worker = subprocess.Popen([sys.executable, "-c", STAYS, str(tmp_path), str(save_s)], env=variables)
    try:
        until(lambda: ranks_willing(tmp_path) == {3})
        patience = Patience.begin(tmp_path, 6000.0 if waits else 0.5)
        assert patience is not None
        assert patience.lasts()
        until(lambda: not patience.lasts())
        assert worker.poll() is None, "torchrun must not see it end by itself"
        assert (3 in ranks_saved(tmp_path)) is waits
        if waits:
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(20.0) == 143
    finally:
        worker.kill()
        worker.wait()
    remove_note(tmp_path)
    assert list(tmp_path.iterdir()) == []
