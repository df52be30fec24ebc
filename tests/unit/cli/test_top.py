"""``unickpt top``: one look at a job."""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.unit.diagnosis.agent.made import hung
from tests.unit.diagnosis.reports.jobs import job_of_four
from unickpt.cli.main import main
from unickpt.diagnosis.detectors.examine import examine
from unickpt.diagnosis.hardware.events import EventKind, HostEvent, HostHardware
from unickpt.diagnosis.recording.ring_folder import read_folder
from unickpt.diagnosis.reports.top_view import top_view
from unickpt.diagnosis.reports.verdict_text import render_all
from unickpt.diagnosis.snapshot.snapshot import Snapshot, take_snapshot

HOST = socket.gethostname()


def view(snapshot: Snapshot) -> Any:
    verdicts = examine(snapshot, after_s=5).verdicts
    return top_view(snapshot, verdicts, render_all(verdicts, snapshot))


def test_a_hang_is_shown_with_who_waits_for_whom(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hung(tmp_path)
    assert main(["top", str(tmp_path), "--once", "--after", "5"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].startswith("4 ranks on 1 host, step 20, ")
    assert lines[1].startswith("rank 2 has not entered all_reduce #3")
    assert lines[2].startswith("next: the others wait for rank 2")
    assert [HOST, "0-3", "20"] in [line.split()[:3] for line in lines]
    assert "ranks 0, 1, 3 wait in all_reduce #3 of the data parallel group of ranks 0 to 3 for rank 2" in out
    assert "3 ranks as usual, in step 20" in out
    (row,) = [line for line in lines if line.startswith("   2  ")]
    assert row.split()[:3] == ["2", HOST, "20"]


def test_a_sound_job_has_no_row_for_each_rank(tmp_path: Path) -> None:
    shown = view(take_snapshot(job_of_four(tmp_path)))
    assert "10.00 steps per second" in shown.head
    assert (shown.verdicts, shown.waits) == ((), ())


def test_a_host_shows_the_newest_of_its_hardware(tmp_path: Path) -> None:
    hung(tmp_path)
    snapshot = take_snapshot(read_folder(tmp_path))
    fell = HostEvent(EventKind.XID, "0000:3b:00", snapshot.now_ns, snapshot.now_ns, code=79)
    (row,) = view(dataclasses.replace(snapshot, hardware={HOST: HostHardware((), (fell,))})).hosts
    assert str(row[-1]).startswith("Xid 79 (fallen off the bus) of GPU 0000:3b:00 at ")


def test_an_agent_that_has_gone_does_not_matter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hung(tmp_path)
    descriptor = os.open(tmp_path / "agent", os.O_CREAT | os.O_WRONLY, 0o600)
    os.write(descriptor, b"http://127.0.0.1:9/" + b"0" * 32 + b"\n")
    os.close(descriptor)
    assert main(["top", str(tmp_path), "--once"]) == 0
    assert capsys.readouterr().out.startswith("4 ranks on 1 host")
