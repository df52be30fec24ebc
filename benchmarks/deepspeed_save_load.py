"""Saves and loads under DeepSpeed: this package, DeepSpeed's own, torch.distributed.checkpoint, and the physical limits.

    python benchmarks/deepspeed_save_load.py [--ranks 2] [--millions 50] [--rounds 5] [--stage 1] [--out docs/performance.md]

Every round measures, one after the other on the same state:

- one warm copy in memory, and a raw write with fsync, of each rank's bytes;
- DeepSpeed's own save; torch.distributed.checkpoint's save and async_save (DCP, of each rank's own tensors);
- this package: how long the call takes (the stall), and how long it takes until the checkpoint is committed;
- a raw read, the loads of all three, under the same layout, from the page cache and (where it may be dropped) without;
- training steps of DeepSpeed's, alone and while this package and DCP write behind them.

Seconds of the slowest rank; medians with their spread; ratios within a round, so that a slow minute of the machine
hits all of them. The first round is not counted: it touches memory and disk for the first time.
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
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from benchmarks.measure import cold, machine, settle, size_of, slowest, table, warm  # noqa: E402

AGAINST = {
    "raw write": ("raw write", ""),
    "DeepSpeed save": ("raw write", ""),
    "DCP save": ("raw write", "DeepSpeed save"),
    "DCP async_save, stall": ("memory copy", "DeepSpeed save"),
    "DCP async_save, written": ("raw write", "DeepSpeed save"),
    "unickpt stall": ("memory copy", "DeepSpeed save"),
    "unickpt committed": ("raw write", "DeepSpeed save"),
    "DeepSpeed load": ("raw read", ""),
    "DCP load": ("raw read", "DeepSpeed load"),
    "unickpt load": ("raw read", "DeepSpeed load"),
    "DeepSpeed load, uncached": ("raw read, uncached", ""),
    "DCP load, uncached": ("raw read, uncached", "DeepSpeed load, uncached"),
    "unickpt load, uncached": ("raw read, uncached", "DeepSpeed load, uncached"),
    "step beside unickpt": ("step alone", "step beside DCP"),
    "step beside DCP": ("step alone", ""),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--millions", type=int, default=50, help="parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def worker(args: argparse.Namespace) -> None:
    """One rank: measure and, on the first, write the seconds of every round as JSON."""
    import logging

    import deepspeed
    import torch
    import torch.distributed.checkpoint as dcp
    from deepspeed import comm as dist

    warnings.filterwarnings("ignore")
    logging.getLogger("unickpt").setLevel(logging.WARNING)
    folder = Path(args.worker)
    deepspeed.init_distributed("gloo", verbose=False)
    rank, world = dist.get_rank(), dist.get_world_size()

    def build(universal: bool) -> Any:
        torch.manual_seed(1)
        width = 1024
        layers = [torch.nn.Linear(width, width) for _ in range(max(1, args.millions * 1_000_000 // width**2))]
        config = {
            "train_batch_size": world,
            "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
            "zero_optimization": {"stage": args.stage},
            "unickpt": {"enabled": universal},
        }
        model = torch.nn.Sequential(*layers)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        step(engine)
        return engine

    def step(engine: Any) -> None:
        engine.backward(engine(torch.rand(1, 1024)).mean())
        engine.step()

    stock, ours = build(False), build(True)
    apart = torch.distributed.new_group(backend="gloo")  # DCP's thread communicates; among training's collectives it can hang
    mine = sum(getattr(p, "ds_numel", p.numel()) for p in ours.module.parameters()) * 12 // world
    # what DCP saves: as many tensors as a rank holds, of the same sizes and in all as many bytes
    count = max(1, args.millions * 1_000_000 // 1024**2)
    tensors = {f"rank{rank}.{at}": torch.rand(mine // 4 // count) for at in range(count)}
    source, target = torch.rand(mine // 4), torch.zeros(mine // 4)
    blob = memoryview(source.numpy()).cast("B")
    raw = folder / f"raw{rank}"
    buffer = bytearray(mine // 4 * 4)

    def raw_write() -> None:
        with raw.open("wb", buffering=0) as file:
            file.write(blob)
            os.fsync(file.fileno())

    def raw_read() -> None:
        with raw.open("rb", buffering=0) as file:
            file.readinto(buffer)

    def steps(until: Callable[[], bool], at_least: int = 4) -> float:
        """Median seconds of a training step, on this rank, while something else goes on."""
        found = []
        flag = torch.zeros(1)
        while True:
            begin = time.perf_counter()
            step(stock)
            found.append(time.perf_counter() - begin)
            flag.fill_(float(until() and len(found) >= at_least))
            dist.all_reduce(flag, op=dist.ReduceOp.MIN)
            if flag.item():
                return statistics.median(found)

    seconds: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    for number in range(args.rounds + 1):
        theirs, own, plain, behind = (folder / f"{name}{number}" for name in ("stock", "unickpt", "dcp", "dcp_async"))
        pending: list[Any] = []
        found = {
            "memory copy": slowest(lambda: target.copy_(source)),
            "raw write": slowest(raw_write),
            "DeepSpeed save": slowest(partial(stock.save_checkpoint, str(theirs))),
            "DCP save": slowest(lambda place=plain: dcp.save(dict(tensors), checkpoint_id=str(place))),
        }
        settle()
        began = time.perf_counter()
        found["DCP async_save, stall"] = slowest(
            lambda place=behind, into=pending: into.append(
                dcp.async_save(dict(tensors), checkpoint_id=str(place), process_group=apart)
            )
        )
        found["step beside DCP"] = steps(pending[0].done)
        pending[0].result()
        found["DCP async_save, written"] = time.perf_counter() - began
        found["step alone"] = steps(lambda: True, 8)
        ours.save_checkpoint(str(own), tag="alone")
        ours.checkpoint_engine.saver.finish()
        settle()
        began = time.perf_counter()
        found["unickpt stall"] = slowest(partial(ours.save_checkpoint, str(own), tag="quiet"))
        ours.checkpoint_engine.saver.finish()
        dist.barrier()
        found["unickpt committed"] = time.perf_counter() - began
        save = partial(ours.save_checkpoint, str(own), tag="busy")
        settle()
        save()
        found["step beside unickpt"] = steps(lambda: not ours.checkpoint_engine.saver.pending)
        ours.checkpoint_engine.saver.finish()
        dist.barrier()
        loads = {
            "raw read": (raw, raw_read),
            "DeepSpeed load": (theirs, partial(stock.load_checkpoint, str(theirs))),
            "DCP load": (plain, partial(dcp.load, dict(tensors), checkpoint_id=str(plain))),
            "unickpt load": (own, partial(ours.load_checkpoint, str(own), tag="quiet")),
        }
        for name, (place, load) in loads.items():
            warm(place)
            found[name] = slowest(load)
        for name, (_, load) in loads.items():  # afterwards: what is dropped is also the programs' own code
            if cold():
                found[f"{name}, uncached"] = slowest(load)
        if number:
            for name, value in found.items():
                seconds.setdefault(name, []).append(value)
        sizes = {"DeepSpeed": size_of(theirs), "DCP": size_of(plain), "unickpt": size_of(own / "quiet")}
        dist.barrier()
        if rank == 0:
            for place in (theirs, own, plain, behind):
                shutil.rmtree(place)
        dist.barrier()
    if rank == 0:
        (folder / "result.json").write_text(json.dumps({"seconds": seconds, "bytes": sizes, "mine": mine}))


def main() -> None:
    args = parse()
    if args.worker:
        worker(args)
        return
    import deepspeed

    with tempfile.TemporaryDirectory() as folder:
        options = [f"--{k}={getattr(args, k)}" for k in ("ranks", "millions", "rounds", "stage")]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks), __file__]
        env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, *options, "--worker", folder], check=True, env=env, cwd=REPO, stdout=subprocess.DEVNULL)
        result = json.loads((Path(folder) / "result.json").read_text())
    heading = (
        f"{args.millions}M parameters, fp32 with Adam, ZeRO-{args.stage} on {args.ranks} ranks, "
        f"{result['mine']:,} bytes each, {args.rounds} rounds; {machine()}, DeepSpeed {deepspeed.__version__}."
    )
    order = dict.fromkeys(["memory copy", "raw write", "raw read", "raw read, uncached", *AGAINST, "step alone"])
    seconds = {name: result["seconds"][name] for name in order if name in result["seconds"]}
    sizes = ", ".join(f"{name} {size:,}" for name, size in result["bytes"].items())
    text = f"`python benchmarks/deepspeed_save_load.py {' '.join(options)}`\n\n{heading}\n\n"
    text += table(seconds, AGAINST, ["against the physical limit", "against the peer"]) + f"\n\nBytes on disk: {sizes}.\n"
    print(text)
    if args.out:
        with args.out.open("a") as file:
            file.write("\n" + text)


if __name__ == "__main__":
    main()
