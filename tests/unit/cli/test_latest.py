"""``unickpt latest``: the path to resume from, and the exit codes without one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import unickpt
from tests.hostile.source_folders import deepspeed, transformers
from tests.support import handmade
from tests.support.cli import trainer_run
from unickpt.base.errors import StorageError
from unickpt.checkpoint.format.witnessed import Passed
from unickpt.checkpoint.storage.posix import PosixStorage
from unickpt.cli.locate import lost


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


def test_latest_witnessed_is_not_newer_than_the_last_passed_step(tmp_path: Path, run: Any, run_json: Any) -> None:
    out = tmp_path / "out"
    first = handmade.save_single(out, "s3", step=3)
    code, printed, err = run("latest", out, "--witnessed")
    assert (code, printed) == (1, "")
    assert f"no checkpoint that the witness has passed; {first} is complete" in err
    last = handmade.save_single(out, "s6", step=6, witness=Passed(4, ("replicas", "rest")))
    assert run("latest", out, "--witnessed") == (0, f"{first}\n", "")
    assert run("latest", out) == (0, f"{last}\n", "")
    assert unickpt.latest_checkpoint(out, witnessed=True) == str(first)
    assert run("latest", last, "--witnessed")[0] == 1
    assert "witness: passed until step 4, checks: replicas, rest\n" in run("inspect", last)[1]
    assert run_json("inspect", last)[1]["checkpoint"]["witness"] == Passed(4, ("replicas", "rest")).as_json()
    assert run_json("inspect", first)[1]["checkpoint"]["witness"] is None
    assert run("latest", tmp_path / "new", "--witnessed")[0] == 3


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


def test_a_lost_storage_is_no_first_start(tmp_path: Path, run: Any) -> None:
    """A script that starts from the beginning on code 3 would train again."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for directory, reason in (
        (
            tmp_path / "mnt" / "runs" / "a",
            f"the folder above, {tmp_path / 'mnt' / 'runs'}, does not exist; is its storage mounted?",
        ),
        (tmp_path / "file" / "a", f"{tmp_path / 'file'} is a file"),
        (tmp_path / "link", f"is a link to {tmp_path / 'gone'}, which does not exist"),
    ):
        code, out, err = run("latest", directory)
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert reason in err
    with pytest.raises(SystemExit) as caught:  # an unset variable
        run("latest", "")
    assert caught.value.code == 2


def test_a_mount_point_without_its_storage_is_lost(tmp_path: Path) -> None:
    table = tmp_path / "fstab"
    point = tmp_path / "mnt with space"
    (point / "runs").mkdir(parents=True)
    options = f"# comment\nserver:/a {str(point).replace(' ', chr(92) + '040')} nfs"
    table.write_text(f"{options} defaults 0 0\nproc /proc proc defaults 0 0\n")
    for directory in (point, point / "runs", point / "runs" / "a"):
        assert lost(str(directory), table=table) == f"{point} is not mounted, although {table} has it"
    assert lost("/proc/runs", table=table) == ""  # it is mounted
    assert lost(str(tmp_path / "a"), table=table) == ""
    table.write_text(f"{options} defaults,noauto 0 0\n")
    assert lost(str(point), table=table) == ""
    assert lost(str(point), table=tmp_path / "missing") == ""


@pytest.mark.parametrize("command", ["latest", "inspect", "verify"])
def test_checkpoints_of_other_programs_are_one_line_that_names_the_command(command: str, tmp_path: Path, run: Any) -> None:
    for step in (5, 10):
        place = tmp_path / "out" / f"checkpoint-{step}"
        deepspeed(place / f"global_step{step}")
        (place / "latest").write_text(f"global_step{step}")
    newest = tmp_path / "out" / "checkpoint-10"
    for directory, source in (
        (tmp_path / "out", newest),
        (newest, newest),
        (newest / "global_step10", newest / "global_step10"),
    ):
        code, out, err = run(command, directory)
        assert (code, out) == (1 if command == "latest" else 2, "")
        assert err.count("\n") == 1
        assert f"'unickpt convert {source} DIR' makes one of it" in err


def test_a_model_is_no_checkpoint_to_resume_from(tmp_path: Path, run: Any) -> None:
    assert run("latest", transformers(tmp_path / "model"))[0] == 3
