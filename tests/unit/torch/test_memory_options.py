"""Checkpoints in memory of models with options of their own, and of one whose options change."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

import torch_unickpt
import unickpt
from torch_unickpt import MemoryOptions
from torch_unickpt.edge import RUNTIME
from unickpt.checkpoint.memory.host_folder import HostFolder, read_token
from unickpt.checkpoint.save import shutdown
from unickpt.checkpoint.save.requests import PendingSave


class Job:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def save(self, folder: Path, step: int, memory: MemoryOptions) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 8)).square().mean().backward()
        self.optimizer.step()
        saved = torch_unickpt.save_training(self.model, self.optimizer, folder / f"step{step}", step=step, memory=memory)
        if isinstance(saved, PendingSave):
            assert saved.wait()

    def loads_from(self, folder: Path, memory: MemoryOptions) -> int:
        other = Job(9)
        found = torch_unickpt.resume_or_start(other.model, other.optimizer, str(folder), memory=memory).step
        assert torch.equal(other.model.weight, self.model.weight)
        return found


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


def steps(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("*/manifest.json"))


def held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def test_a_newer_checkpoint_on_disk_is_loaded(tmp_path: Path, shared: Path) -> None:
    options, job = MemoryOptions(to_disk_every=3, folder=str(shared)), Job(0)
    for step in (1, 2, 3):
        job.save(tmp_path / "run", step, options)
    assert steps(tmp_path / "run") == ["step3"]
    assert job.loads_from(tmp_path / "run", options) == 3


def test_a_copy_of_a_folder_has_no_checkpoints_in_memory_of_the_other_job(tmp_path: Path, shared: Path) -> None:
    options, job = MemoryOptions(to_disk_every=2, folder=str(shared)), Job(0)
    one, other, moved = (tmp_path / name for name in ("one", "other", "moved"))
    for step in (1, 2):
        job.save(one, step, options)
    shutil.copytree(one, other)
    branched = Job(1)
    torch_unickpt.load_training(branched.model, branched.optimizer, one)
    job.save(one, 3, options)
    assert branched.loads_from(other, options) == 2
    branched.save(other, 3, options)
    branched.save(other, 5, options)
    assert job.loads_from(one, options) == 3
    assert read_token(str(one)) != read_token(str(other))
    token = read_token(str(one))
    one.rename(moved)
    one.symlink_to(moved)
    assert read_token(str(moved)) == read_token(str(one)) == token, "it is the same folder"
    one.unlink()
    assert read_token(str(moved)) == read_token(f"file://{moved}") == token
    assert torch_unickpt.resume_or_start(job.model, job.optimizer, f"file://{moved}", memory=options).step == 3


def test_each_model_has_the_options_of_its_own(tmp_path: Path, shared: Path) -> None:
    seldom = MemoryOptions(to_disk_every=10, folder=str(shared))
    often = MemoryOptions(to_disk_every=3, folder=str(shared))
    jobs = [(Job(1), tmp_path / "one", seldom), (Job(2), tmp_path / "two", often)]
    for step in range(1, 8):
        for job, folder, memory in jobs:
            job.save(folder, step, memory)
        if step == 3:
            before = held()
    assert steps(tmp_path / "one") == []
    assert steps(tmp_path / "two") == ["step3", "step6"]
    assert held() <= before
    assert [job.loads_from(folder, memory) for job, folder, memory in jobs] == [7, 7]
    shutdown.finish_all(ending=True)
    assert steps(tmp_path / "one") == ["step7"]
    assert steps(tmp_path / "two") == ["step3", "step6", "step7"]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_options_of_a_folder_may_change(tmp_path: Path, shared: Path, elsewhere: bool) -> None:
    job, folder = Job(1), tmp_path / "run"
    seldom = MemoryOptions(to_disk_every=10, folder=str(shared))
    often = MemoryOptions(to_disk_every=5, generations=3, folder=str(tmp_path if elsewhere else shared))
    for step in range(1, 4):
        job.save(folder, step, seldom)
    for step in range(4, 7):
        job.save(folder, step, often)
    assert steps(folder) == ([] if elsewhere else ["step5"])  # elsewhere, the count begins anew
    assert job.loads_from(folder, often) == 6
    shutdown.finish_all(ending=True)
    assert steps(folder)[-1] == "step6"
    assert (folder / "latest").read_text() == "step6"


def test_a_start_without_the_options_for_memory_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job, folder = Job(1), tmp_path / "run"
    job.save(folder, 1, MemoryOptions(to_disk_every=10))
    try:
        shutdown.finish_all(ending=True)
        other = Job(9)
        assert torch_unickpt.resume_or_start(other.model, other.optimizer, str(folder)).step == 1
        assert f"there are checkpoints of {folder} in the memory of this host" in caplog.text
        caplog.clear()
        job.loads_from(folder, MemoryOptions(to_disk_every=10))
        assert "does not look there" not in caplog.text
    finally:
        shutil.rmtree(HostFolder(MemoryOptions().folder, read_token(str(folder))).root)


def test_options_without_memory_are_none(tmp_path: Path) -> None:
    assert RUNTIME.memory(MemoryOptions(), unickpt.SaveOptions(), str(tmp_path)) is None
