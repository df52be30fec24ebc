"""A rank that hangs before it records anything: the log says which one it is, and where, after ten seconds."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.repository import REPO
from tests.unit.diagnosis.agent.made import hung
from unickpt.base.process_identity import boot_id
from unickpt.diagnosis.agent.loop import Agent
from unickpt.diagnosis.host import early_stacks
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.host.stack_dumps import Frame
from unickpt.diagnosis.recording.launched import AbsentRank, LaunchNote
from unickpt.diagnosis.recording.records import Phase
from unickpt.diagnosis.recording.ring_folder import read_folder
from unickpt.diagnosis.reports.start_text import start_notices
from unickpt.diagnosis.reports.verdict_text import render_waits
from unickpt.diagnosis.snapshot.codec import decode_snapshot, encode_snapshot
from unickpt.diagnosis.snapshot.snapshot import Snapshot, take_snapshot
from unickpt.diagnosis.snapshot.stacks import with_stacks
from unickpt.diagnosis.snapshot.steps import STEP
from unickpt.testing.launch import environment

LOADS = """
import time
import torch

def load():
    print("loads", flush=True)
    while True:
        time.sleep(1)

load()
"""


def seen(folder: Path, since_s: float, **absent: AbsentRank) -> Snapshot:
    hung(folder, since_s=since_s)
    (folder / "00002.ring").unlink()
    return replace(take_snapshot(read_folder(folder)), absent={int(rank[1:]): one for rank, one in absent.items()})


@pytest.fixture
def loading(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Rank 2, which loads its model without end."""
    program = tmp_path / "train.py"
    program.write_text(LOADS)
    variables = environment(RANK="2", UNICKPT_TIMING="1", UNICKPT_AUTOLOAD="1")
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, cwd=REPO, env=variables) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"loads\n"
        time.sleep(0.2)
        yield process
        process.kill()


def test_the_rank_its_process_and_its_place_are_told_once(tmp_path: Path, loading: subprocess.Popen[bytes]) -> None:
    folder = tmp_path / "rings"
    folder.mkdir(mode=0o700)
    host = socket.gethostname()
    note = LaunchNote(0, 4, host, boot_id(), os.getpid(), 1)
    (folder / f"launched-{host}").write_text(json.dumps(asdict(note)))
    hung(folder, since_s=30)
    (folder / "00002.ring").unlink()
    lines: list[str] = []
    agent = Agent(folder, lines.append)
    for _ in range(2):
        agent.look(read_folder(folder))
    assert len(lines) == 2
    what = "ranks 0, 1, 3 wait since "
    assert lines[0].startswith(f"unickpt: {what}")
    where = f"rank 2 has not begun to record: process {loading.pid} on {host} is sleeping, at "
    assert f"{where}{tmp_path.name}/train.py:8 (load)" in lines[0]
    assert lines[1].endswith(f"if it stays so, look at {tmp_path.name}/train.py:8")
    assert early_stacks.path_of(loading.pid).is_file()
    found = with_stacks(take_snapshot(read_folder(folder)), [folder], [0, 2])  # as ``unickpt diagnose`` asks for them
    assert f"rank 2 is at {tmp_path.name}/train.py:8 (load)" in render_waits(found)[0]


def test_files_of_processes_that_have_ended_are_removed(loading: subprocess.Popen[bytes]) -> None:
    path = early_stacks.path_of(loading.pid)
    loading.kill()
    loading.wait()
    assert path.is_file()
    done = subprocess.run([sys.executable, "-c", "import torch"], cwd=REPO, env=environment(RANK="0", UNICKPT_TIMING="1"))
    assert done.returncode == 0
    assert not path.exists()


@pytest.mark.parametrize(("phase", "word"), [(Phase.EVALUATION, "evaluates"), (Phase.CHECKPOINT, "saves"), (Phase.FORWARD, "")])
def test_who_asks_is_told_which_rank_does_what_may_take_long(tmp_path: Path, phase: Phase, word: str) -> None:
    hung(tmp_path, since_s=30)
    found = take_snapshot(read_folder(tmp_path))
    one = replace(found.ranks[2], phase=int(phase), step=7, host="node2")
    (text,) = render_waits(replace(found, ranks={**found.ranks, 2: one}))
    assert text.endswith(f"for rank 2, so far 30 s; rank 2 on node2 {word}, in step 7" if word else "for rank 2, so far 30 s")


def test_who_asks_is_told_of_waits_that_no_record_shows(tmp_path: Path) -> None:
    """As those of the reducer of ``DistributedDataParallel``."""
    hung(tmp_path, since_s=30)
    found = take_snapshot(read_folder(tmp_path))
    rows = found.rows.copy()
    rows["native"], rows["blocked"] = rows["blocked"] > 0, 0
    (text,) = render_waits(replace(found, rows=rows))
    assert text.endswith("for rank 2, so far 30 s")
    rows["native"] = False
    assert render_waits(replace(found, rows=rows)) == []


def test_what_is_said_of_ranks_that_have_not_begun(tmp_path: Path) -> None:
    asleep = AbsentRank(17, "node2", State.SLEEPING)
    (text, then), *others = start_notices(seen(tmp_path, 30, r2=asleep)).values()
    assert not others
    assert "for rank 2; rank 2 has not begun to record: process 17 on node2 is sleeping" in text
    assert then.endswith("type on node2: py-spy dump --pid 17")
    placed = replace(asleep, stack=(Frame("read", "torch/data.py", 3), Frame("load", "run/train.py", 9, own=True)))
    ((text, then),) = start_notices(seen(tmp_path, 30, r2=placed)).values()
    assert "is sleeping, at run/train.py:9 (load)" in text
    ((_, then),) = start_notices(seen(tmp_path, 30, r2=AbsentRank(0, "node2", State.UNKNOWN))).values()
    assert "in its log on node2" in then
    ((text, then),) = start_notices(seen(tmp_path, 30)).values()
    assert "no host has told of rank 2" in text
    assert start_notices(seen(tmp_path, 30), whole=False) == {}
    assert "launcher of rank 2" in then


def test_nothing_is_said_at_once_nor_once_there_are_steps(tmp_path: Path) -> None:
    asleep = AbsentRank(17, "node2", State.SLEEPING)
    assert start_notices(seen(tmp_path, 8, r2=asleep)) == {}
    late = seen(tmp_path, 30, r2=asleep)
    steps = np.zeros(1, STEP)
    assert start_notices(replace(late, steps=steps)) == {}


def test_the_place_of_a_rank_that_has_not_begun_travels(tmp_path: Path) -> None:
    placed = AbsentRank(17, "node2", State.SLEEPING, (Frame("load", "run/train.py", 9, own=True),))
    found = decode_snapshot(encode_snapshot(seen(tmp_path, 30, r2=placed))).absent[2]
    assert (found, found.stack[0].own) == (placed, True)
