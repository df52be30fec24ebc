"""A rank of a timed job with tensor, pipeline and data parallel groups, and a fault.

Arguments: FOLDER FAULT RANK [ADDRESS HOST HOST].

The groups are those of TP 4, PP 4 and the rest data parallel; models are left out. A step has three all-reduces of the tensor
parallel group, an activation that goes through the stages, an all-reduce of the data parallel group, and a sleep as if a device
computed. The fault begins at step ``AT``. ``FOLDER/fault`` gets its time. A rank ends when ``FOLDER/stop`` exists.

HOSTs are network namespaces, the first of which has ADDRESS. Half of the ranks are on each. The stages of the pipeline have a
large activation then.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from unickpt.base.options.job import TimingOptions
from unickpt.diagnosis import session
from unickpt.testing.launch import leave

TENSOR, STAGES = 4, 4
AT, STEP_S, SLOW_S = 25, 0.1, 0.4
SMALL, LARGE = 256, 100_000  # elements of an activation
_NEW_NET, _NEW_UTS = 0x40000000, 0x04000000  # linux/sched.h


def rings_of(folder: Path, host: int) -> Path:
    """Return where the ranks of a host record."""
    return folder / ("rings" if host == 0 else f"rings-{host}")


def to_host(space: str, number: int) -> None:
    """Be on a host: before this process has threads."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{space}", "rb") as file:
        if libc.setns(file.fileno(), _NEW_NET) or libc.unshare(_NEW_UTS):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    socket.sethostname(f"host-{number}")


class Groups:
    """The groups of this rank, and its neighbours in the pipeline."""

    def __init__(self, rank: int, world: int) -> None:
        data = world // (TENSOR * STAGES)
        place = {(p, d, t): (p * data + d) * TENSOR + t for p in range(STAGES) for d in range(data) for t in range(TENSOR)}
        kinds = {
            "tensor": [[place[p, d, t] for t in range(TENSOR)] for p in range(STAGES) for d in range(data)],
            "data": [[place[p, d, t] for d in range(data)] for p in range(STAGES) for t in range(TENSOR)],
            "pipeline": [[place[p, d, t] for p in range(STAGES)] for d in range(data) for t in range(TENSOR)],
        }
        self.of = {kind: self._mine(rank, lists) for kind, lists in kinds.items()}
        stages = next(each for each in kinds["pipeline"] if rank in each)
        at = stages.index(rank)
        self.before, self.after = (stages[at - 1] if at else None), (stages[at + 1] if at + 1 < STAGES else None)

    @staticmethod
    def _mine(rank: int, lists: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        made = [dist.new_group(list(ranks)) for ranks in lists]
        mine: dist.ProcessGroup = next(group for ranks, group in zip(lists, made, strict=True) if rank in ranks)
        return mine


def step(groups: Groups, data: torch.Tensor, wide: torch.Tensor) -> None:
    time.sleep(STEP_S)
    if groups.before is not None:
        dist.recv(data, groups.before, group=groups.of["pipeline"])
    for _ in range(3):
        dist.all_reduce(data, group=groups.of["tensor"])
    if groups.after is not None:
        dist.send(data, groups.after, group=groups.of["pipeline"])
    dist.all_reduce(wide, group=groups.of["data"])


def main() -> None:
    folder, fault, culprit = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    hosts, host = sys.argv[5:], 0
    if hosts:
        each = int(os.environ["WORLD_SIZE"]) // len(hosts)
        host, local = divmod(int(os.environ["RANK"]), each)
        os.environ |= {
            "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(each), "GROUP_RANK": str(host),
            "GROUP_WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": sys.argv[4], "TORCHELASTIC_USE_AGENT_STORE": "False",
        }  # fmt: skip
        to_host(hosts[host], host)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = Groups(rank, world)
    session.start(TimingOptions(enabled=True, records=2048, folder=str(rings_of(folder, host))), lambda: {
        kind: [group] for kind, group in groups.of.items()
    })  # fmt: skip
    data, wide, number = torch.zeros(LARGE if hosts else SMALL), torch.zeros(1024), 0
    if rank == 0:
        (folder / "agent").write_text(str(os.getpid()))
    while not (folder / "stop").exists():
        number += 1
        if rank == culprit and number == AT:
            (folder / "fault.new").write_text(str(time.time()))
            (folder / "fault.new").rename(folder / "fault")
        if rank == culprit and number >= AT:
            if fault == "hang":
                time.sleep(10_000)
            elif fault == "kill":
                os.kill(os.getpid(), 9)
            elif fault == "slow":
                time.sleep(SLOW_S)
            elif fault == "mismatch" and number == AT:
                dist.all_reduce(torch.zeros(77), group=groups.of["tensor"])
        step(groups, data, wide)
        session.stepped(number)
        if rank == 0:
            (folder / "step").write_text(str(number))
    leave()


if __name__ == "__main__":
    main()
