"""Under torchrun: calls through every API of a process group, recorded by unickpt and by torch's flight recorder.

calls_worker DIR [python]        DIR/calls-<rank>.ring, DIR/calls-<rank>.json: the recorder's entries

``python``: without the extension in C.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import all_reduce as imported_before  # a name of its own, as frameworks have them

from tests.jobs.diagnosis.counting import CallCounter

LISTED = 5  # elements of a part, where parts are scattered as a list


def through_python(rank: int, world: int, half: Any) -> None:
    x, y, many = torch.ones(6), torch.ones(6), torch.ones(6 * world)
    imported_before(x)
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=half)
    dist.all_reduce(x, async_op=True).wait()
    dist.broadcast(x, src=world - 1)
    dist.reduce(x, dst=0)
    dist.all_gather([torch.empty(6) for _ in range(world)], x)
    dist.all_gather_single(many, x)
    dist.reduce_scatter(torch.empty(LISTED), [torch.ones(LISTED) for _ in range(world)])
    dist.reduce_scatter_single(x, many)
    dist.all_to_all_single(torch.empty_like(many), many)
    dist.gather(x, [torch.empty(6) for _ in range(world)] if rank == 0 else None, dst=0)
    dist.scatter(x, [torch.ones(6) for _ in range(world)] if rank == 0 else None, src=0)
    dist.barrier()
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, {"rank": rank})
    with dist._coalescing_manager(dist.group.WORLD, async_ops=True) as together:
        dist.all_reduce(x)
        dist.all_reduce(y)
    together.wait()
    after, before = (rank + 1) % world, (rank - 1) % world
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, y, before)]):
        work.wait()
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(y, 0)


def through_operators(world: int) -> None:
    x = torch.ones(6)
    functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))
    functional.all_gather_tensor(x, 0, dist.group.WORLD) + 1
    functional.reduce_scatter_tensor(torch.ones(2 * world), "sum", 0, dist.group.WORLD) + 1
    even = [2] * world
    functional.all_to_all_single(torch.ones(2 * world), even, even, dist.group.WORLD) + 1


def through_the_reducer() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    dist.all_reduce(torch.ones(6))  # recorded once, whatever is overridden now


def main() -> None:
    warnings.filterwarnings("ignore")
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    halves = [dist.new_group(list(range(at, world, 2)), group_desc="every second") for at in range(2)]
    with CallCounter(folder, "calls", extension="python" not in sys.argv):
        through_python(rank, world, halves[rank % 2])
        through_operators(world)
        with torch.inference_mode():
            through_operators(world)
        through_the_reducer()
        dist.barrier()
    dist.all_reduce(torch.ones(1))  # calls of this group are not recorded
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
