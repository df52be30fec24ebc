"""Workers end with their agent, or are ended by the next one: by their identity, once, and nothing else ends with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.repository import REPO
from tests.unit.steering.peers import until
from unickpt.base import left_workers
from unickpt.base.left_workers import WorkerRecord, end_all, left_behind
from unickpt.base.process_identity import ProcessIdentity
from unickpt.testing.launch import environment

AGENT = """
import os, subprocess, sys, time
from pathlib import Path
from unickpt.base.left_workers import AGENT, WorkerRecord
folder, noted, program = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
record = WorkerRecord("job", folder / "records")
own = {"TORCHELASTIC_RUN_ID": "id", AGENT: str(record.agent), "MASTER_PORT": "1", "FOLDER": str(folder)}
record.begin([f"{name}={value}".encode() for name, value in own.items() if name != "FOLDER"])
started = {}
for rank in (0, 1):
    env = {**os.environ, **own, "RANK": str(rank)}
    started[subprocess.Popen([sys.executable, "-c", program], env=env, start_new_session=True).pid] = rank
record.note(dict(list(started.items())[:noted]))
(folder / "part").write_text(" ".join(map(str, started)))
(folder / "part").rename(folder / "pids")
time.sleep(600)
"""
SLEEPS = "import time; time.sleep(600)"
COUNTS = """
import os, signal, time
file = os.environ["FOLDER"] + "/terms" + os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda *_: open(file, "a").write("x"))
open(os.environ["FOLDER"] + "/ready" + os.environ["RANK"], "w").close()
while True: time.sleep(600)
"""
HELPED = "import subprocess, time; subprocess.Popen(['sleep', '600'], start_new_session=True); time.sleep(600)"
WATCHES = """
import os, time
from unickpt.base import launcher_watch
launcher_watch.end_with_launcher()
open(os.environ["FOLDER"] + "/ready" + os.environ["RANK"], "w").close()
time.sleep(600)
"""
Begin = Callable[..., tuple[subprocess.Popen[bytes], list[int]]]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Start an agent with two workers, and return both when the workers run."""
    agents: list[subprocess.Popen[bytes]] = []

    def start(program: str, noted: int = 2) -> tuple[subprocess.Popen[bytes], list[int]]:
        variables = environment(REPO)
        agents.append(subprocess.Popen([sys.executable, "-c", AGENT, str(tmp_path), str(noted), program], env=variables))
        assert until(lambda: (tmp_path / "pids").exists(), 60)
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        if "ready" in program:
            assert until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)), 60)
        return agents[-1], pids

    yield start
    pids = (tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else []
    for pid in [int(each) for each in pids] + [agent.pid for agent in agents]:
        if ProcessIdentity.of(pid) is not None:
            os.kill(pid, signal.SIGKILL)
    for agent in agents:
        agent.wait()


def kill(agent: subprocess.Popen[bytes]) -> None:
    """Kill an agent alone. It stays a zombie, as below a supervisor that is busy."""
    agent.kill()
    os.waitid(os.P_PID, agent.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize("noted", [2, 1, 0])
def test_what_a_dead_agent_has_left_is_ended_and_nothing_of_a_living_one(tmp_path: Path, begin: Begin, noted: int) -> None:
    agent, pids = begin(HELPED, noted)
    folder = tmp_path / "records"
    assert until(lambda: len(children(pids[0])) == len(children(pids[1])) == 1)
    helpers = [pid for worker in pids for pid in children(worker)]
    assert until(lambda: all(os.getsid(pid) == pid for pid in helpers))
    assert left_behind("job", folder) == []
    kill(agent)
    assert left_behind("another job", folder) == []
    found = left_behind("job", folder)
    assert sorted((left.rank, left.process.pid) for left in found) == list(enumerate(pids))
    assert end_all(found) == []
    assert not any(ProcessIdentity.of(pid) for pid in pids)
    assert all(ProcessIdentity.of(pid) for pid in helpers), "a worker's own helper in a session of its own lives on"
    assert left_behind("job", folder) == []
    assert list(folder.iterdir()) == []
    for pid in helpers:
        os.kill(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_worker_gets_one_sigterm_from_whoever_ends_it_and_then_sigkill(
    tmp_path: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, pids = begin(COUNTS)
    kill(agent)
    monkeypatch.setattr(left_workers, "TERM_S", 0.5)
    found = sorted(left_behind("job", tmp_path / "records"), key=lambda left: left.rank)
    os.kill(pids[1], signal.SIGSTOP)
    until(lambda: left_workers.stopped(found[1].process))
    for left in found[:1]:
        assert left_workers.first_to_end(left.record, left.process)  # another party sends it
        os.kill(left.process.pid, signal.SIGTERM)
    assert end_all(found) == []
    assert not any(ProcessIdentity.of(pid) for pid in pids)
    assert (tmp_path / "terms0").read_text() == "x"
    assert not (tmp_path / "terms1").exists(), "a stopped process cannot react to SIGTERM"


def test_a_worker_watches_its_agent(begin: Begin, tmp_path: Path) -> None:
    agent, pids = begin(WATCHES)
    time.sleep(0.3)
    assert all(ProcessIdentity.of(pid) for pid in pids)
    kill(agent)
    assert until(lambda: not any(ProcessIdentity.of(pid) for pid in pids))


def test_a_reused_number_is_another_process(tmp_path: Path) -> None:
    me = ProcessIdentity.of(os.getpid())
    assert me is not None
    assert me.lives
    assert ProcessIdentity.parse(str(me)) == me
    for other in (replace(me, start=me.start - 1), replace(me, boot="another"), replace(me, namespace="1")):
        assert not other.lives
    assert not me.wait(0.0)
    assert replace(me, start=me.start - 1).wait(5.0)
    record = WorkerRecord("job", tmp_path)
    record.begin([])
    record.note({os.getpid(): 0})
    assert left_behind("job", tmp_path) == [], "its agent lives"


LATE = """
import os, subprocess, sys, time
{before}
import _unickpt_autoload
_unickpt_autoload.watch = lambda _: None
_unickpt_autoload._install = lambda _: None  # as if torch had been imported, without its time
_unickpt_autoload.arm()
{middle}
from unickpt.base import launcher_watch
go = os.environ["FOLDER"] + "/go"
open(os.environ["FOLDER"] + "/ready" + os.environ["RANK"], "w").close()
while not os.path.exists(go): time.sleep(0.02)
launcher_watch.end_with_launcher()
{after}
time.sleep(600)
"""
UNSTEERED = 'os.environ.pop("UNICKPT_AGENT", None)'
RECORDS = """
from pathlib import Path
from unickpt.base import launcher_watch as at
at.records_folder = lambda: Path(os.environ["FOLDER"], "records")
"""


@pytest.mark.parametrize("steered", [False, True])
def test_a_worker_that_loads_this_after_the_end_of_its_launcher_ends_too(begin: Begin, tmp_path: Path, steered: bool) -> None:
    """Without steering, a worker watches from its first engine or save on."""
    agent, pids = begin(LATE.format(before="" if steered else UNSTEERED, middle=RECORDS, after=""))
    kill(agent)
    assert all(ProcessIdentity.of(pid) for pid in pids)
    (tmp_path / "go").touch()
    assert until(lambda: not any(ProcessIdentity.of(pid) for pid in pids))


DETACHES = """
if os.environ["RANK"] == "0" and "DETACHED" not in os.environ:
    program = Path("/proc/self/cmdline").read_bytes().split(b"\\0")[2].decode()
    variables = {**os.environ, "DETACHED": "1", "FOLDER": os.environ["FOLDER"] + "/detached"}
    subprocess.Popen([sys.executable, "-c", program], env=variables, start_new_session=START)
if "DETACHED" in os.environ:
    open(os.environ["FOLDER"] + "/pid", "w").write(str(os.getpid()))
"""
SAYS = 'open(os.environ["FOLDER"] + "/looked" + os.environ["RANK"], "w").close()'


@pytest.mark.parametrize("own_session", [True, False])
@pytest.mark.parametrize("before", ["", UNSTEERED], ids=["steered", "unsteered"])
@pytest.mark.parametrize("in_order", [True, False], ids=["ended", "killed"])
def test_what_a_worker_has_started_outlives_the_job(
    begin: Begin, tmp_path: Path, own_session: bool, before: str, in_order: bool
) -> None:
    """For instance an evaluation or an upload, in a session of its own or not. It has the environment of the worker."""
    folder = tmp_path / "detached"
    (folder / "records").mkdir(parents=True)
    middle = RECORDS.replace('os.environ["FOLDER"]', f'"{tmp_path}"') + DETACHES.replace("START", str(own_session))
    agent, pids = begin(LATE.format(before=before, middle=middle, after=SAYS))
    assert until(lambda: (folder / "ready0").exists(), 60)
    helper = int((folder / "pid").read_text())
    try:
        for pid in pids if in_order else ():
            os.kill(pid, signal.SIGKILL)
        kill(agent)
        for record in (tmp_path / "records").iterdir() if in_order else ():
            record.unlink()
        (folder / "go").touch()
        assert until(lambda: (folder / "looked0").exists(), 60)
        time.sleep(0.3)
        assert ProcessIdentity.of(helper) is not None
    finally:
        os.kill(helper, signal.SIGKILL)


def test_what_a_worker_has_started_while_the_job_runs_outlives_its_orderly_end(begin: Begin, tmp_path: Path) -> None:
    """An upload watches nothing, and a worker whose agent ends in order is left to it."""
    agent, pids = begin(LATE.format(before="", middle=RECORDS, after=SAYS))
    (tmp_path / "go").touch()
    assert until(lambda: all((tmp_path / f"looked{rank}").exists() for rank in (0, 1)), 60)
    for record in (tmp_path / "records").iterdir():
        record.unlink()
    kill(agent)
    time.sleep(1.0)
    assert all(ProcessIdentity.of(pid) for pid in pids)


def test_a_wait_without_pidfd_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: int) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "pidfd_open", forbidden)
    process = subprocess.Popen(["sleep", "600"])
    lives = ProcessIdentity.of(process.pid)
    assert lives is not None
    slept: list[float] = []
    monkeypatch.setattr("unickpt.base.process_identity.time.sleep", lambda s: (slept.append(s), process.kill(), process.wait()))
    assert not lives.wait(0.0)
    assert lives.wait(60.0)
    assert len(slept) == 1


def test_an_old_record_of_a_living_agent_of_another_job_stays(tmp_path: Path, begin: Begin) -> None:
    agent, _ = begin(SLEEPS)
    folder = tmp_path / "records"
    (record,) = folder.iterdir()
    (folder / f"{record.name}.term.1").touch()
    (folder / f"{record.name[:-1]}.term.1").touch()
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    left_behind("another job", folder)
    assert {path.name for path in folder.iterdir()} == {record.name, f"{record.name}.term.1"}
    kill(agent)
    left_behind("another job", folder)
    left_behind("another job", folder)
    assert not record.exists()
