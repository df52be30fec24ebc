"""The jobs of DeepSpeed and Megatron in which faults are made, and what a scenario needs of its job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CONF = "stopped_seconds=6,hang_seconds=6,still_seconds=3,loop_seconds=5,out_seconds=40,longest_out_seconds=40,retries=2"


@dataclass(frozen=True)
class Setting:
    """A job of a framework.

    Attributes:
        script: beside this module.
        arguments: of the script, after the folder.
        workers: ranks of each host.
        hosts: number of hosts.
        worlds: numbers of ranks of the reference.
        kinds: kinds of scenarios that run in such a job.
        steps: of the reference.
    """

    script: str
    arguments: tuple[str, ...]
    workers: int
    hosts: int
    worlds: tuple[int, ...]
    kinds: tuple[str, ...] = ("plain", "spare", "always", "two")
    steps: int = 900

    def program(self, folder: Path, *more: str) -> list[str]:
        """Return script and arguments."""
        return [str(Path(__file__).with_name(self.script)), str(folder), *self.arguments, *more]


@dataclass(frozen=True)
class Kind:
    """What jobs of a kind of scenarios need.

    Attributes:
        nodes: ``--nnodes``.
        hosts: number of hosts.
        first: number of hosts of the first round.
        later: number of hosts of the round after the fault.
        conf: further options of ``--rdzv-conf``.
    """

    nodes: str
    hosts: int
    first: int
    later: int
    conf: str = ""


SETTINGS = {
    "deepspeed": Setting("deepspeed_job.py", ("1", "12"), 1, 3, (1, 3)),
    "deepspeed-2": Setting("deepspeed_job.py", ("1", "12"), 2, 3, (2, 6), ("plain",), 300),
    "deepspeed-memory": Setting("deepspeed_job.py", ("1", "12", "--memory"), 1, 3, (1, 3), ("plain",)),
    "deepspeed-every": Setting("deepspeed_job.py", ("1", "12", "--memory", "--every-step"), 1, 3, (1, 3), ("plain",)),
    "zero3": Setting("deepspeed_job.py", ("3", "12"), 1, 3, (1, 3)),
    "deepspeed-8": Setting("deepspeed_job.py", ("1", "8"), 1, 4, (1, 4), ("batch",), 300),
    "megatron": Setting("megatron_job.py", ("2", "1", "6"), 2, 3, (2, 6), ("plain", "always"), 300),
    "megatron-memory": Setting("megatron_job.py", ("2", "1", "6", "--memory"), 2, 3, (2, 6), ("plain",), 300),
    "megatron-every": Setting("megatron_job.py", ("2", "1", "6", "--memory", "--every-step"), 2, 3, (2, 6), ("plain",), 300),
    "megatron-8": Setting("megatron_job.py", ("2", "2", "4"), 2, 4, (4, 8), ("batch",), 120),
}
KINDS = {
    "spare": Kind("2:3", 4, 3, 3, "slow=evict,slow_seconds=8"),
    "always": Kind("1:3", 3, 3, 3),
    "two": Kind("1:4", 4, 4, 2),
    "batch": Kind("2:4", 4, 4, 2, "sizes=2+4"),
}
