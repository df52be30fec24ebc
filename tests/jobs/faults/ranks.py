"""Ranks of a job: as threads of this process, or as processes of their own that can be killed.

Processes are forked, so that a thousand of them cost no thousand imports of torch; nothing in the
parent may have used more than one thread of torch's before (``torch.set_num_threads(1)``).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.jobs.faults.state import contribution
from tests.support.after_fork import renew_threads
from tests.support.rank_threads import on_all_ranks
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.save.requests import SaveOptions, SaveRequest, SaveResult
from unickpt.checkpoint.save.retention import Retention
from unickpt.checkpoint.save.saver import Saver

ROWS = 300
KEEP = Retention(keep_last=2)
HANG_S = 60.0  # nothing here takes a tenth of that


def alone() -> MessageExchange:
    return MessageExchange(None, rank=0, world=1, prefix="alone")


def request(folder: Path, tag: str, step: int, exchange: MessageExchange, *, rows: int = ROWS, **more: Any) -> SaveRequest:
    """A save of the state of a step."""
    return SaveRequest(lambda _: contribution(step, exchange.rank, exchange.world, rows), str(folder), tag, True, **more)


def save_on_threads(folder: Path, tag: str, step: int, *, world: int = 3, rows: int = ROWS, **more: Any) -> list[Any]:
    """One save that waits, by a job of so many ranks: the result of each, or what it raised."""

    def run(exchange: MessageExchange) -> SaveResult | None:
        saver = Saver(SaveOptions(asynchronous=False, retention=KEEP))
        return saver.save(request(folder, tag, step, exchange, rows=rows, **more), exchange).result

    return on_all_ranks(run) if world == 3 else [run(alone())]


def sound(folder: Path) -> Path:
    """A folder with two checkpoints of three ranks: ``step1``, and ``best`` of step 2, which is the latest."""
    for step, tag in ((1, "step1"), (2, "best")):
        results = save_on_threads(folder, tag, step)
        assert all(result.committed for result in results), results
    return folder


def fork(action: Callable[[], None]) -> int:
    """Run an action in a child; its status is 0, 70 if the action raised, or the signal that ended it."""
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        renew_threads(1)
        action()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def ended(child: int, timeout_s: float = HANG_S) -> int | None:
    """How a child ended (negative: the signal); None, and it is killed, if it does not."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    kill(child)
    return None


def kill(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)


@dataclass
class Meeting:
    """Where the processes of one job find their store: whoever holds it writes its port into a file."""

    file: Path
    world: int

    def hold(self) -> dist.TCPStore:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=20))
        temporary = self.file.with_suffix(".new")
        temporary.write_text(str(store.port))
        temporary.replace(self.file)
        return store

    def join(self) -> dist.TCPStore:
        end = time.monotonic() + HANG_S
        while not self.file.exists():
            assert time.monotonic() < end, "nobody holds the store"
            time.sleep(0.002)
        port = int(self.file.read_text())
        return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=datetime.timedelta(seconds=20))

    def serve(self) -> None:
        """As torchrun's agent does: hold the store, and nothing else."""
        store = self.hold()
        signal.pause()
        del store


def write_word(file: Path, what: Any) -> None:
    """A child's last word."""
    temporary = file.with_suffix(".new")
    temporary.write_text(json.dumps(what))
    temporary.replace(file)
