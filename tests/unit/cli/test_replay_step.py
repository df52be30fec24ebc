"""``unickpt replay-step``: what it asks of a job, and what it refuses."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint

import torch_unickpt
from tests.support import handmade
from unickpt.base.errors import ConfigError, MismatchError
from unickpt.base.step_replay import REFUSED, VARIABLE, ReplayRequest, asked, write_request
from unickpt.checkpoint.load.replayed import replayed, replayed_folder, replays, require_layout
from unickpt.checkpoint.save.requests import SaveOptions
from unickpt.training.witness.replay import records
from unickpt.training.witness.replay.records import Phase, Record, Row


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder with checkpoints of the steps 4 and 6. ``latest`` names the second one."""
    for step in (4, 6):
        handmade.save_single(tmp_path / "out", f"s{step}", step=step)
    return tmp_path / "out"


@pytest.fixture
def request_of(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ReplayRequest:
    """A request that the environment of this process names."""
    found = ReplayRequest(str(out), 4, 5, folder=str(tmp_path / "replay" / "run1"))
    write_request(found)
    monkeypatch.setenv(VARIABLE, found.folder)
    return found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["DIR"], "name a folder and a step"),
        (["DIR", "--step", "5"], "no complete checkpoint of step 5; there are those of the steps: 6, 4"),
        (["DIR", "--step", "4", "--until", "4"], "--until must be greater than --step"),
        (["DIR", "--step", "4", "--times", "1"], "--times from 2 to 100"),
        (["DIR", "--step", "4", "--out", "DIR/replay"], "is in the folder of the checkpoints"),
        (["DIR", "--step", "4", "--out", "DIR/.."], "is not empty"),
        (["DIR", "--step", "4", "--", "no-such-program"], "no-such-program: no such program"),
        (["--compare", "DIR"], "nothing is recorded there"),
        (["DIR", "--compare", "DIR"], "it takes no DIR and no COMMAND"),
        (["DIR", "--step", "4", "--", sys.executable, "-c", "raise SystemExit(3)"], "run1: the job ended with code 3"),
        (["DIR", "--step", "4", "--", sys.executable, "-c", "pass"], "run1: no rank has recorded anything"),
    ],
)
def test_what_cannot_be_repeated_is_said(words: list[str], said: str, out: Path, run: Any) -> None:
    before = sorted(out.rglob("*"))
    code, _, err = run("replay-step", *(word.replace("DIR", str(out)) for word in words))
    assert (code, err.count("\n")) == (2, 1)
    assert said in err
    assert sorted(out.rglob("*")) == before


@pytest.mark.parametrize("variable", ["UNICKPT_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"])
def test_a_job_that_would_not_see_unickpt_is_not_started(
    variable: str, out: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "0")
    code, _, err = run("replay-step", out, "--step", "4", "--", sys.executable, "-c", "raise SystemExit(3)")
    assert code == 2
    assert f"{variable}=0 is in the environment" in err


def test_without_a_command_it_prints_what_to_start_and_compares_later(out: Path, tmp_path: Path, run: Any) -> None:
    folder = tmp_path / "replay"
    code, said, _ = run("replay-step", out, "--step", "4", "--until", "6", "--out", folder)
    assert code == 0
    assert [line.strip() for line in said.splitlines() if VARIABLE in line] == [
        f"{VARIABLE}={folder / name}" for name in ("run1", "run2", "checkpoint")
    ]
    loads = asked({VARIABLE: str(folder / "checkpoint")})
    assert loads == ReplayRequest(str(out), 6, 6, folder=str(folder / "checkpoint"))
    code, _, err = run("replay-step", "--compare", folder)
    assert code == 2
    assert "run1: no rank has recorded anything" in err
    held = Row(6, Phase.HELD, -1, "w", 1)
    for name in ("run1", "run2", "checkpoint"):
        records.write(str(folder / name), Record(0, 1, "a", rows=[held]))
    assert run("replay-step", "--compare", folder)[0] == 0
    records.write(str(folder / "run2"), Record(0, 1, "a", rows=[replace(held, value=2)]))
    code, said, _ = run("replay-step", "--compare", folder)
    assert code == 1
    assert "NO_MAJORITY step 6: rank 0 (on a): w differs between the runs" in said
    assert "run 1 ends with the values of the checkpoint of step 6" in said
    (folder / "run2" / REFUSED).write_text("another layout")
    code, _, err = run("replay-step", "--compare", folder)
    assert (code, err) == (2, "unickpt: run2: another layout\n")


def test_a_job_that_repeats_a_step_saves_nothing(
    request_of: ReplayRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    for asynchronous in (False, True):
        options = SaveOptions(asynchronous=asynchronous)
        found = torch_unickpt.save_training(model, optimizer, tmp_path / "new" / "s1", step=1, options=options)
        assert not getattr(found, "committed", False)
    state = {"w": torch.ones(2)}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "new" / "dcp")
    assert caplog.text.count("is not saved: this job repeats a step") == 3
    assert not [path for path in (tmp_path / "new").rglob("*") if path.is_file()]


def test_it_loads_the_step_that_is_asked_and_no_other(request_of: ReplayRequest, out: Path, tmp_path: Path) -> None:
    assert replays(str(out)) == request_of == replays(str(out / "s6"))
    assert replays(str(tmp_path / "elsewhere")) is None
    found = replayed(request_of, str(out))
    assert (found.directory, found.name, found.step) == (str(out / "s4"), "s4", 4)
    assert replayed(request_of, str(out / "s6")).directory == str(out / "s4")
    (tmp_path / "link").symlink_to(out)
    assert replays(str(tmp_path / "link")) == request_of


def test_a_load_without_the_step_is_refused_with_the_reason(
    request_of: ReplayRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(request_of, step=5, until=6, folder=str(tmp_path / "replay" / "run2"))
    write_request(other)
    monkeypatch.setenv(VARIABLE, other.folder)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(MismatchError, match="has no complete checkpoint of step 5; there are those of the steps: 6, 4"):
        torch_unickpt.resume_or_start(model, torch.optim.SGD(model.parameters()), request_of.directory)
    assert "no complete checkpoint of step 5" in Path(other.folder, REFUSED).read_text()
    assert not [path for path in Path(request_of.directory).iterdir() if path.name.startswith("unickpt-writer")]


def test_another_layout_is_refused_unless_it_is_allowed(request_of: ReplayRequest) -> None:
    saved = {"world_size": 8, "mesh": {"dp": 8}, "of_an_older_release": 1}
    require_layout(request_of, saved, {"world_size": 8, "mesh": {"dp": 8}})
    with pytest.raises(MismatchError, match=r"was saved under on 8 ranks, and this job has on 4 ranks \(mesh, world_size\)"):
        require_layout(request_of, saved, {"world_size": 4, "mesh": {"dp": 4}})
    assert "--other-layout" in Path(request_of.folder, REFUSED).read_text()
    require_layout(replace(request_of, other_layout=True), saved, {"world_size": 4})


def test_a_folder_that_a_host_does_not_see_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert asked({}) is None
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="must be visible on all hosts"):
        asked()


def test_a_trainer_run_is_repeated_from_the_folder_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    """Trainer chooses the folder, with its own state in it, before DeepSpeed loads."""
    out = tmp_path / "out"
    for step in (4, 6):
        handmade.save_single(out / f"checkpoint-{step}", f"global_step{step}", step=step)
    first, last = out / "checkpoint-4", out / "checkpoint-6"
    request = ReplayRequest(str(out), 4, 6, folder=str(tmp_path / "replay" / "run1"))
    write_request(request)
    assert replayed_folder(str(out)) == "", "nothing is asked"
    monkeypatch.setenv(VARIABLE, request.folder)
    assert replayed_folder(str(out)) == str(first)
    assert replayed_folder(str(tmp_path)) == ""
    assert replays(str(first)) == replays(str(first / "global_step4")) == request
    assert replays(str(tmp_path / "other" / "checkpoint-4")) is None
    found = replayed(request, str(first))
    assert (found.directory, found.name, found.step) == (str(first / "global_step4"), "global_step4", 4)
    assert replayed(request, str(last)).refused.startswith(
        "unickpt replay-step: the job resumes from checkpoint-6, and step 4 is in checkpoint-4: pass that"
    )
    assert (Path(request.folder) / REFUSED).read_text().startswith("the job resumes from checkpoint-6")
    only_loads = replace(request, step=6)  # what the original run has saved, whatever the script names
    found = replayed(only_loads, str(first))
    assert (first / found.name).resolve() == last / "global_step6"
    monkeypatch.delenv(VARIABLE)
    code, said, _ = run("replay-step", str(out), "--step", "4", "--out", str(tmp_path / "empty"))
    assert (code, VARIABLE in said) == (0, True)
