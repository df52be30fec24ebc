"""Under torchrun: jobs of PyTorch with the faults of public reports. Usage: ``reported_job.py FOLDER FAULT``.

Each function is one fault. It begins at step ``AT``, or before the first step. The comment ``# at: NAME`` marks the line that a
verdict must name.
"""

from __future__ import annotations

import gc
import io
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import unickpt

AT = 30  # step of the fault: some sound steps come first
STEP_S = 0.05  # as if a device computed
ALONE_S = 14.0  # that one rank evaluates or writes
WIDTH = 64


class Training:
    """A data-parallel job."""

    def __init__(self, folder: Path, *, loads: Callable[[int], None] | None = None) -> None:
        dist.init_process_group("gloo")
        self.rank, self.world, self.step, self.folder = dist.get_rank(), dist.get_world_size(), 0, folder
        if loads is not None:
            loads(self.rank)
        unickpt.time_collectives()
        torch.manual_seed(1)
        self.plain = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.model: torch.nn.Module = self._wrapped()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)

    def _wrapped(self) -> torch.nn.Module:
        return DistributedDataParallel(self.plain)

    def train(self, samples: torch.Tensor | None = None, *, more_s: float = 0.0) -> None:
        """Make a step, which takes longer by ``more_s``."""
        time.sleep(STEP_S + more_s)
        self.model(torch.ones(4, WIDTH) if samples is None else samples).mean().backward()  # at: backward
        self.update()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def until(self, step: int) -> None:
        while self.step < step:
            self.train()

    def on(self) -> None:
        """Train without end."""
        self.until(1 << 30)


def for_ever() -> None:
    while True:
        time.sleep(1.0)


# ---------------------------------------------------------------- one rank stands, or has ended


def stopped(folder: Path) -> None:
    job = Training(folder)
    job.until(AT)
    if job.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    job.on()


def killed(folder: Path) -> None:
    job = Training(folder)
    job.until(AT)
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    job.on()


def raises(folder: Path) -> None:
    job = Training(folder)
    job.until(AT)
    if job.rank == 1:
        print({"text": 1}["labels"])  # at: raises
    job.on()


def out_of_memory(folder: Path) -> None:
    job = Training(folder)
    job.until(AT)
    if job.rank == 3:
        torch.empty(1 << 52)  # at: out_of_memory
    job.on()


def ends_early(folder: Path) -> None:
    """One rank has fewer batches than the others, and ends in order."""
    job = Training(folder)
    job.until(AT)
    if job.rank == 3:
        return
    job.on()


def lock(folder: Path) -> None:
    """The main thread wants a lock that a thread of the program keeps while it waits for the main thread."""
    job, mine, answers = Training(folder), threading.Lock(), queue.Queue[int]()
    job.until(AT)
    if job.rank == 2:

        def keeps() -> None:
            with mine:
                answers.get()

        threading.Thread(target=keeps, daemon=True).start()
        time.sleep(0.1)
        with mine:  # at: lock
            answers.put(1)
    job.on()


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Samples of which some come late."""

    def __init__(self) -> None:
        self.late_s, self.stuck_at = 0.0, 1 << 30

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, at: int) -> torch.Tensor:
        if at >= self.stuck_at:
            for_ever()
        time.sleep(self.late_s)
        return torch.ones(WIDTH)


def loader_stuck(folder: Path) -> None:
    """The worker of a data loader waits for a file that does not come."""
    job, samples = Training(folder), Samples()
    samples.stuck_at = 4 * AT if job.rank == 1 else 1 << 30
    loader = torch.utils.data.DataLoader(samples, batch_size=4, num_workers=1)
    for batch in loader:  # at: loader_stuck
        job.train(batch)


def loader_slow(folder: Path) -> None:
    job, samples = Training(folder), Samples()
    for batch in torch.utils.data.DataLoader(samples, batch_size=4):
        samples.late_s = 0.015 if job.rank == 1 and job.step >= AT else 0.0
        job.train(batch)


# ---------------------------------------------------------------- one rank does something alone


def evaluates(folder: Path) -> None:
    job = Training(folder)
    job.until(AT)
    if job.rank == 0:
        job.plain.eval()
        end = time.monotonic() + ALONE_S
        with torch.no_grad():
            while time.monotonic() < end:
                job.plain(torch.ones(4, WIDTH))
                time.sleep(0.05)  # at: evaluates
        job.plain.train()
    job.on()


class SlowDisk(io.BytesIO):
    """A file on a disk that takes its time for each write."""

    def write(self, data: Any) -> int:
        time.sleep(0.2)  # at: slow_save
        return super().write(data)


def slow_save(folder: Path) -> None:
    job = Training(folder)
    job.until(AT)
    if job.rank == 1:
        end = time.monotonic() + ALONE_S
        while time.monotonic() < end:
            torch.save(job.plain.state_dict(), SlowDisk())
    job.on()


def rank0_barrier(folder: Path) -> None:
    """Rank 0 alone makes a barrier after training."""
    job = Training(folder)
    job.until(AT)
    if job.rank == 0:
        dist.barrier()
    dist.barrier()  # at: rank0_barrier


def late_load(folder: Path) -> None:
    """A rank loads its weights from a slow file server, and the others wait for it."""

    def loads(rank: int) -> None:
        if rank == 2:
            time.sleep(3600)  # at: late_load

    Training(folder, loads=loads).on()


def cannot_start(folder: Path) -> None:
    Training(folder)
    import a_package_that_is_not_there  # type: ignore[import-not-found]  # noqa: F401 - at: cannot_start


# ---------------------------------------------------------------- other calls


def wrong_shape(folder: Path) -> None:
    job = Training(folder)
    job.until(AT)
    dist.all_reduce(torch.ones(50_000 if job.rank == 2 else 70_000))  # at: wrong_shape
    job.on()


def wrong_dtype(folder: Path) -> None:
    job = Training(folder)
    job.until(AT)
    kind = torch.float64 if job.rank == 1 else torch.float32
    dist.all_reduce(torch.ones(70_000, dtype=kind))  # at: wrong_dtype
    job.on()


def wrong_group(folder: Path) -> None:
    job, half = Training(folder), dist.new_group([0, 1])
    job.until(AT)
    dist.all_reduce(torch.ones(8), group=half if job.rank == 1 else None)  # at: wrong_group
    job.on()


def group_order(folder: Path) -> None:
    job, groups = Training(folder), [dist.new_group(), dist.new_group()]
    job.until(AT)
    for group in reversed(groups) if job.rank == 2 else groups:
        dist.all_reduce(torch.ones(8), group=group)  # at: group_order
    job.on()


def both_send(folder: Path) -> None:
    """Two stages of one pipeline send before they receive."""
    job, tensor = Training(folder), torch.ones(300_000)
    peer = (job.rank + 2) % 4
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    while True:
        job.train()
        if job.rank < 2 or (job.rank == 2 and job.step >= AT):
            dist.send(tensor, peer, group=groups[job.rank % 2])  # at: both_send
            dist.recv(torch.empty_like(tensor), peer, group=groups[job.rank % 2])
        else:
            dist.recv(torch.empty_like(tensor), peer, group=groups[job.rank % 2])
            dist.send(tensor, peer, group=groups[job.rank % 2])


def skipped_micro(folder: Path) -> None:
    """One rank leaves out a micro-batch, so its optimizer steps come one micro-batch later than those of the others."""
    job, count = Training(folder), 0
    assert isinstance(job.model, DistributedDataParallel)
    for number in range(4 * AT):
        if job.rank == 1 and number == 2 * AT:
            continue
        count += 1
        time.sleep(STEP_S / 4)
        if count % 4:
            with job.model.no_sync():
                job.model(torch.ones(4, WIDTH)).mean().backward()
        else:
            job.model(torch.ones(4, WIDTH)).mean().backward()  # at: skipped_micro_others
            job.update()
    dist.barrier()  # at: skipped_micro
    job.on()


def ddp(folder: Path) -> None:
    """One rank leaves out a backward pass, because its loss is not finite."""
    job = Training(folder)
    while True:
        time.sleep(STEP_S)
        loss = job.model(torch.ones(4, WIDTH)).mean()
        if job.rank != 1 or job.step != AT:
            loss.backward()
        mean = loss.detach().clone().reshape(1)
        dist.all_reduce(mean)  # at: ddp
        job.update()


class Sharded(Training):
    """With FSDP2."""

    def _wrapped(self) -> torch.nn.Module:
        from torch.distributed.fsdp import fully_shard

        for layer in (*self.plain, self.plain):
            fully_shard(layer, reshard_after_forward=True)
        return self.plain


def fsdp2(folder: Path) -> None:
    """One rank leaves out the last layer."""
    job = Sharded(folder)
    while True:
        time.sleep(STEP_S)
        if job.rank == 2 and job.step == AT:
            job.plain.forward = lambda x: job.plain[1](job.plain[0](x))  # type: ignore[method-assign]
        job.model(torch.ones(4, WIDTH)).mean().backward()  # at: fsdp2
        job.update()


class Experts(torch.nn.Module):
    """Two experts of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH * size), torch.nn.Linear(WIDTH * size, WIDTH)) for size in (2, 3)
        )

    def forward(self, x: torch.Tensor, route: list[int]) -> torch.Tensor:
        for each in route:
            x = x + self.own[each](x)  # at: experts
        return x.mean()


def experts(folder: Path) -> None:
    """ZeRO-3: no token of one rank goes to the first expert."""
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0},
        "unickpt": {"timing": {"enabled": True}},
    }
    engine, *_ = deepspeed.initialize(model=Experts(), config=config)
    for step in range(1 << 30):
        time.sleep(STEP_S)
        route = [1] if dist.get_rank() == 2 and step == AT else [0, 1]
        engine.backward(engine(torch.ones(4, WIDTH), route))
        engine.step()


# ---------------------------------------------------------------- slow ranks


def garbage(folder: Path) -> None:
    """Every rank collects at steps of its own."""
    job = Training(folder)
    gc.disable()
    keep = [[[] for _ in range(600_000)]]
    while keep:
        if job.step % 8 == 2 * job.rank:
            gc.collect()
        job.train()


def seventh(folder: Path) -> None:
    job = Training(folder)
    while True:
        job.train(more_s=0.25 if job.rank == 2 and job.step >= AT and job.step % 7 == 0 else 0.0)


def main() -> None:
    folder, fault = Path(sys.argv[1]), sys.argv[2]
    begin: Callable[[Path], None] = globals()[fault]
    begin(folder)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
