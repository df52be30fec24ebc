"""Run a module on several ranks that are forked from one process: ``python -m tests.support.forked_ranks WORLD MODULE ...``.

The process imports the module, with all that it imports, and forks the ranks. Each rank then runs the module as its program.
A module that imports by its arguments has a function ``before_forks(arguments)``, which is called once, before the ranks exist.
A job of four ranks imports PyTorch and a framework once and not five times (torchrun imports PyTorch as well), which takes
most of the time of a short job. The environment of the ranks is that of ``torchrun --nproc-per-node WORLD``, and this process
serves the store, as torchrun does.

The exit status is 0 if every rank ended with 0. After the first rank that did not, the others get SIGTERM, and SIGKILL 30
seconds later.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import random
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
import uuid

import torch.distributed as dist

_GRACE_S = 30.0


def main() -> int:
    return run(int(sys.argv[1]), sys.argv[2], sys.argv[3:])


def run(world: int, module: str, arguments: list[str]) -> int:
    """Run a job. Returns 0 if all ranks ended with 0, and 1 otherwise."""
    # Listens before the imports, which take seconds: no other process can take the port, and ranks that come early wait in
    # its queue.
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    sizes = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    run = {"TORCHELASTIC_RUN_ID": uuid.uuid4().hex, "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
    os.environ.update(sizes | address | run)
    gc.disable()  # imports leave hardly any garbage, and collections would take a tenth of their time
    before_forks = getattr(importlib.import_module(module), "before_forks", None)
    if before_forks is not None:
        before_forks(arguments)
    gc.enable()
    del sys.modules[module]  # each rank runs it again, as __main__
    if threading.active_count() > 1:
        print(f"forked_ranks: the import of {module} has started threads, which the ranks do not have", file=sys.stderr)
    gc.freeze()  # a collection in a rank leaves what was imported alone, and so copies none of its pages
    sys.stdout.flush()
    sys.stderr.flush()
    ranks: dict[int, int] = {}
    for rank in range(world):
        child = os.fork()
        if child == 0:
            listener.close()
            _run_rank(rank, module, arguments)
        ranks[child] = rank
    # after the forks: it has threads
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    failed = _wait_for(ranks)
    del store
    return failed


def _run_rank(rank: int, module: str, arguments: list[str]) -> None:
    """Run the module as rank ``rank``. Never returns."""
    status = 1
    try:
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
        random.seed()  # a process that starts by itself has a seed of its own
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        print(f"[rank{rank}]: {traceback.format_exc()}", file=sys.stderr)
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]  # as at the end of Python: waits for threads
        importlib.import_module("atexit")._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _wait_for(ranks: dict[int, int]) -> int:
    """Wait for all ranks, by process; return 0 if all ended with 0."""
    failed, deadline = 0, 0.0
    while ranks:
        child, status = os.waitpid(-1, os.WNOHANG if failed else 0)
        if child in ranks:
            rank, code = ranks.pop(child), os.waitstatus_to_exitcode(status)
            if code and not failed:
                print(f"forked_ranks: rank {rank} ended with {code}; ending the others", file=sys.stderr, flush=True)
                failed, deadline = 1, time.monotonic() + _GRACE_S
                _signal(ranks, signal.SIGTERM)
        elif failed:
            if time.monotonic() > deadline:
                _signal(ranks, signal.SIGKILL)
            time.sleep(0.05)
    return failed


def _signal(ranks: dict[int, int], number: int) -> None:
    for child in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)


if __name__ == "__main__":
    sys.exit(main())
