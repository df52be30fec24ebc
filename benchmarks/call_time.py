"""Processor time that the call of an asynchronous save takes in the thread of training, by the number of parameters.

    python -m benchmarks.call_time [--tensors 300 10000] [--frameworks deepspeed megatron torch] [--saves 10] [--mib 16]

One process per row: one rank without a GPU, tiny layers, Adam. DeepSpeed is ZeRO-1 in fp32, Megatron its GPT in bf16 with the
distributed optimizer, torch is ``save_training`` of a plain module. Of Megatron's call, its own ``sharded_state_dict`` of the
model stands in a column. The first saves, which describe the state, do not count. Processor time of the thread
(``time.thread_time``) leaves out waits, and what other threads take. It still grows on a machine that is busy.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, publish

REPO = Path(__file__).resolve().parent.parent
_WARM = 3  # saves that do not count
FRAMEWORKS = ("deepspeed", "megatron", "torch")
_STEPS = 1000  # more parameters: a step after every fifth save


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tensors", nargs="+", type=int, default=[300, 10_000])
    parser.add_argument("--frameworks", nargs="+", default=list(FRAMEWORKS), choices=FRAMEWORKS)
    parser.add_argument("--saves", type=int, default=10, help="that count")
    parser.add_argument("--mib", type=int, default=16, help="of the parameters and their states together")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def model_of(tensors: int, size_bytes: int) -> Any:
    """Return a module with about so many parameters, three in a layer, of this size with the states of Adam."""
    import torch

    size = max(size_bytes // 12 // tensors, 8)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift, self.rest = (torch.nn.Parameter(torch.rand(size)) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale.mean() + self.shift.mean() + self.rest.mean()

    return torch.nn.Sequential(*(Layer() for _ in range(tensors // 3)))


@dataclass
class Job:
    """A job of one rank.

    Attributes:
        parameters: their number.
        step: trains.
        save: begins a save.
        finish: waits for it.
        theirs: processor seconds of what the framework itself does in each call.
    """

    parameters: int
    step: Callable[[], Any]
    save: Callable[[Path], Any]
    finish: Callable[[], bool]
    theirs: list[float] = field(default_factory=list)


def deepspeed_job(tensors: int, size_bytes: int) -> Job:
    port = str(29_500 + os.getpid() % 10_000)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import torch

    model = model_of(tensors, size_bytes)
    deepspeed.init_distributed("gloo", verbose=False)
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 5_000_000},
        "unickpt": {"enabled": True, "async_save": True},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step() -> None:
        engine.backward(engine(torch.rand(1)).sum())
        engine.step()

    def finish() -> bool:
        engine.checkpoint_engine.saver.finish()
        return bool(engine.checkpoint_engine.last_save.complete)

    return Job(_count(model), step, lambda place: engine.save_checkpoint(str(place.parent), tag=place.name), finish)


def megatron_job(tensors: int, size_bytes: int) -> Job:
    from megatron_unickpt.testing import jobs  # isort: skip  # before anything of megatron
    import torch
    import torch.distributed as dist

    import megatron_unickpt
    from megatron_unickpt.testing.layouts import Layout

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    layers = max(tensors // 12, 1)
    width = max(int((size_bytes / 16 / 12 / layers) ** 0.5) // 8 * 8, 8)
    job = jobs.Job(Layout(), width=width, layers=layers)
    saves: list[Any] = []
    theirs: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*args, **more)
            finally:
                theirs[-1] += time.thread_time() - begin

        return call

    for chunk in job.chunks:
        module = chunk
        while hasattr(module, "module"):
            module = module.module
        module.sharded_state_dict = timed(module.sharded_state_dict)

    def save(place: Path) -> None:
        theirs.append(0.0)
        saves.append(megatron_unickpt.save(place, job.chunks, job.optimizer, iteration=job.step, asynchronous=True))

    def finish() -> bool:
        saves[-1].conclude()
        return bool(saves[-1].committed)

    count = sum(_count(chunk) for chunk in job.chunks)
    assert torch.get_num_threads() == 1
    return Job(count, lambda: job.train(1), save, finish, theirs)


def _count(model: Any) -> int:
    return sum(1 for _ in model.parameters())


def torch_job(tensors: int, size_bytes: int) -> Job:
    import torch

    import unickpt

    model = model_of(tensors, size_bytes)
    optimizer, options = torch.optim.AdamW(model.parameters(), foreach=True), unickpt.SaveOptions(asynchronous=True)
    saves: list[Any] = []

    def step() -> None:
        model(torch.rand(1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def save(place: Path) -> None:
        saves.append(unickpt.save_training(model, optimizer, place, step=len(saves), options=options))

    def finish() -> bool:
        saves[-1].wait()
        return bool(saves[-1].committed)

    return Job(_count(model), step, save, finish)


JOBS = {"deepspeed": deepspeed_job, "megatron": megatron_job, "torch": torch_job}


def worker(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one row."""
    import torch

    torch.set_num_threads(1)
    sys.setrecursionlimit(100_000)
    tensors = args.tensors[0]
    size_bytes = args.mib << 20
    job = JOBS[args.frameworks[0]](tensors, size_bytes)
    job.step()
    job.step()
    found: dict[str, list[float]] = {"processor": [], "wall": [], "copy": []}
    source = torch.rand(size_bytes // 4)
    target = source.clone()
    for number in range(_WARM + args.saves):
        place = Path(args.worker) / f"save{number}"
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        job.save(place)
        cpu, wall = time.thread_time() - begin_cpu, time.perf_counter() - begin
        assert job.finish(), place
        shutil.rmtree(place)
        begin = time.thread_time()
        target.copy_(source)
        if number >= _WARM:
            found["processor"].append(cpu)
            found["wall"].append(wall)
            found["copy"].append(time.thread_time() - begin)
        if tensors <= _STEPS or number % 5 == 0:
            job.step()
    return {"parameters": job.parameters, "theirs": job.theirs[_WARM:], **found}


def main() -> None:
    args = parse()
    if args.worker:
        (Path(args.worker) / "result.json").write_text(json.dumps(worker(args)))
        return
    lines = [
        f"One rank, Adam, {args.mib} MiB with states, {args.saves} saves; {machine()}.",
        "",
        "| save | parameters | processor time of the call, ms: median, least | of it the framework's | memory copy, ms |",
        "|---|---|---|---|---|",
    ]
    for framework in args.frameworks:
        for tensors in args.tensors:
            with tempfile.TemporaryDirectory(prefix="unickpt-call-time") as folder:
                own = [
                    "--frameworks",
                    framework,
                    "--tensors",
                    str(tensors),
                    "--saves",
                    str(args.saves),
                    "--mib",
                    str(args.mib),
                    "--worker",
                    folder,
                ]
                subprocess.run([sys.executable, "-m", "benchmarks.call_time", *own], cwd=REPO, check=True)
                data = json.loads((Path(folder) / "result.json").read_text())
            median, least = (1e3 * of(data["processor"]) for of in (statistics.median, min))
            copy = 1e3 * statistics.median(data["copy"])
            theirs = f"{1e3 * statistics.median(data['theirs']):.1f}" if data["theirs"] else "-"
            lines.append(f"| {framework} | {data['parameters']:,} | {median:.1f}, {least:.1f} | {theirs} | {copy:.1f} |")
    publish("\n".join(lines) + "\n", args.out)


if __name__ == "__main__":
    main()
