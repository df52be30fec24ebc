"""Folders of rings: removal, reading and cleanup, and the end of an agent."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.diagnosis.agent.made import S, call, hung, ring
from tests.unit.diagnosis.reports.jobs import job_of_four
from unickpt.diagnosis.agent.loop import Agent
from unickpt.diagnosis.agent.ring_looks import RingLooks
from unickpt.diagnosis.agent.server import Collector
from unickpt.diagnosis.host import stack_dumps
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.recording.records import Op, Phase
from unickpt.diagnosis.recording.ring import SUFFIX, Identity, RingReader, RingWriter
from unickpt.diagnosis.recording.ring_folder import read_folder, remove_old


def test_old_jobs_are_removed_with_all_their_files(tmp_path: Path) -> None:
    """Old unchanged folders of this user are removed, unless a process of the job is alive."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    own = f"unickpt-{os.geteuid()}-"
    for name, age_s, pid in ((f"{own}old", 1000, ended.pid), (f"{own}new", 0, ended.pid), (f"{own}lives", 1000, os.getpid())):
        folder = tmp_path / name
        ring(folder, 0, pid=pid)
        (folder / "agent").write_text("x")
        at = time.time() - age_s
        for path in (*folder.iterdir(), folder):
            os.utime(path, (at, at))
    (tmp_path / "else").mkdir()
    os.utime(tmp_path / "else", (1, 1))
    (tmp_path / f"{own}link").symlink_to(tmp_path / "else")
    left = ["else", f"{own}link", f"{own}lives", f"{own}new"]
    remove_old(tmp_path, older_than_s=500)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(left)
    remove_old(tmp_path / "nowhere", older_than_s=0)


def test_rings_of_another_host_are_of_unknown_processes(tmp_path: Path) -> None:
    who = dataclasses.replace(Identity.here(0, 1, "job"), host="elsewhere")
    RingWriter(tmp_path / f"0{SUFFIX}", who, capacity=8)
    who = dataclasses.replace(Identity.here(1, 2, "job"), boot="before")
    RingWriter(tmp_path / f"1{SUFFIX}", who, capacity=8)
    job = read_folder(tmp_path)
    assert job.states == {0: State.UNKNOWN, 1: State.DEAD}


def test_a_look_includes_new_records() -> None:
    from unickpt.diagnosis.agent.ring_looks import FEWEST, RECORDS, window

    assert window({}, {}, 0) == RECORDS
    assert window({0: 100, 1: 100}, {0: 150, 1: 120}, 20) == FEWEST
    assert window({0: 100, 1: 100}, {0: 150, 1: 120}, 0) == 2048
    assert window({0: 100, 1: 100}, {0: 150, 1: 120}, 1000) == 2100
    assert window({0: 1000, 1: 100}, {0: 3000, 1: 120}, 20) == 4040
    assert window({0: 1000}, {0: 3000, 1: 90_000}, 20) == RECORDS  # a rank that is new


def _write(ring: RingWriter, numbers: range, op: Op = Op.BARRIER) -> None:
    for number in numbers:
        ring.put(number, number, 0, number, number, number, 0, 0, 0, int(op), 0, 0, 0, 0, -1, 0, 0, 0)


def test_records_that_the_header_does_not_know_yet_are_read(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path / f"0{SUFFIX}", Identity.here(0, 1, "job"), capacity=1000)
    _write(ring, range(1, 1501))
    ring.state(heartbeat_ns=1, step=0, newest=1500, phase=0)
    _write(ring, range(1501, 2201))  # past the end of the file
    reader = RingReader(ring.path)
    assert reader.read(last=10).records["begun"].tolist() == list(range(2191, 2201))
    assert reader.read(last=900).records["begun"].tolist() == list(range(1301, 2201))
    ring.state(heartbeat_ns=1, step=0, newest=2200, phase=0)
    assert reader.read(last=10).records["begun"].tolist() == list(range(2191, 2201))
    _write(ring, range(2202, 2203))  # 2201 is being written by another thread
    assert reader.read(last=10).records["begun"].tolist() == [*range(2192, 2201), 2202]


def test_looks_keep_a_ring_open_until_it_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / f"0{SUFFIX}"
    first = RingWriter(path, Identity.here(0, 1, "first"), capacity=1000)
    _write(first, range(1, 4))
    looks = RingLooks(tmp_path)
    assert looks.read().ranks[0].records["begun"].tolist() == [1, 2, 3]
    first.list_communicator({"name": "all"})
    _write(first, range(4, 5))
    assert looks.read().ranks[0].records["begun"].tolist() == [1, 2, 3, 4]
    assert looks.read().ranks[0].communicators == [{"name": "all"}]
    second = RingWriter(path, Identity.here(0, 1, "second"), capacity=1000)
    _write(second, range(1, 2))
    assert [looks.read().ranks[0].identity.job for _ in range(2)] == ["second"] * 2
    looks.exits.close()


def test_looks_read_two_steps_and_search_for_steps_that_have_become_longer(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path / f"0{SUFFIX}", Identity.here(0, 1, "job"), capacity=20_000)
    looks, newest = RingLooks(tmp_path), 0

    def read(steps: int, calls: int) -> int:
        """Make steps with so many calls each, and return how many records a look reads."""
        nonlocal newest
        for _ in range(steps):
            _write(ring, range(newest + 1, newest + 1 + calls))
            _write(ring, range(newest + 1 + calls, newest + 2 + calls), Op.STEP)
            newest += calls + 1
        ring.state(heartbeat_ns=1, step=0, newest=newest, phase=0)
        return len(looks.read().ranks[0].records)

    assert read(100, 49) == 5000
    assert [read(2, 49) for _ in range(12)][2:] == [2 * (100 + 50)] * 10  # never all of them
    longer = [read(1, 2999) for _ in range(30)]
    assert longer[10:] == [2 * (3000 + 3000)] * 20
    looks.exits.close()


def test_a_job_has_moved_if_every_rank_has_made_a_call(tmp_path: Path) -> None:
    rings = [RingWriter(tmp_path / f"{rank}{SUFFIX}", Identity.here(rank, 2, "job"), capacity=100) for rank in range(2)]
    looks, newest = RingLooks(tmp_path), [0, 0]

    def moved(*ranks: int) -> bool:
        for rank in ranks:
            newest[rank] += 1
            _write(rings[rank], range(newest[rank], newest[rank] + 1))
        looks.read()
        return looks.moved

    assert [moved(0, 1), moved(0, 1), moved(0), moved(), moved(0, 1)] == [False, True, False, False, True]
    looks.exits.close()


def test_a_look_is_calm_if_it_finds_nothing_in_a_job_that_makes_steps(tmp_path: Path) -> None:
    made = {name: tmp_path / name for name in ("sound", "hung", "begun")}
    for folder in made.values():
        folder.mkdir()
    job_of_four(made["sound"])
    ring(made["begun"], 0, 1)
    now = time.monotonic_ns()
    for rank in range(2):  # eight steps of a second, and then rank 1 does not come
        waits = ring(made["hung"], rank, 2)
        for step in range(8):
            begin = now + (step - 48) * S
            call(waits, 2 * step + 1, begin, begin + S // 10, seq=step + 1, step=step)
            call(waits, 2 * step + 2, begin, begin + S, seq=step + 1, step=step, op=Op.STEP)
        if rank == 0:
            call(waits, 17, now - 40 * S, 0, seq=9, step=8)
        waits.state(heartbeat_ns=now, step=8, newest=17 - rank, phase=int(Phase.BACKWARD))
    calm = {}
    for name, folder in made.items():
        agent = Agent(folder, print, Collector())
        agent.look(read_folder(folder))
        calm[name] = agent.calm
    assert calm == {"sound": True, "hung": False, "begun": False}


def test_an_agent_ends_for_a_newer_one(tmp_path: Path) -> None:
    """A job was restarted in the same folder, which always has living ranks."""
    from unickpt.diagnosis.agent import loop

    hung(tmp_path, culprit=-1)
    options: dict[str, Any] = {"every_s": 0.05, "gives_way": True}
    thread = threading.Thread(target=loop.watch, args=(tmp_path, print), kwargs=options, daemon=True)
    thread.start()
    time.sleep(0.5)
    assert thread.is_alive()
    (started,) = tmp_path.glob(f"{loop.STARTED}-*")
    started.write_text("another one")
    thread.join(10)
    assert not thread.is_alive()


def test_stacks_are_omitted_if_there_is_no_room(tmp_path: Path) -> None:
    assert stack_dumps.listen(tmp_path / "nowhere" / "0.stacks") is None


def test_watching_ends_without_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from unickpt.diagnosis.agent import loop

    monkeypatch.setattr(loop, "_WITHOUT_RANKS_S", 0.2)
    thread = threading.Thread(target=loop.watch, args=(tmp_path, print), kwargs={"every_s": 0.05}, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
