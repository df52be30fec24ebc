"""``unickpt diagnose`` without a folder, where several jobs are timed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from unickpt.cli import diagnose_command
from unickpt.cli.main import main
from unickpt.diagnosis.recording.ring import Identity, RingWriter


def job(parent: Path, name: str, identity: Identity, round_: int = 1) -> Path:
    folder = parent / f"unickpt-{os.geteuid()}-{name}-{'0' * 31}{round_}"
    folder.mkdir(mode=0o700)
    RingWriter(folder / "00000.ring", identity, capacity=8)
    os.utime(folder, (round_, round_))
    return folder


def gone(name: str) -> Identity:
    return Identity(0, 2, 1 << 22, "a", name, 0, 0)


def test_several_running_jobs_are_named_with_their_commands_and_ended_ones_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diagnose_command, "SHARED_MEMORY", tmp_path)
    folders = [job(tmp_path, name, Identity.here(0, 4, name)) for name in ("a", "bb")]
    ended = job(tmp_path, "ccc", gone("ccc"))
    assert main(["diagnose"]) == 2
    said = capsys.readouterr().err
    for folder in folders:
        assert f"unickpt diagnose {folder}  # 4 ranks, began" in said
    assert f"rank 0 is process {os.getpid()}: " in said
    assert str(ended) not in said


def said_of(parent: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(diagnose_command, "SHARED_MEMORY", parent)
    assert main(["diagnose"]) == 0
    return capsys.readouterr().out


def test_of_a_running_job_with_several_rounds_the_newest_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job(tmp_path, "b", gone("b"), 3)
    job(tmp_path, "a", gone("a"), 1)
    newest = job(tmp_path, "a", Identity.here(0, 2, "a"), 2)
    said = said_of(tmp_path, monkeypatch, capsys)
    assert said.startswith(f"{newest}: the newest round of the running job, of 3 folders: 2 ranks, began")


def test_of_ended_jobs_the_last_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job(tmp_path, "b", gone("b"), 1)
    newest = job(tmp_path, "a", gone("a"), 2)
    assert said_of(tmp_path, monkeypatch, capsys).startswith(f"{newest}: the job that has ended last, of 2 folders")


def test_what_the_log_has_shown_is_shown_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = job(tmp_path, "a", gone("a"))
    entry = {"syndrome": "non-communication hang", "ranks": [3], "line": "unickpt HANG rank=3", "sentence": "rank 3 hangs"}
    told = [{**entry, "at_ns": at, "next_text": "look", "command": "top"} for at in (1, 2)]
    (folder / "verdicts.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in told))
    said = said_of(tmp_path, monkeypatch, capsys)
    assert said.count("unickpt HANG rank=3") == said.count("rank 3 hangs") == said.count("next: look") == 1
