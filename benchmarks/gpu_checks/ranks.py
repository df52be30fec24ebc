"""Ranks of a job as forked processes: torch is imported once. The parent must not have used CUDA or a process group."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_checks.place import Place
from unickpt.testing.launch import free_port

_OUTPUT_CHARACTERS = 1500
LOG = "UNICKPT_CHECKS_LOG"
_STACKS = signal.SIGUSR1  # a rank that gets it writes the stack of each of its threads to its output


class Ranks:
    """Running ranks. ``action(*arguments)`` runs in each of them, after the device is selected.

    Args:
        place: device and backend.
        world: number of ranks.
        action: function of this package.
        arguments: of the function.
    """

    def __init__(self, place: Place, world: int, action: Callable[..., None], arguments: Sequence[Any]) -> None:
        self._folder, self._name = tempfile.TemporaryDirectory(), f"{action.__module__}.{action.__name__}, {world} ranks"
        self.output = Path(self._folder.name) / "output"
        self.output.touch()
        context = multiprocessing.get_context("fork")
        port = free_port()
        self.processes = [
            context.Process(target=_run, args=(place, rank, world, port, self.output, action, tuple(arguments)))
            for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def wait(self, limit_s: float) -> str:
        """Wait for all ranks. Returns '' or why they did not end well; the rest of the ranks is then ended."""
        end = time.monotonic() + limit_s
        codes: list[int | None] = []
        try:
            while time.monotonic() < end:
                codes = [process.exitcode for process in self.processes]
                if all(code == 0 for code in codes):
                    return ""
                bad = [f"rank {rank} ended with {code}" for rank, code in enumerate(codes) if code not in (0, None)]
                if bad:
                    return f"{', '.join(bad)}: {self.tail()}"
                time.sleep(0.05)
            for rank, code in enumerate(codes):
                if code is None:
                    self.signal(rank, _STACKS)
            time.sleep(1.0)
            return f"not over after {limit_s:.0f} s: {self.tail()}"
        finally:
            self.end()

    def tail(self) -> str:
        """End of what the ranks have written."""
        return self.output.read_text(errors="replace")[-_OUTPUT_CHARACTERS:]

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def end(self) -> None:
        """End all ranks at once. What they have written is added to the file that ``LOG`` names in the environment."""
        for rank, process in enumerate(self.processes):
            if process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    self.signal(rank, signal.SIGKILL)
            process.join()
        if log := os.environ.get(LOG):
            with open(log, "a") as file:
                file.write(f"== {self._name}\n{self.output.read_text(errors='replace')}\n")


def _run(
    place: Place, rank: int, world: int, port: int, output: Path, action: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= place.variables(rank) | {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    code = 0
    faulthandler.register(_STACKS, all_threads=True)
    try:
        place.enter()
        action(*arguments)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a gloo thread can abort the process while the interpreter shuts down
