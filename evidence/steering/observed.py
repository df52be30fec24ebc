"""What a worker of a framework's job writes down for the harness, and the faults that it makes. Imports no framework.

In the folder of the job, ``events.jsonl`` has one line for each thing that happened in a worker.
``steps/ROUND-RANK.jsonl`` has one
line for each step, with the ids of its samples and the loss. ``saved`` has the newest step. ``fault`` is a JSON object:

    {"kind": "loop", "rank": 1, "step": 40}      once, at the first step from this one on
    {"kind": "slow", "host": "n2", "ms": 300}    in every step, until the file is removed
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HOST = "STEERED_HOST"  # in the environment: name of the host
LASTING = ("slow", "data", "always", "save alone")


class InjectedError(RuntimeError):
    """The exception of an injected fault."""


class Observed:
    """One worker.

    Args:
        folder: folder of the job.
        started_s: time at which the process began, in seconds since 1970.
    """

    def __init__(self, folder: Path, started_s: float) -> None:
        self.folder = folder
        self.round = os.environ.get("UNICKPT_ROUND", f"0.{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}")
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.host = os.environ.get(HOST, "")
        (folder / "steps").mkdir(exist_ok=True)
        self._steps = (folder / "steps" / f"{self.round}-{self.rank}.jsonl").open("a")
        self.say("started", at=started_s, pid=os.getpid(), world=self.world)

    def say(self, what: str, **more: Any) -> None:
        """Write an event."""
        line = {"at": time.time(), "what": what, "round": self.round, "rank": self.rank, "host": self.host, **more}
        file = os.open(self.folder / "events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, json.dumps(line).encode() + b"\n")
        os.close(file)

    def stepped(self, step: int, ids: Sequence[Any], loss: float | None) -> None:
        """Write a step. ``loss`` is None on a rank that does not know it."""
        self._steps.write(json.dumps({"at": time.time(), "step": step, "ids": list(ids), "loss": loss}) + "\n")
        self._steps.flush()
        if self.rank == 0:
            part = self.folder / "saved.part"
            part.write_text(str(step))
            part.rename(self.folder / "saved")

    @property
    def stopping(self) -> bool:
        """Whether the harness wants the job to end with success."""
        return (self.folder / "stop").exists()

    # ------------------------------------------------------------ faults

    def wanted(self, step: int, *kinds: str) -> dict[str, Any] | None:
        """Return the fault of one of these kinds that this worker must make now. One that does not last is removed."""
        try:
            fault: dict[str, Any] = json.loads((self.folder / "fault").read_text())
        except FileNotFoundError:
            return None
        mine = fault.get("rank", self.rank) == self.rank and fault.get("host", self.host) == self.host
        if not mine or fault["kind"] not in kinds or step < int(fault.get("step", 0)):
            return None
        if fault["kind"] not in LASTING:
            (self.folder / "fault").unlink()
            self.say("fault", kind=fault["kind"], step=step)
        return fault

    def at_step(self, step: int) -> None:
        """Make a fault of the main thread at the beginning of a step."""
        fault = self.wanted(step, "loop", "sleep", "crash", "always", "slow")
        if fault is None:
            return
        if fault["kind"] == "loop":
            _spin()
        elif fault["kind"] in ("slow", "sleep"):
            time.sleep(fault.get("ms", 10_000_000) / 1000)
        else:
            raise InjectedError(f"injected at step {step}")

    def die_soon(self, step: int, kind: str) -> None:
        """Let this process be killed a little later, if a fault of this kind is asked for."""
        fault = self.wanted(step, kind)
        if fault is not None:
            threading.Timer(fault.get("ms", 0) / 1000, os.kill, (os.getpid(), signal.SIGKILL)).start()


def _spin() -> None:
    number = 0
    while True:
        number += 1
