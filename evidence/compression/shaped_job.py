"""A rank of a job on a slow link: ``shaped_job TASK.json``, started with the variables of ``env://``.

The layers sleep, so that the backward pass can hide an exchange, and other programs on the machine disturb little.
First the job runs without compression and is timed. Then it runs every choice of a scheme for each bucket. An exchange runs in
a thread beside the backward pass, as it does on a stream of a device.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.jobs.replay.timed_job import SleepingLayers
from unickpt.base.options.job import TimingOptions
from unickpt.diagnosis import session
from unickpt.testing.launch import leave
from unickpt.training.compression.advisor import NO, Candidate, measured_code_s
from unickpt.training.compression.exchange import GradientExchange
from unickpt.training.compression.settings import NONE, Compression
from unickpt.training.compression.sizes import sent_bytes
from unickpt.training.compression.wire import GroupWire

SCHEMES = ("int8", "sign")
TIMED, REPEATS, BATCH = 8, 5, 4


class Returned:
    """A wire of two ranks that gives back what is sent: what is left is the time of the code."""

    rank, world = 0, 2

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        return row.repeat(2, 1)


class Job:
    """A chain of layers, each with one bucket of gradients."""

    def __init__(self, width: int, layers: int, layer_s: float) -> None:
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
        self._sleeping = SleepingLayers(self.layers, layer_s)
        self._thread = ThreadPoolExecutor(1)
        self._exchanges = {name: GradientExchange(Compression(name), GroupWire()) for name in SCHEMES}
        self._inputs = torch.randn(BATCH, width)
        self._pending: list[Any] = []
        self.schemes: tuple[str, ...] | None = None
        for layer in self.layers:
            layer.weight.register_post_accumulate_grad_hook(self._arrived)

    def _arrived(self, parameter: torch.Tensor) -> None:
        """Begin to exchange a gradient. All exchanges are in one thread, so their order is that of the backward pass."""
        assert parameter.grad is not None
        if self.schemes is None:
            self._pending.append(dist.all_reduce(parameter.grad, async_op=True))
        else:
            self._pending.append(self._thread.submit(self._exchange, len(self._pending), parameter.grad))

    def _exchange(self, bucket: int, gradient: torch.Tensor) -> None:
        assert self.schemes is not None
        if self.schemes[bucket] == NO:
            dist.all_reduce(gradient)
        else:
            self._exchanges[self.schemes[bucket]].exchange([(str(bucket), gradient)])

    def step(self) -> None:
        self.layers(self._inputs).square().mean().backward()
        for each in self._pending:
            each.result() if isinstance(each, Future) else each.wait()
        self._pending.clear()
        self.layers.zero_grad()


def candidates(shape: tuple[int, int]) -> dict[str, Candidate]:
    """Return the schemes with their measured code."""
    found = {}
    whole = sent_bytes(Compression(NONE), [shape], 2)
    for name in SCHEMES:
        exchange, gradient = GradientExchange(Compression(name), Returned()), torch.randn(shape)

        def code(exchange: GradientExchange = exchange, gradient: torch.Tensor = gradient) -> None:
            exchange.exchange([("", gradient)])

        code()
        seconds = measured_code_s(code, gradient.nbytes, time.perf_counter)
        found[name] = Candidate(sent_bytes(Compression(name), [shape], 2) / whole, seconds, "cpu")
    return found


def timed_step(job: Job) -> float:
    """Return the seconds of a step, from a common begin to the end on the last rank."""
    dist.barrier()
    begin = time.perf_counter()
    job.step()
    took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def main() -> None:
    warnings.filterwarnings("ignore")
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = Job(task["width"], task["layers"], task["layer_s"])
    options = TimingOptions(enabled=True, watch=False, folder=task["rings"])
    session.start(options, lambda: {"data parallel": [dist.group.WORLD]})
    for at in range(TIMED):
        job.step()
        session.stepped(at + 1)
    dist.barrier()
    session.stop()
    known = candidates((task["width"], task["width"]))
    found = {}
    for schemes in itertools.product((NO, *SCHEMES), repeat=task["layers"]):
        job.schemes = schemes
        job.step()
        found[",".join(schemes)] = statistics.median(timed_step(job) for _ in range(REPEATS))
    if dist.get_rank() == 0:
        codes = {name: [each.ratio, each.code_s] for name, each in known.items()}
        Path(task["out"]).write_text(json.dumps({"candidates": codes, "steps_s": found}))
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
