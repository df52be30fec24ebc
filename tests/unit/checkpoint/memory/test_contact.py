"""What a person sees of the memory of a job: ``unickpt hosts``, ``unickpt inspect``, metrics and the report."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.memory_jobs import Job
from unickpt.base.memory_status import FILE, MemoryStatus, read_status, write_status
from unickpt.checkpoint.memory.contact import jobs, look, named
from unickpt.checkpoint.memory.generations import folder_of
from unickpt.cli.main import main
from unickpt.diagnosis.reports.html_report import memory_section
from unickpt.diagnosis.reports.metrics import HELP, exposition, of_memory
from unickpt.steering.wire import asking


def gone(job: Job) -> None:
    """End the processes of a job, with their sockets."""
    keepers = [each.keeper for tier in job.tiers for each in job.hosts_of(tier)]
    job.end()
    for keeper in keepers:
        if keeper is not None:
            keeper._listener.close()


def test_generations_replicas_and_age_are_shown(
    job: Callable[..., Job], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "published", lambda _: [])  # jobs of others on this machine
    running = job()
    running.save(1, 2)
    assert main(["hosts", "--memory-folder", str(tmp_path / "host1"), "--json"]) == 0
    text = capsys.readouterr().out
    (found,) = json.loads(text)["memory"]
    assert found["directory"] == running.checkpoints
    assert [host["ranks"] for host in found["hosts"]] == [[0, 1], [2]]
    assert [(each["step"], each["tag"], each["places"]) for each in found["generations"]] == [(2, "step2", 2), (1, "step1", 2)]
    assert all(0 <= each["age_s"] < 600 for each in found["generations"])
    assert [(held["own"], held["copies"]) for held in found["generations"][0]["held"]] == [(2, 1), (1, 2)]
    secrets = [host.address.rpartition("/")[2] for host in jobs(tmp_path / "host1")[0].hosts]
    assert len(secrets) == 2
    assert not any(secret in text for secret in secrets)
    assert main(["hosts", "--memory-folder", str(tmp_path / "host1")]) == 0
    shown = capsys.readouterr().out
    assert folder_of(max(running.inventory(1).files)) in shown
    assert "2 of each file" in shown

    shutil.rmtree(tmp_path / "host0")
    gone(running)
    (alone,) = jobs(tmp_path / "host1")
    assert [(row.step, row.places, row.hosts[0]) for row in look(alone)] == [(2, 1, None), (1, 1, None)]
    assert main(["hosts", "--memory-folder", str(tmp_path / "host1")]) == 0
    assert "does not answer" in capsys.readouterr().out


def test_a_generation_is_inspected_by_its_url_and_by_its_folder(
    job: Callable[..., Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = job(replicas=0)
    running.save(1, 2)
    (folder,) = (tmp_path / "host0").iterdir()
    older, newer = sorted(running.inventory(0).files)
    token = folder.name.rpartition("-")[2]
    places = ("--memory-folder", str(tmp_path / "host0"), "--json")
    for name, step in (
        (f"memory://{token}/{folder_of(older)}", 1), (f"memory://{token}", 2), (str(folder), 2),
        (str(folder / folder_of(newer)), 2),
    ):  # fmt: skip
        assert main(["inspect", name, *places]) == 0, name
        document = json.loads(capsys.readouterr().out)
        assert document["checkpoint"]["step"] == step
        assert document["checkpoint"]["problem"] is None, "the file of rank 2 is on the other host"
    gone(running)  # the file of rank 2 is out of reach
    assert main(["inspect", str(folder / folder_of(newer)), *places]) == 1
    assert "rank00002" in json.loads(capsys.readouterr().out)["checkpoint"]["problem"]
    assert main(["inspect", str(folder), *places]) == 2
    assert "unickpt hosts lists" in capsys.readouterr().err
    assert main(["inspect", f"memory://{'0' * 32}", *places]) == 2
    assert named(str(tmp_path), tmp_path) is None


def test_the_state_of_the_tier_is_in_metrics_and_report(job: Callable[..., Job], tmp_path: Path) -> None:
    running = job()
    running.save(1)
    (next((tmp_path / "host1").iterdir()) / "spare" / "copy-rank00000.safetensors").mkdir()
    assert running.turns(2, 3) == ["memory", "disk"]  # without copies, so that the next one is on disk
    told = running.statuses[-1]
    assert (told.step, told.confirmed, told.uncopied, told.failed, told.skipped) == (1, 1, 1, 0, 1)
    assert (told.generation in running.inventory(0).files) is True
    assert 0 < told.confirm_s == told.longest_s < 60
    assert [(each.rank, each.held_bytes > 0) for each in told.hosts] == [(0, True), (2, True)]
    write_status(tmp_path, told)
    assert read_status(tmp_path) == told
    text = exposition(of_memory(told))
    assert all(f"# HELP {name} " in text for name in HELP if name.startswith("unickpt_memory_"))
    assert 'unickpt_memory_saves_total{outcome="uncopied"} 1.0' in text
    section = memory_section(told, told.begun_s + 5.0)
    assert section is not None
    assert section["age_s"] == 5.0


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"hosts": 3}', '{"hosts": [], "step": "x"}', '{"hosts": [], "other": 1}']
)
def test_a_malformed_state_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert read_status(tmp_path) is None
    assert memory_section(None, 0.0) is None
    assert of_memory(None) == []
    assert read_status(tmp_path / "none") is None
    write_status(tmp_path / "none", MemoryStatus())  # no folder: no error
