"""A rank that saves and loads with FSDP2, and counts. Arguments: a folder. Writes FOLDER/RANK.json."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import torch_unickpt.loading.load_training
import torch_unickpt.saving.save_training  # noqa: F401  # once, before the forks
import unickpt
from unickpt.checkpoint.coordination import host_peers
from unickpt.checkpoint.coordination.host_peers import HostPeers
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.load import shared_read
from unickpt.testing.launch import leave

ROWS, LAYERS, TIMES = 256, 8, 4


class CountingStore:
    """The store of the job, with the number of requests and their bytes."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.requests, self.size_bytes = 0, 0
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if not callable(method):
            return method

        def counted(*args: Any) -> Any:
            found = method(*args)
            size = sum(map(_size, args)) + (len(found) if isinstance(found, (bytes, str)) else 0)
            with self._lock:
                self.requests += 1
                self.size_bytes += size
            return found

        return counted


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (bytes, str)) else sum(map(len, value)) if isinstance(value, list) else 0


class Lines(logging.Handler):
    """Counts lines of the log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:  # noqa: ARG002
        self.count += 1


def measured(store: CountingStore, lines: Lines, action: Callable[[], Any]) -> dict[str, float]:
    """Return what one action takes on this rank."""
    dist.barrier()
    before = store.requests, store.size_bytes, lines.count
    processor, begin = time.process_time(), time.perf_counter()
    action()
    return {
        "seconds": time.perf_counter() - begin,
        "processor seconds": time.process_time() - processor,
        "requests to the store": store.requests - before[0],
        "bytes at the store": store.size_bytes - before[1],
        "lines of the log": lines.count - before[2],
    }


class Spent:
    """Processor seconds of a function of this process, in the thread that calls it. Functions may call one another.

    Args:
        owner, name: of the function.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._function, self.seconds = getattr(owner, name), 0.0
        setattr(owner, name, lambda *args, **kwargs: self._timed(*args, **kwargs))

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        begin = time.thread_time()
        try:
            return self._function(*args, **kwargs)
        finally:
            self.seconds += time.thread_time() - begin


def with_parts(action: Callable[[], Any], parts: dict[str, Spent], value: dict[str, float]) -> Callable[[], Any]:
    """Return an action that also writes what parts of it have spent."""

    def acted() -> None:
        before = {name: each.seconds for name, each in parts.items()}
        action()
        value.update({f"processor seconds, {name}": each.seconds - before[name] for name, each in parts.items()})

    return acted


def held() -> dict[str, float]:
    """Return what this process holds."""
    descriptors = list(Path("/proc/self/fd").iterdir())
    kinds = [os.readlink(each) for each in descriptors if each.is_symlink()]
    status = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.partition(":")[0]: line.split()[1] for line in status if line.startswith(("VmHWM", "Threads", "RssAnon"))}
    return {
        "threads": int(sizes["Threads"]),
        "descriptors": len(kinds),
        "connections": sum(each.startswith("socket:") for each in kinds),
        "memory of its own, MB": int(sizes["RssAnon"]) / 1e3,
    }


def main(arguments: Sequence[str]) -> None:
    folder = Path(arguments[0])
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo")
    rank = dist.get_rank()
    lines = Lines()
    logger = logging.getLogger("unickpt")
    logger.addHandler(lines)
    logger.propagate = False
    logger.setLevel(logging.INFO)
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(ROWS, ROWS) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, ROWS)).sum().backward()
    optimizer.step()
    dist.barrier()
    without = held()
    store: Any = CountingStore(dist.distributed_c10d._get_default_store())
    dist.distributed_c10d._get_default_store = lambda: store
    asynchronous = unickpt.SaveOptions(asynchronous=True)
    parts = {
        "opening the memory of the host's ranks": Spent(HostPeers, "_open"),
        "waiting for the host's ranks": Spent(HostPeers, "wait"),
        "waiting for messages": Spent(MessageExchange, "_await"),
        "which ranks of the host read the same, with waits": Spent(host_peers, "prepare_peers"),
        "reading together, with waits": Spent(shared_read, "execute"),
    }
    pending: list[Any] = []
    found: dict[str, list[dict[str, float]]] = {}
    for number in range(TIMES):
        saved, behind = folder / f"s{number}", folder / f"a{number}"
        save: Any = partial(unickpt.save_training, model, optimizer, saved, step=number)
        save_behind: Any = partial(unickpt.save_training, model, optimizer, behind, step=number, options=asynchronous)
        load: Any = partial(unickpt.load_training, model, optimizer, saved)
        phases: dict[str, Callable[[], Any]] = {
            "save": save,
            "asynchronous save, call": lambda call=save_behind: pending.append(call()),  # type: ignore[misc]
            "asynchronous save, until durable": lambda: pending.pop().wait(),
            "load": load,
        }
        for name, action in phases.items():
            of_parts: dict[str, float] = {}
            value = measured(store, lines, with_parts(action, parts, of_parts)) | of_parts
            if number:  # the first one connects, starts threads and describes
                found.setdefault(name, []).append(value)
    dist.barrier()
    added = {key: value - without[key] for key, value in held().items()}
    (folder / f"{rank}.json").write_text(json.dumps({"phases": found, "held": added}))
    dist.barrier()
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main(sys.argv[1:])
