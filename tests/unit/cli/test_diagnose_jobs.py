"""``unickpt diagnose`` without a folder, where several jobs are timed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unickpt.cli import diagnose_command
from unickpt.cli.main import main
from unickpt.diagnosis.recording.ring import Identity, RingWriter


def job(parent: Path, name: str, identity: Identity) -> Path:
    folder = parent / f"unickpt-{os.geteuid()}-{name}-{'0' * 31}{len(name)}"
    folder.mkdir(mode=0o700)
    RingWriter(folder / "00000.ring", identity, capacity=8)
    return folder


def test_several_running_jobs_are_named_with_their_commands_and_ended_ones_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diagnose_command, "SHARED_MEMORY", tmp_path)
    folders = [job(tmp_path, name, Identity.here(0, 4, name)) for name in ("a", "bb")]
    ended = job(tmp_path, "ccc", Identity(0, 2, 1 << 22, "a", "ccc", 0, 0))
    assert main(["diagnose"]) == 2
    said = capsys.readouterr().err
    for folder in folders:
        assert f"unickpt diagnose {folder}  # 4 ranks, began" in said
    assert f"rank 0 is process {os.getpid()}: " in said
    assert str(ended) not in said
