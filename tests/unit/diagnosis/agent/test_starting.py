"""How training starts its agent: with nothing that lies in the working directory, and with the secret where nobody looks."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from tests.support.repository import REPO
from tests.unit.diagnosis.agent.made import hung
from unickpt.base.errors import UnickptError
from unickpt.base.prometheus import Scrape
from unickpt.diagnosis.agent import launch, loop
from unickpt.diagnosis.agent.server import Collector, fetch
from unickpt.diagnosis.recording.ring_folder import read_folder
from unickpt.diagnosis.snapshot.snapshot import take_snapshot
from unickpt.testing.launch import environment, free_port

STARTS = """
import sys, time, torch.distributed as dist
from pathlib import Path
from types import SimpleNamespace
from unickpt.diagnosis.agent import launch as starting, loop as watching
from unickpt.diagnosis.agent.server import Collector, fetch
from unickpt.diagnosis.snapshot.snapshot import take_snapshot
from unickpt.base.errors import UnickptError
from unickpt.diagnosis.recording.ring_folder import read_folder
store = dist.HashStore()
process = starting.start(Path(sys.argv[1]), 0, store)
print(process.pid, flush=True)
sys.stdin.read()
process.kill()
process.wait()
"""
PLANTED = "import os, sys; open({mark!r}, 'a').write(__name__ + ' '); os._exit(3)\n"
SHADOWED = ("argparse", "json", "numpy", "unickpt", "site", "encodings", "prometheus_client")


@pytest.fixture
def downloaded(tmp_path: Path) -> Path:
    """A folder with modules of another origin, and training's working directory."""
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name in SHADOWED:
        (folder / f"{name}.py").write_text(PLANTED.format(mark=str(tmp_path / "executed")))
    return folder


@pytest.mark.parametrize("found_by", ["PYTHONPATH", "directory"])
def test_the_agent_runs_nothing_from_the_working_directory(tmp_path: Path, downloaded: Path, found_by: str) -> None:
    """And gets its secret through a pipe: not by its command line, nor its environment."""
    rings = tmp_path / "rings"
    hung(rings, since_s=130)
    script = tmp_path / "script" / "train.py"
    script.parent.mkdir()
    env = environment()
    if found_by == "PYTHONPATH":
        script.write_text(STARTS)
    else:  # beside the script, which names its own folder
        shutil.copytree(REPO / "unickpt", script.parent / "unickpt", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(REPO / "_unickpt_autoload.py", script.parent)
        script.write_text(STARTS)
        env["PYTHONPATH"] = ""
    with subprocess.Popen(
        [sys.executable, str(script), str(rings)], cwd=downloaded, env={**env, "UNICKPT_AUTOLOAD": "0"}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            agent = psutil.Process(int(process.stdout.readline()))
            end = time.monotonic() + 60
            while not (rings / "verdicts.jsonl").exists() and not (tmp_path / "executed").exists():
                assert time.monotonic() < end
                time.sleep(0.1)
            assert not (tmp_path / "executed").exists(), (tmp_path / "executed").read_text()
            address = launch.read_address(rings)
            secret = address.rpartition("/")[2]
            assert len(secret) == 32
            assert secret not in " ".join(agent.cmdline())
            assert secret not in str(agent.environ())
            assert agent.cwd() == "/"
            found = json.loads(urllib.request.urlopen(f"{address}/verdicts").read())
            assert found["verdicts"][0]["sentence"].startswith("rank 2 has not entered")
        finally:
            process.communicate("")
    assert sorted(path.name for path in downloaded.iterdir()) == sorted(f"{name}.py" for name in SHADOWED)


def test_only_an_address_in_the_store_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    store.set(launch._key(), "http://elsewhere:80/x?y\x1b[2J")
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    launch._find(process, tmp_path, store)
    assert process.communicate()[0] == b""
    assert "holds no address" in caplog.text
    assert "\x1b" not in caplog.text
    assert not list(tmp_path.iterdir())


def test_agents_of_several_hosts_find_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As training starts them on two hosts: the second one gets the address of the first one from the store."""
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    first, second = tmp_path / "a", tmp_path / "b"
    hung(first, since_s=20)
    second.mkdir()
    for rank in (2, 3):
        (first / f"{rank:05d}.ring").rename(second / f"{rank:05d}.ring")
    store = dist.HashStore()
    scrape = Scrape(free_port(), targets=str(tmp_path / "targets"), job="llama")
    agents = [launch.start(second, 2, store), launch.start(first, 0, store, scrape)]
    try:
        end = time.monotonic() + 90
        found: set[int] = set()
        while found != {0, 1, 2, 3}:
            assert time.monotonic() < end, found
            time.sleep(0.2)
            with contextlib.suppress(OSError, UnickptError):
                found = set(fetch(launch.read_address(first)).ranks)
        assert launch.read_address(second) == launch.read_address(first) == store.get(launch._key()).decode()
        (file,) = (tmp_path / "targets").iterdir()
        (target,) = json.loads(file.read_text())[0]["targets"]
        assert (
            'unickpt_rank_step{job_name="llama",rank="3"} '
            in urllib.request.urlopen(f"http://{target}/metrics").read().decode()
        )
    finally:
        for agent in agents:
            assert agent is not None
            agent.kill()
            agent.wait()


def test_hosts_whose_folders_have_the_same_name_are_several_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they have in shared memory: all hosts of a job agree on one name."""
    names = []
    for host in "ab":
        monkeypatch.setattr(loop, "socket", SimpleNamespace(gethostname=lambda host=host: host))
        names.append(loop.name_of(tmp_path))
    assert names[0] != names[1]
    hung(tmp_path)
    snapshot = take_snapshot(read_folder(tmp_path))
    collector = Collector()
    for name in names:
        collector.take(name, snapshot)
    assert len(collector.others()) == 2
