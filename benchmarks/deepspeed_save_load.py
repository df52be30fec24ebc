"""Save and load of this package beside DeepSpeed's own and the physical limit, in one run.

    python benchmarks/deepspeed_save_load.py [--ranks 2] [--millions 50] [--rounds 5] [--stage 1] [--out docs/performance.md]

Every round measures, one after the other on the same state: a raw write and fsync of the same
bytes, DeepSpeed's own save, this package's save; a raw read, DeepSpeed's own load, this package's
load under the same layout. Figures are medians with their spread, and ratios within a round, so
that a slow minute of the machine hits both sides. Synchronous saving: making it asynchronous is
later work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
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
WHAT = ("raw write", "DeepSpeed save", "unickpt save", "raw read", "DeepSpeed load", "unickpt load")


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
    import deepspeed
    import torch
    from deepspeed import comm as dist

    warnings.filterwarnings("ignore")
    folder = Path(args.worker)
    deepspeed.init_distributed("gloo", verbose=False)

    def build(universal: bool) -> Any:
        torch.manual_seed(1)
        width = 1024
        layers = [torch.nn.Linear(width, width) for _ in range(max(1, args.millions * 1_000_000 // width**2))]
        config = {
            "train_batch_size": dist.get_world_size(),
            "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
            "zero_optimization": {"stage": args.stage},
            "unickpt": {"enabled": universal},
        }
        model = torch.nn.Sequential(*layers)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        engine.backward(engine(torch.rand(1, width)).mean())
        engine.step()
        return engine

    def timed(action: Callable[[], Any]) -> float:
        dist.barrier()
        begin = time.perf_counter()
        action()
        dist.barrier()
        return time.perf_counter() - begin

    stock, ours = build(False), build(True)
    mine = sum(getattr(p, "ds_numel", p.numel()) for p in ours.module.parameters()) * 12 // dist.get_world_size()
    blob = os.urandom(1 << 20) * (mine >> 20)
    raw = folder / f"raw{dist.get_rank()}"

    def raw_write() -> None:
        with raw.open("wb", buffering=0) as file:
            file.write(blob)
            os.fsync(file.fileno())

    seconds: dict[str, list[float]] = {name: [] for name in WHAT}
    for number in range(args.rounds + 1):
        theirs, own = folder / f"stock{number}", folder / f"unickpt{number}"
        found = [
            timed(raw_write),
            timed(partial(stock.save_checkpoint, str(theirs))),
            timed(partial(ours.save_checkpoint, str(own))),
            timed(raw.read_bytes),
            timed(partial(stock.load_checkpoint, str(theirs))),
            timed(partial(ours.load_checkpoint, str(own))),
        ]
        if number:  # the first round touches memory and disk for the first time
            for name, value in zip(WHAT, found, strict=True):
                seconds[name].append(value)
        sizes = [sum(f.stat().st_size for f in place.rglob("*") if f.is_file()) for place in (theirs, own)]
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(theirs)
            shutil.rmtree(own)
        dist.barrier()
    if dist.get_rank() == 0:
        result = {"seconds": seconds, "bytes": {"DeepSpeed": sizes[0], "unickpt": sizes[1]}}
        (folder / "result.json").write_text(json.dumps(result))


def table(result: dict[str, Any]) -> str:
    """Medians, spreads and the ratios that matter, as Markdown."""
    seconds = result["seconds"]
    against = {"save": ("raw write", "DeepSpeed save"), "load": ("raw read", "DeepSpeed load")}
    rows = ["| | median s | min to max | against raw | against DeepSpeed |", "|---|---|---|---|---|"]
    for name in WHAT:
        kind = "save" if name in WHAT[:3] else "load"
        cells = [ratio(seconds[name], seconds[other]) if name != other else "1" for other in against[kind]]
        values = seconds[name]
        rows.append(
            f"| {name} | {statistics.median(values):.2f} | {min(values):.2f} to {max(values):.2f} | {' | '.join(cells)} |"
        )
    sizes = result["bytes"]
    rows += ["", f"Bytes on disk: DeepSpeed {sizes['DeepSpeed']:,}, unickpt {sizes['unickpt']:,}."]
    return "\n".join(rows)


def ratio(values: list[float], others: list[float]) -> str:
    """Median of the ratios within each round, with their spread."""
    found = [a / b for a, b in zip(values, others, strict=True)]
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def main() -> None:
    args = parse()
    if args.worker:
        worker(args)
        return
    import deepspeed
    import torch

    with tempfile.TemporaryDirectory() as folder:
        options = [f"--{k}={getattr(args, k)}" for k in ("ranks", "millions", "rounds", "stage")]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks), __file__]
        env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, *options, "--worker", folder], check=True, env=env, cwd=REPO, stdout=subprocess.DEVNULL)
        result = json.loads((Path(folder) / "result.json").read_text())
    heading = (
        f"{args.millions}M parameters, fp32 with Adam, ZeRO-{args.stage} on {args.ranks} ranks, {args.rounds} rounds; "
        f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, "
        f"DeepSpeed {deepspeed.__version__}."
    )
    text = f"`python benchmarks/deepspeed_save_load.py {' '.join(options)}`\n\n{heading}\n\n{table(result)}\n"
    print(text)
    if args.out:
        with args.out.open("a") as file:
            file.write("\n" + text)


if __name__ == "__main__":
    main()
