"""Files that another user plants in shared memory are neither followed nor truncated nor removed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from tests.support.rank_threads import on_all_ranks
from tests.support.repository import REPO
from tests.unit.diagnosis.agent.made import hung, ring
from unickpt.checkpoint.coordination import host_peers
from unickpt.cli import diagnose_command
from unickpt.cli.main import main
from unickpt.diagnosis.agent import loop
from unickpt.diagnosis.agent.loop import Agent
from unickpt.diagnosis.agent.telling import VERDICTS
from unickpt.diagnosis.host import stack_dumps
from unickpt.diagnosis.recording.ring import SUFFIX
from unickpt.diagnosis.recording.ring_folder import own_jobs, read_folder
from unickpt.testing.launch import environment

OTHER = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="what another user has planted can be made by root only")

PRECIOUS = b"the only copy"


def plant(*commands: str) -> None:
    """Run as another user of this machine."""
    for command in commands:
        subprocess.run(["/bin/sh", "-c", command], user=OTHER, group=OTHER, extra_groups=[], check=True, cwd="/")


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A file that nobody but its owner may change."""
    path = tmp_path / "precious"
    path.write_bytes(PRECIOUS)
    return path


@pytest.fixture
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of all users, as /dev/shm is one."""
    path = tmp_path_factory.mktemp("shm")
    for parent in list(path.parents)[:3]:  # a worker of pytest-xdist has a directory of its own
        if parent.stat().st_uid == os.getuid() and parent.name.startswith(("pytest", "popen")):
            parent.chmod(0o755)
    path.chmod(0o1777)
    return path


TIMED = """
import os, sys
from pathlib import Path
import torch.distributed as dist
from unickpt.diagnosis import session
from unickpt.base.options.job import TimingOptions
session.SHARED_MEMORY = Path(sys.argv[1])
rank, world = int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=world)
begun = session.start(TimingOptions(enabled=True, watch=False, records=64), dict)
dist.barrier()
print(begun.folder if begun else "none")
"""


def timed(shared: Path, store: Path, world: int) -> list[Path]:
    """Start a job whose ranks time their collectives; the folder that each of them uses."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TIMED, str(shared), str(store), str(rank), str(world)], cwd=REPO, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env=environment(GLOO_SOCKET_IFNAME="lo"),
        )
        for rank in range(world)
    ]  # fmt: skip
    found = [process.communicate(timeout=120) for process in processes]
    assert all(process.returncode == 0 for process in processes), found
    return [Path(out.splitlines()[-1]) for out, _ in found]


@as_root
def test_a_folder_planted_by_another_user_is_not_used(shared: Path, tmp_path: Path, precious: Path) -> None:
    """With links in the places of the files that a rank makes there."""
    guessed = shared / f"unickpt-{os.getuid()}" / "job"
    plant(
        f"mkdir -m 777 -p {guessed.parent} {guessed}",
        f"ln -s {precious} {guessed}/00000{stack_dumps.SUFFIX}",
        f"ln -s {precious} {guessed}/00000{SUFFIX}",
    )
    folders = timed(shared, tmp_path / "store", world=2)
    assert precious.read_bytes() == PRECIOUS
    assert len(set(folders)) == 1
    folder = folders[0]
    assert guessed not in (folder, *folder.parents)
    about = folder.lstat()
    assert (about.st_uid, about.st_mode & 0o7777) == (os.getuid(), 0o700)
    assert (folder / f"00000{SUFFIX}").stat().st_mode & 0o077 == 0
    assert sorted(read_folder(folder).ranks) == [0, 1]
    assert own_jobs(shared) == [folder]
    assert re.fullmatch(rf"unickpt-{os.getuid()}-job-[0-9a-f]{{32}}", folder.name)


@pytest.mark.parametrize("kind", ["ring", "ring of a process", "stacks", "started", "verdicts"])
def test_no_file_of_a_job_is_created_through_a_link(tmp_path: Path, precious: Path, kind: str) -> None:
    folder = tmp_path / "rings"
    hung(folder, since_s=130)
    name = {
        "ring": f"00007{SUFFIX}", "ring of a process": f"00007{SUFFIX}.{os.getpid()}", "stacks": "00000.stacks",
        "started": f"{loop.STARTED}-{loop.socket.gethostname()}", "verdicts": VERDICTS,
    }[kind]  # fmt: skip
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(precious)
    if kind.startswith("ring"):
        ring(folder, 7, world=8)
    elif kind == "stacks":
        listening = stack_dumps.listen(folder / name)
        assert listening is not None
        stack_dumps.ignore()
        listening.close()
    elif kind == "started":
        options = {"every_s": 0.05, "gives_way": True}
        thread = threading.Thread(target=loop.watch, args=(folder, lambda _: None), kwargs=options, daemon=True)
        thread.start()
        time.sleep(0.3)
        (folder / name).unlink()
        (folder / name).write_text("another one")
        thread.join(10)
        assert not thread.is_alive()
    else:
        Agent(folder, lambda _: None).look(read_folder(folder))
    assert precious.read_bytes() == PRECIOUS


@as_root
@pytest.mark.parametrize("kind", ["link", "fifo", "of another user", "folder"])
def test_only_files_of_the_owner_are_read(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "rings"
    hung(folder)
    path = folder / f"00009{SUFFIX}"
    if kind == "link":
        (folder / f"00003{SUFFIX}").rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        (folder / f"00003{SUFFIX}").rename(path)
        os.chown(path, OTHER, OTHER)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(read_folder(folder)), daemon=True)
    thread.start()
    thread.join(10)
    (job,) = found
    assert path.name in job.unreadable[0]  # type: ignore[attr-defined]
    assert set(job.ranks) == ({0, 1, 2, 3} if kind in ("fifo", "folder") else {0, 1, 2})  # type: ignore[attr-defined]


@as_root
@pytest.mark.parametrize("kind", ["folder", "link", "own, open to all"])
def test_a_load_shares_no_memory_in_a_folder_planted_by_another_user(
    tmp_path: Path, shared: Path, precious: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Even if the name of the folder was guessed. The rank reads for itself then, and the others share theirs."""
    monkeypatch.setattr(host_peers, "SHARED_MEMORY", shared)
    monkeypatch.setattr(host_peers.uuid, "uuid4", lambda: uuid.UUID(int=7))
    folder = shared / f"unickpt-load-{uuid.UUID(int=7).hex}-0"
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        plant(f"ln -s {tmp_path / 'elsewhere'} {folder}")
    elif kind == "folder":
        plant(f"mkdir -m 777 {folder}", f"ln -s {precious} {folder}/rows", f"ln -s {precious} {folder}/segment")
    else:
        folder.mkdir()
        folder.chmod(0o777)
        (folder / "rows").symlink_to(precious)
    found = on_all_ranks(lambda exchange: host_peers.prepare_peers(exchange, np.arange(3), None, wanted_bytes=100))
    assert [(failures, opener is None) for failures, opener in found] == [((), True), ((), False), ((), False)]
    assert precious.read_bytes() == PRECIOUS
    assert not (tmp_path / "elsewhere").exists() or not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_a_named_folder_that_is_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "rings"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(PermissionError, match="chmod 700"):
        ring(folder, 0)
    assert not list(folder.iterdir())


@as_root
def test_a_named_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "rings"
    folder.mkdir()
    os.chown(folder, OTHER, OTHER)
    with pytest.raises(PermissionError, match=f"belongs to user {OTHER}, not to user 0"):
        ring(folder, 0)


def test_the_only_job_of_a_user_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder has a name that nobody can guess; that of another user is not looked at."""
    monkeypatch.setattr(diagnose_command, "SHARED_MEMORY", tmp_path)
    assert main(["diagnose"]) == 2
    assert "no job of yours is timed here. For the next run set UNICKPT_TIMING=1" in capsys.readouterr().err
    own = f"unickpt-{os.geteuid()}-job-"
    hung(tmp_path / f"{own}1")
    hung(tmp_path / "unickpt-4711-job-1")
    assert main(["diagnose", "--after", "5"]) == 1
    assert "rank 2 has not entered" in " ".join(capsys.readouterr().out.split())
    hung(tmp_path / f"{own}2")
    assert main(["diagnose"]) == 2
    assert f"{own}2" in capsys.readouterr().err
