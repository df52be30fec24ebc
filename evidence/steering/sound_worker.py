"""Under torchrun: a sound job that does, window after window, what makes the other ranks wait for minutes.

Usage: ``sound_worker.py FOLDER``. ``FOLDER/seed`` has the seed. Every start of a worker adds a line to ``FOLDER/starts``
(round, rank, world, step, pid), every finished window one to ``FOLDER/windows`` (kind, rank, seconds), and every finished pause
of a rank one to ``FOLDER/pauses`` (rank, begin, end on the wall clock). A file ``stop`` ends the program with success. The
pauses are a thirtieth of real ones, and so are the deadlines of ``sound_windows.py``.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from unickpt.base.options.job import TimingOptions
from unickpt.diagnosis import session
from unickpt.diagnosis.recording.records import Phase

STEPS, STEP_S = 20, 0.05  # of a window, besides its pause
LONGEST_S, SHORT_S = 20.0, 6.0  # longest pause in which something moves, and in which nothing does


class Model(torch.nn.Module):
    """A model to evaluate."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def evaluate(seconds: float, _folder: Path) -> None:
    """Evaluate a model, batch by batch."""
    model, end = Model().eval(), time.monotonic() + seconds
    with torch.no_grad():
        while time.monotonic() < end:
            score = model(torch.rand(32, 64)).sum()
            metrics = {"score": float(score), "top": sorted(range(2000), key=lambda each: -each * score)[:5]}
            assert metrics


def upload(seconds: float, _folder: Path) -> None:
    """Send a file over TCP to a receiver that takes a few KiB per second, as an object store far away does."""
    listener = socket.create_server(("127.0.0.1", 0))
    end = time.monotonic() + seconds

    def receive() -> None:
        with listener, listener.accept()[0] as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            while taken.recv(4096 if time.monotonic() < end else 1 << 20):
                time.sleep(0.1 if time.monotonic() < end else 0.0)

    receiver = threading.Thread(target=receive)
    receiver.start()
    with socket.create_connection(listener.getsockname()) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        while time.monotonic() < end:
            connection.sendall(bytes(1 << 18))  # the main thread is in here for many seconds
    receiver.join()


def write(seconds: float, folder: Path) -> None:
    """Write a file slowly, each piece to the disk."""
    end = time.monotonic() + seconds
    with (folder / f"big-{os.getpid()}").open("wb") as file:
        while time.monotonic() < end:
            file.seek(0)
            file.write(os.urandom(1 << 16))
            os.fsync(file.fileno())
            time.sleep(0.1)


def compile_(seconds: float, _folder: Path) -> None:
    """Wait for a child that computes, as for a compiler."""
    code = f"import time; end = time.monotonic() + {seconds}\nwhile time.monotonic() < end: sum(range(1000))"
    subprocess.run([sys.executable, "-S", "-c", code], check=True)


def long_call(seconds: float, _folder: Path) -> None:
    """Compute in one place for a while."""
    end, matrix = time.monotonic() + min(seconds, SHORT_S), torch.rand(400, 400)
    while time.monotonic() < end:
        torch.linalg.svd(matrix)


def stall(seconds: float, _folder: Path) -> None:
    """Wait for data that come late."""
    threading.Event().wait(min(seconds, SHORT_S))


def nothing(_seconds: float, _folder: Path) -> None:
    """Train on."""


PAUSES: dict[str, tuple[Callable[[float, Path], None], bool]] = {  # what is done, and whether by every rank
    "one rank evaluates alone": (evaluate, False),
    "one rank uploads": (upload, False),
    "one rank writes": (write, False),
    "every rank writes": (write, True),
    "every rank compiles": (compile_, True),
    "one rank compiles": (compile_, False),
    "one rank computes in one call": (long_call, False),
    "one rank waits for data": (stall, False),
    "uneven batches": (nothing, True),
    "steps alone": (nothing, True),
}
_PHASES = {evaluate: Phase.EVALUATION, write: Phase.CHECKPOINT}


@contextlib.contextmanager
def _phase(phase: Phase | None) -> Iterator[None]:
    """A framework tells the phase; a loop of a user does not."""
    with session.in_phase(phase) if phase is not None else contextlib.nullcontext():
        yield


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    session.start(TimingOptions(enabled=True, records=4096), dict)
    rank, world, step = dist.get_rank(), dist.get_world_size(), 0
    with (folder / "starts").open("a") as file:
        file.write(f"{os.environ['UNICKPT_ROUND']} {rank} {world} {step} {os.getpid()}\n")
    number, stop = 0, False
    while not stop:
        number += 1
        source = random.Random(f"{(folder / 'seed').read_text()} {number}")
        kind = source.choice(list(PAUSES))
        do, by_all = PAUSES[kind]
        who = source.choice([0, source.randrange(world)])  # mostly rank 0
        seconds, told, uneven = source.uniform(2.0, LONGEST_S), source.random() < 0.5, kind == "uneven batches"
        own = random.Random(f"{rank} {number}")
        begin = time.monotonic()
        if rank == who or by_all:
            paused = time.time()
            with _phase(_PHASES.get(do) if told else None):
                do(seconds * own.uniform(0.3, 1.0) if by_all else seconds, folder)
            with (folder / "pauses").open("a") as file:
                file.write(f"{rank} {paused} {time.time()}\n")
        for _ in range(STEPS):
            time.sleep(own.uniform(0.0, 8 * STEP_S) if uneven else STEP_S)
            seen = torch.tensor([int((folder / "stop").exists())])
            dist.all_reduce(seen)
            dist.barrier()
            stop, step = bool(seen[0]), step + 1
            session.stepped(step)
        if rank == 0:
            with (folder / "windows").open("a") as file:
                file.write(f"{kind}\t{who}\t{time.monotonic() - begin:.1f}\n")
            (folder / "saved").write_text(str(step))
    session.stop()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
