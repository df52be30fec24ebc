"""A folder into which unickpt and then DeepSpeed have saved: commands say which checkpoint they read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import handmade
from unickpt.checkpoint.load.validation import newer_of_deepspeed
from unickpt.checkpoint.storage.open import open_storage
from unickpt.cli.main import main


@pytest.fixture
def both(tmp_path: Path) -> Path:
    folder = handmade.save_single(tmp_path / "run")
    for name in ("mp_rank_00_model_states.pt", "extra.pt"):
        (folder / name).write_bytes(b"")
    return folder


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_command_says_that_deepspeed_has_saved_over_the_checkpoint(
    both: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, str(both)]) == 0
    err = capsys.readouterr().err
    assert "DeepSpeed has saved here since: mp_rank_00_model_states.pt is newer than manifest.json" in err
    assert "unickpt convert" in err


def test_an_older_file_and_one_of_the_program_say_nothing(both: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.utime(both / "mp_rank_00_model_states.pt", (0, 0))
    assert newer_of_deepspeed(open_storage(both)) == ""
    assert main(["verify", str(both)]) == 0
    assert capsys.readouterr().err == ""
