"""Shared by the benchmarks: rounds, ratios within a round, tables."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Seconds = Mapping[str, Sequence[float]]  # measurement -> seconds of every round


def settle() -> None:
    """Write all pending data to disk, so that it does not count for the next measurement. Collective."""
    import torch.distributed as dist

    dist.barrier()
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()


def warm(*folders: Path, instead_of: Path | None = None) -> None:
    """Bring all files into the page cache. Collective.

    Args:
        folders: files, and folders with files.
        instead_of: folder whose other files leave the cache first, where not all fit into memory together: the kernel
            prefers pages that were used twice, such as those of files that were written through the cache.
    """
    import torch.distributed as dist

    settle()
    if dist.get_rank() == 0:
        wanted = [file for folder in folders for file in (folder, *folder.rglob("*")) if file.is_file()]
        if instead_of is not None:
            for file in set(filter(Path.is_file, instead_of.rglob("*"))).difference(wanted):
                with file.open("rb") as other:
                    os.posix_fadvise(other.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for _ in range(3):
            for file in wanted:
                with file.open("rb", buffering=0) as source:
                    while source.read(16 << 20):
                        pass
            if (share := _cached(wanted)) > 0.99:
                break
        else:
            print(f"only {share:.0%} of the files are in the page cache: this measurement is not one of memory", flush=True)
    dist.barrier()


def _cached(files: Sequence[Path], step_bytes: int = 256 << 10) -> float:
    """Return the share of places of files, one in ``step_bytes``, that can be read without the disk."""
    found = asked = 0
    buffer = bytearray(1)
    for file in files:
        with file.open("rb", buffering=0) as source:
            for at in range(0, file.stat().st_size, step_bytes):
                asked += 1
                with contextlib.suppress(BlockingIOError):
                    found += os.preadv(source.fileno(), [buffer], at, os.RWF_NOWAIT)
    return found / max(asked, 1)


def cold() -> bool:
    """Drop the page cache. Returns False if the system does not allow it. Collective."""
    import torch.distributed as dist

    settle()
    allowed = True
    if dist.get_rank() == 0:
        try:
            Path("/proc/sys/vm/drop_caches").write_text("3")
        except OSError:
            allowed = False
    found = [allowed]
    dist.broadcast_object_list(found, 0)
    return found[0]


def slowest(action: Callable[[], Any]) -> float:
    """Return the seconds of an action that all ranks begin together, on the slowest rank."""
    settle()
    begin = time.perf_counter()
    action()
    return latest(time.perf_counter() - begin)


def latest(seconds: float) -> float:
    """Return the largest number of seconds of all ranks."""
    import torch
    import torch.distributed as dist

    taken = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken.item())


class Peak:
    """Peak memory of this process in a block: ``bytes`` is the peak above the initial amount.

    It is resident memory, from the kernel's high-water mark; zero if that cannot be reset.
    """

    def __enter__(self) -> Peak:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self._begin = _status("VmRSS")
        self.bytes = 0
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = max(_status("VmHWM") - self._begin, 0)


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


def most(value: int) -> int:
    """Return the largest value of all ranks. Collective."""
    import torch
    import torch.distributed as dist

    found = torch.tensor([value])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found.item())


def ratio(values: Sequence[float], others: Sequence[float]) -> str:
    """Return the median of the ratios within each round, with their spread."""
    found = [a / b for a, b in zip(values, others, strict=True)]
    digits = 2 if statistics.median(found) >= 0.1 else 4
    return f"{statistics.median(found):.{digits}f} ({min(found):.{digits}f} to {max(found):.{digits}f})"


def table(seconds: Seconds, against: Mapping[str, Sequence[str]], columns: Sequence[str]) -> str:
    """Return a Markdown table of medians, spreads and ratios.

    Args:
        seconds: seconds of every round, by measurement.
        against: measurement -> the measurements to compare it with, one per column. A missing one is not compared.
        columns: titles of the comparisons.
    """
    lines = [f"| | median s | min to max | {' | '.join(columns)} |", "|---" * (3 + len(columns)) + "|"]
    for name, values in seconds.items():
        others = against.get(name, ())
        cells = [ratio(values, seconds[other]) if other else "-" for other in others]
        cells += ["-"] * (len(columns) - len(cells))
        low, high = min(values), max(values)
        lines.append(f"| {name} | {statistics.median(values):.3f} | {low:.3f} to {high:.3f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def machine() -> str:
    """Return a description of the machine for the heading of a table."""
    import torch

    return f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"


def small_buckets(stage: int) -> dict[str, int]:
    """Return ZeRO settings for several models in one process: small buckets, and no gathering of all parameters."""
    return {
        "stage": stage,
        "reduce_bucket_size": 50_000_000,
        "stage3_prefetch_bucket_size": 10_000_000,
        "stage3_max_live_parameters": 50_000_000,
        "stage3_max_reuse_distance": 50_000_000,
    }


def publish(text: str, out: Path | None) -> None:
    """Print a result, and write it into a file."""
    print(text)
    if out:
        with out.open("a") as file:
            file.write("\n" + text)


def sent_bytes() -> int:
    """Return the bytes that this machine has sent on all network interfaces. Ranks of one host send through ``lo``."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[8]) for line in lines)


def size_of(folder: Path) -> int:
    """Return the number of bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
