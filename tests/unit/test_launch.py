"""Jobs that tests start: their ports and their ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
    launch.fork_ranks(1, "rank_program", folder=tmp_path, env={"PYTHONPATH": os.getcwd()}, timeout_s=60)
