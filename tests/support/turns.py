"""Several jobs, one after the other, on the ranks of one torchrun. Modules are imported once.

Importing torch with DeepSpeed or Megatron costs a rank more than a small job does. So every rank forks a process for each job,
which finds the imports made and nothing else of the jobs before it: no process group, no singleton of a framework, no file
open. A job may be of fewer ranks than torchrun has; the others wait.
"""

from __future__ import annotations

import ctypes
import datetime
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable

from torch.distributed import TCPStore

from tests.support.after_fork import renew_threads
from unickpt.testing.launch import free_port, leave

Job = Callable[[], None]
PR_SET_PDEATHSIG = 1  # linux/prctl.h
LONGEST = datetime.timedelta(hours=1)


def in_turn(jobs: Iterable[tuple[int, Job]]) -> None:
    """Run jobs, each with its number of ranks. A job begins when all ranks of the previous one have ended.

    A job finds the environment that torchrun would have given it, and makes its process group itself. One that fails ends this
    rank, and with it torchrun, with an error. Call it before this process has threads: a fork would not have them.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=LONGEST)
    for number, (world, job) in enumerate(jobs):
        if world > ranks:
            raise ValueError(f"job {number} wants {world} ranks, torchrun has {ranks}")
        if rank == 0:
            store.set(f"port/{number}", str(free_port()))
        if rank < world:
            _in_a_fork(job, world, store.get(f"port/{number}").decode())
        if store.add(f"ended/{number}", 1) == ranks:
            store.set(f"next/{number}", "")
        store.wait([f"next/{number}"])


def forget_garbage() -> None:
    """Keep collections short in a process that makes one engine after the other.

    Frameworks collect all garbage for each engine, and what earlier engines leave in their globals makes that longer each time.
    What is alive now is not looked at again, as before the fork.
    """
    gc.collect()
    gc.freeze()


def _in_a_fork(job: Job, world: int, port: str) -> None:
    """Run a job in a child process, which ends with this one. Raises SystemExit if the job fails."""
    gc.freeze()  # frameworks collect garbage all the time, in jobs that have hardly any
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        sizes = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        # the store of torchrun still has the keys of earlier jobs
        os.environ.update(sizes, MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE="False")
        try:
            renew_threads()
            job()
            leave()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit(f"a job of {world} ranks ended with {os.waitstatus_to_exitcode(status)}")
