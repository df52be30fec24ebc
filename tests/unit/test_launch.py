"""Jobs that tests start: their ports and their ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.fork_server import shared_interpreters
from tests.support.forked_jobs import fork_ranks
from unickpt.testing import launch

_ORPHAN = """
import subprocess, sys
holder = subprocess.Popen(["sleep", "60"], start_new_session=True)
print(holder.pid, flush=True)
"""

_CONNECTS_AT_IMPORT = """
import os, socket
socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"]))).close()
"""


def test_output_is_returned_while_an_orphan_holds_the_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_PIPE_S", 0.3)
    process = subprocess.Popen([sys.executable, "-c", _ORPHAN], stdout=subprocess.PIPE, text=True, start_new_session=True)
    process.wait()
    begin = time.monotonic()
    output = launch.end(process)
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(output), signal.SIGKILL)
    assert time.monotonic() - begin < 20


def test_ports_lie_below_those_of_outgoing_connections() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(1024 < launch.free_port() < lowest for _ in range(20))


def test_a_job_holds_its_port_from_the_start(tmp_path: Path) -> None:
    """Its ranks would else meet another process behind the port, and wait for it for ever."""
    (tmp_path / "rank_program.py").write_text(_CONNECTS_AT_IMPORT)
    fork_ranks(1, "rank_program", folder=tmp_path, env={"PYTHONPATH": os.getcwd()}, timeout_s=60)


_PROGRAM = """
import os, sys, time
WHERE = os.getpid()
def main():
    if sys.argv[1] == "wait":
        time.sleep(60)
    sys.stdout.write(f"rank {os.environ['RANK']} imported in {WHERE} with {os.environ.get('MINE')}\\n")  # in one piece
    sys.exit(int(sys.argv[1]))
if __name__ == "__main__":
    import package.heavy as heavy
    WHERE = heavy.WHERE
    main()
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a package of two programs that import the same module."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package/heavy.py").write_text("import os\nWHERE = os.getpid()\n")
    for name in ("one", "two"):
        (tmp_path / f"package/{name}.py").write_text("import package.heavy\n" + _PROGRAM)
    return tmp_path


def imported_in(folder: Path, name: str, **env: str) -> set[str]:
    output = fork_ranks(2, f"package.{name}", "0", folder=folder, env={"PYTHONPATH": f"{folder}:{os.getcwd()}", **env}).stdout
    lines = [line.split() for line in output.splitlines() if line.startswith("rank ")]
    assert sorted(line[1] for line in lines) == ["0", "1"]
    assert {line[-1] for line in lines} == {env.get("MINE", "None")}
    return {line[4] for line in lines}


def test_jobs_of_one_package_share_their_imports(package: Path) -> None:
    with shared_interpreters():
        first = imported_in(package, "one")
        assert len(first) == 1
        assert imported_in(package, "two") == first
        other = imported_in(package, "one", MINE="1")
        assert other != first, "imports may read the environment"
        assert imported_in(package, "one") == first
    assert not any(map(_runs, first | other)), "the interpreters end with the context"
    assert imported_in(package, "one").isdisjoint(first | other)


def _runs(pid: str) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_the_end_of_a_job_in_a_shared_interpreter(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exit status and its time limit are those of a job that has an interpreter of its own."""
    env = {"PYTHONPATH": f"{package}:{os.getcwd()}"}
    with shared_interpreters():
        done = fork_ranks(2, "package.one", "3", folder=package, env=env, check=False)
        assert done.returncode == 1
        assert re.search(r"forked_ranks: rank [01] ended with 3; ending the others", done.stdout)
        with pytest.raises(AssertionError, match=r"forked_ranks 1 package.one 3 failed:\n[^$]*rank 0 imported"):
            fork_ranks(1, "package.one", "3", folder=package, env=env)
        with pytest.raises(AssertionError, match=r"did not end within 1 s:\n[^$]*Fatal Python error: Aborted"):
            fork_ranks(1, "package.one", "wait", folder=package, env=env, timeout_s=1)
        with pytest.raises(AssertionError, match=r"No module named 'package\.three'"):
            fork_ranks(1, "package.three", folder=package, env=env)
