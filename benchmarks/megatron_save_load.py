"""Saves, loads and resharding loads in Megatron jobs: unickpt and megatron-core's ``torch_dist``, on CPU.

    python -m benchmarks.megatron_save_load [--millions 50] [--rounds 5] [--layouts tp2 tp2dp2]
        [--out FILE]

Every round saves and loads the same model and optimizer state (GPT, bf16, distributed optimizer), one after the other: a raw
write and fsync of as many bytes; ``torch_dist`` with ``dp_reshardable`` and with ``fully_reshardable`` optimizer state (fully
parallel, without its validation, which is for the first save only); and unickpt. Then all are loaded under another shape, if
the format supports it; the first model is gone by then, so that 350M parameters fit into 24 GB. Loads are from the page cache,
and again without it, if it can be dropped. Times are seconds of the slowest rank: medians with their spread, and ratios within
a round. A save includes the write. An asynchronous save has two times: the duration of the call, and the time until it is
written.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.deepspeed_save_load import Raw
from benchmarks.measure import cold, publish, ratio, slowest, warm
from unickpt.testing.launch import torchrun

FORMATS = ("dp_reshardable", "fully_reshardable", "unickpt")
LAYOUT_RANKS = {"tp2": 2, "tp2dp2": 4, "dp4": 4, "dp2": 2}
TARGETS = {"tp2": "pp2", "tp2dp2": "pp2dp2", "dp4": "tp2dp2", "dp2": "tp2"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--millions", type=int, default=50, help="parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layouts", nargs="+", default=["tp2", "tp2dp2"], choices=sorted(TARGETS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path, help="file for the seconds of every round")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def worker(args: argparse.Namespace) -> None:
    """Measure on one rank. Rank 0 writes the seconds of every round as JSON."""
    import logging
    import warnings

    from megatron_unickpt.testing.jobs import Job  # isort: skip  before anything of megatron

    import torch
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    from benchmarks.megatron_formats import load, save, shard_bytes
    from megatron_unickpt.testing.layouts import Layout
    from megatron_unickpt.testing.truth import close
    from unickpt.testing.launch import leave

    warnings.filterwarnings("ignore")
    logging.getLogger("unickpt").setLevel(logging.WARNING)
    folder = Path(args.worker)
    dist.init_process_group("gloo")
    width = max(64, int((args.millions * 1e6 / 40) ** 0.5) // 32 * 32)

    def save_behind(job: Job, kind: str, where: Path) -> tuple[float, float]:
        """Return the seconds of the call, and until the checkpoint is written."""
        queue = AsyncCallsQueue()
        began = time.perf_counter()
        stall = slowest(partial(save, job, kind, where, queue))
        queue.maybe_finalize_async_calls(blocking=True)
        dist.barrier()
        return stall, time.perf_counter() - began

    def fresh(where: Path) -> Path:
        if dist.get_rank() == 0:
            shutil.rmtree(where, ignore_errors=True)
            where.mkdir(parents=True)
        dist.barrier()
        return where

    result: dict[str, Any] = {}
    for name in [n for n in args.layouts if Layout.parse(f"gpt-{n}-dist").world == dist.get_world_size()]:
        job = Job(Layout.parse(f"gpt-{name}-dist"), width=width)
        job.train(1)
        mine = shard_bytes(job)
        raw = Raw(folder / f"raw{dist.get_rank()}", mine)
        seconds: dict[str, list[float]] = {}
        sizes: dict[str, list[int]] = {}
        for number in range(args.rounds + 1):
            raw.remove()
            found = {"memory copy": slowest(raw.copy), "raw write": slowest(raw.write)}
            for kind in FORMATS:
                where = fresh(folder / kind)
                found[f"{kind} save"] = slowest(partial(save, job, kind, where))
                files = [f.stat().st_size for f in where.rglob("*") if f.is_file()]
                sizes[kind] = [sum(files), len(files)]
                behind = fresh(folder / "behind")
                found[f"{kind} stall, asynchronous"], found[f"{kind} written, asynchronous"] = save_behind(job, kind, behind)
                fresh(behind)
            warm(raw.path)
            raw.read()  # each rank its own file
            found |= {"raw read": slowest(raw.read), "checked raw read": slowest(raw.read_checked)}
            for kind in FORMATS:
                warm(folder / kind)
                found[f"{kind} load"] = slowest(partial(load, job, kind, folder / kind))
            for what, read in (("raw read", raw.read), ("checked raw read", raw.read_checked)):
                if cold():
                    found[f"{what}, uncached"] = slowest(read)
            for kind in FORMATS:  # last, because dropping the cache also drops the code of the programs
                if cold():
                    found[f"{kind} load, uncached"] = slowest(partial(load, job, kind, folder / kind))
            if number:  # the first round touches memory and disk, and starts helper processes, for the first time
                for key, value in found.items():
                    seconds.setdefault(key, []).append(value)
        state = torch.tensor([mine])
        dist.all_reduce(state)
        del job
        gc.collect()
        other = Job(Layout.parse(f"gpt-{TARGETS[name]}-dist"), width=width, seed=2)
        for number in range(args.rounds + 1):
            for kind in FORMATS[1:]:
                warm(folder / kind)
                value = slowest(partial(load, other, kind, folder / kind))
                if number:
                    seconds.setdefault(f"{kind} load as another layout", []).append(value)
        result[name] = {"seconds": seconds, "sizes": sizes, "mine": int(state.item()) // dist.get_world_size()}
        del other
        gc.collect()
    if dist.get_rank() == 0:
        (folder / f"result-w{dist.get_world_size()}.json").write_text(json.dumps(result))
    dist.barrier()
    close()
    leave()


def table(result: dict[str, Any]) -> list[str]:
    """Return a Markdown table of medians, spreads, and ratios to the fastest mode of Megatron."""
    seconds = result["seconds"]
    rows = ["| | median s | min to max | relative to the fastest stock format | relative to raw |", "|---|---|---|---|---|"]
    for name, values in seconds.items():
        kind = name.split()[1].rstrip(",")
        how = next((f", {word}" for word in ("uncached", "asynchronous") if name.endswith(word)), "")
        stock = [f"{k} {kind}{how}" for k in FORMATS[:2]]
        compared = kind in ("save", "load", "stall", "written")
        best = min(stock, key=lambda k: statistics.median(seconds[k])) if compared else name
        raw = {"save": "raw write", "write": "raw write", "written": "raw write", "stall": "memory copy"}.get(kind, "raw read")
        raw = "" if how == ", uncached" or name in ("memory copy", "checked raw read") else raw
        to_stock = ratio(values, seconds[best]) if compared else "-"
        to_raw = ratio(values, seconds[raw]) if raw else "-"
        low, high = min(values), max(values)
        rows.append(f"| {name} | {statistics.median(values):.2f} | {low:.2f} to {high:.2f} | {to_stock} | {to_raw} |")
    sizes = ", ".join(f"{kind} {size:,} in {files} files" for kind, (size, files) in result["sizes"].items())
    return [*rows, "", f"Bytes on disk: {sizes}."]


def main() -> None:
    args = parse()
    if args.worker:
        worker(args)
        return
    options = [f"--millions={args.millions}", f"--rounds={args.rounds}", "--layouts", *args.layouts]
    lines = [f"`python -m benchmarks.megatron_save_load {' '.join(options)}`", ""]
    with tempfile.TemporaryDirectory() as folder:
        results: dict[str, Any] = {}
        for world in sorted({LAYOUT_RANKS[name] for name in args.layouts}):
            torchrun(world, "benchmarks.megatron_save_load", *options, "--worker", folder, timeout_s=1500)
            results |= json.loads((Path(folder) / f"result-w{world}.json").read_text())
    from importlib.metadata import version

    versions = f"Python {platform.python_version()}, torch {version('torch')}, megatron-core {version('megatron-core')}"
    lines.append(f"GPT of {args.millions}M parameters, bf16, distributed optimizer; {os.cpu_count()} cores, {versions}.")
    for name, result in results.items():
        lines += ["", f"### {name}, loaded as {TARGETS[name]}", "", *table(result)]
    text = "\n".join(lines) + "\n"
    publish(text, args.out)
    if args.json:
        found = [
            {
                "title": f"Megatron {args.millions}M, {name}",
                "loaded_as": TARGETS[name],
                "ranks": LAYOUT_RANKS[name],
                "mine": result["mine"],
                "seconds": result["seconds"],
                "bytes": {kind: size for kind, (size, _) in result["sizes"].items()},
            }
            for name, result in results.items()
        ]
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
