"""Peak host memory of a rank that saves or loads a Megatron distributed optimizer, beside megatron-core's formats.

    python -m benchmarks.host_memory [--millions 100] [--ranks 4] [--rounds 3] [--out FILE]

Every round starts one job per format (GPT, bf16, distributed optimizer; data parallel ranks), which saves, saves asynchronously
and loads. Peak: the most resident memory of a rank during the call, above that before it. The state itself is in host memory
before the call, on a CPU. The figures are factors of the masters and moments that one rank holds, on the rank with the highest.
Memory of megatron-core's writer processes is not in them.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import shutil
import statistics
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.measure import Peak, most, publish
from unickpt.testing.launch import torchrun

FORMATS = ("unickpt", "fully_reshardable", "dp_reshardable")
CALLS = ("save", "asynchronous save", "load")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--millions", type=int, default=100, help="parameters")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def worker(args: argparse.Namespace) -> None:
    """Measure one format. Rank 0 writes the factors."""
    from megatron_unickpt.testing.jobs import Job  # isort: skip  before anything of megatron

    import torch.distributed as dist
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    from benchmarks.megatron_formats import load, save, shard_bytes
    from megatron_unickpt.testing.layouts import Layout
    from megatron_unickpt.testing.truth import close
    from unickpt.testing.launch import leave

    warnings.filterwarnings("ignore")
    logging.getLogger("unickpt").setLevel(logging.WARNING)
    kind, folder = args.worker[0], Path(args.worker[1])
    dist.init_process_group("gloo")
    width = max(64, int((args.millions * 1e6 / 40) ** 0.5) // 32 * 32)
    job = Job(Layout(dp=args.ranks), width=width)
    job.train(1)

    def save_behind(where: Path) -> None:
        queue = AsyncCallsQueue()
        save(job, kind, where, queue)
        queue.maybe_finalize_async_calls(blocking=True)

    found: dict[str, float] = {}
    where = folder / "checkpoint"
    actions: list[Callable[[Path], None]] = [partial(save, job, kind), save_behind, partial(load, job, kind)]
    for call, action in zip(CALLS, actions, strict=True):
        if dist.get_rank() == 0 and call != "load":
            shutil.rmtree(where, ignore_errors=True)
            where.mkdir()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else memory that an earlier call has freed would be used again, unseen
        dist.barrier()
        with Peak() as peak:
            action(where)
        found[call] = most(peak.bytes) / shard_bytes(job)
    found["bytes"] = shard_bytes(job)
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    close()
    leave()


def measured(kind: str, options: list[str], ranks: int) -> dict[str, float]:
    """Return the factor of every call, from a job of its own."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun(ranks, "benchmarks.host_memory", *options, "--worker", kind, folder, timeout_s=900)
        found: dict[str, float] = json.loads((Path(folder) / "found.json").read_text())
        return found


def main() -> None:
    args = parse()
    if args.worker:
        worker(args)
        return
    options = [f"--millions={args.millions}", f"--ranks={args.ranks}", f"--rounds={args.rounds}"]
    found = {kind: [measured(kind, options, args.ranks) for _ in range(args.rounds)] for kind in FORMATS}
    shard = found["unickpt"][0]["bytes"] / 1e6
    lines = [f"`python -m benchmarks.host_memory {' '.join(options)}`: a rank holds {shard:.0f} MB of masters and moments.", ""]
    lines += ["| | " + " | ".join(CALLS) + " |", "|---" * (len(CALLS) + 1) + "|"]
    for kind, rounds in found.items():
        cells = [[each[call] for each in rounds] for call in CALLS]
        texts = [f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in cells]
        lines.append(f"| {kind} | {' | '.join(texts)} |")
    publish("\n".join(lines) + "\n", args.out)


if __name__ == "__main__":
    main()
