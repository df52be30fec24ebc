"""``unickpt latest``: the path to resume from, and the exit codes without one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import trainer_run
from unickpt.errors import StorageError
from unickpt.storage.posix import PosixStorage
from unickpt.testing import handmade


def test_latest_prints_the_checkpoint_that_a_job_resumes_from(tmp_path: Path, run: Any, run_json: Any) -> None:
    folder = trainer_run(tmp_path / "out", 3, 6)
    assert run("latest", folder) == (0, f"{folder}/checkpoint-6\n", "")
    assert run("latest", folder / "checkpoint-6") == (0, f"{folder}/checkpoint-6/global_step6\n", "")
    found = {"schema": 1, "path": f"{folder}/checkpoint-6", "checkpoint": f"{folder}/checkpoint-6/global_step6", "step": 6}
    assert run_json("latest", folder) == (0, found)
    state = folder / "checkpoint-6" / "trainer_state.json"
    state.write_text('{"log_history": [')  # killed while it was written
    assert run("latest", folder) == (0, f"{folder}/checkpoint-3\n", "")
    state.write_text("{}")
    (folder / "checkpoint-6" / "global_step6" / "data" / "rank00000.safetensors").unlink()
    assert run("latest", folder) == (0, f"{folder}/checkpoint-3\n", "")
    (folder / "checkpoint-3" / "trainer_state.json").unlink()
    (folder / "checkpoint-3" / "training_args.bin").touch()
    code, out, err = run("latest", folder)
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "no complete checkpoint; checkpoint-6/global_step6: " in err


def test_latest_needs_no_trainer_state_outside_of_a_trainer_run(tmp_path: Path, run: Any) -> None:
    folder = trainer_run(tmp_path / "out", 3, 6)  # as a script of accelerate writes them
    for path in folder.rglob("trainer_state.json"):
        path.unlink()
    assert run("latest", folder) == (0, f"{folder}/checkpoint-6\n", "")


def test_latest_of_a_save_directory_looks_at_files_and_not_at_the_pointer(tmp_path: Path, run: Any) -> None:
    for step in (9, 10):
        handmade.save_single(tmp_path / "out", f"global_step{step}", step=step)
    (tmp_path / "out" / "latest").write_text("global_step9")
    checkpoint = tmp_path / "out" / "global_step10"
    assert run("latest", tmp_path / "out") == (0, f"{checkpoint}\n", "")
    assert run("latest", checkpoint) == (0, f"{checkpoint}\n", "")


def test_latest_names_a_checkpoint_of_deepspeed_itself(tmp_path: Path, run: Any) -> None:
    folder = trainer_run(tmp_path / "out", 3)
    own = folder / "checkpoint-6" / "global_step6"
    own.mkdir(parents=True)
    (own / "mp_rank_00_model_states.pt").touch()
    (own.parent / "latest").write_text("global_step6")
    code, out, err = run("latest", folder)
    assert (code, out) == (0, f"{folder}/checkpoint-3\n")
    assert "other programs wrote checkpoint-6 (DeepSpeed)" in err
    shutil.rmtree(folder / "checkpoint-3")
    assert run("latest", folder)[0] == 1  # not a first start


def test_latest_distinguishes_a_first_start_from_a_failure(
    tmp_path: Path, run: Any, run_json: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run("latest", tmp_path / "nowhere")
    assert (code, out) == (3, "")
    assert "no checkpoint of unickpt is there" in err
    assert run_json("latest", tmp_path) == (3, {"schema": 1, "path": None, "checkpoint": None, "step": None})
    assert run("latest", __file__)[0] == 2
    handmade.save_single(tmp_path / "out")

    def refuse(self: PosixStorage, *_: Any) -> None:
        raise StorageError(f"{self}: stale file handle")

    monkeypatch.setattr(PosixStorage, "folders", refuse)
    code, out, err = run("latest", tmp_path / "out")
    assert (code, out) == (2, "")
    assert "stale file handle" in err
