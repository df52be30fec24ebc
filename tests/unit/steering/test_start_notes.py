"""An agent tells of workers that cannot tell where they are: those that are stopped, or have told nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from unickpt.diagnosis.host.process_state import State, state_of
from unickpt.diagnosis.start_watch import SEEN, TOLD, StartNote, key_of
from unickpt.steering.host.start_notes import StartNotes


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) as process:
        yield process
        process.kill()


def test_a_worker_that_is_stopped_is_told_of_once(worker: subprocess.Popen[bytes]) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    notes = StartNotes(store, "n1", "job", "1.1", lambda: True)

    def seen(rank: int) -> StartNote | None:
        key = key_of("job", "1.1", SEEN, rank)
        return StartNote.of(store.get(key)) if store.check([key]) else None

    notes.begun({worker.pid: 3})
    store.set(key_of("job", "1.1", TOLD, 3), "it has told of itself")
    notes.look()
    assert seen(3) is None
    os.kill(worker.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while state_of(worker.pid) is not State.STOPPED and time.monotonic() < deadline:
        time.sleep(0.01)
    notes.look()
    assert seen(3) == StartNote("n1", worker.pid, state=State.STOPPED)
    store.delete_key(key_of("job", "1.1", SEEN, 3))
    notes.look()
    assert seen(3) is None
    notes.begun({worker.pid: 2})  # it has told nothing
    notes.look()
    assert (found := seen(2)) is not None
    assert found.pid == worker.pid
