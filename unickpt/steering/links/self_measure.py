"""Measures this host: compute, memory and GPUs. A process of its own, which may hang or crash with a faulty device.

It writes one line to its standard output: GFLOP/s of one core, GFLOP/s of the slowest GPU (0 without one), GB/s of the memory,
what is wrong, and the share of the processor time that other programs used.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

SIDE, DEVICE_SIDE = 512, 4096  # of the matrices
MEMORY_BYTES, DEVICE_BYTES = 128 << 20, 512 << 20
PATTERNS = (0x5A5A_5A5A_5A5A_5A5A, 0x25A5_A5A5_A5A5_A5A5)
DEVICE_SHARE = 0.7  # of the median of the GPUs of a host
DEVICES = "--devices"
TIME_S = 0.25  # of each measurement
_NVIDIA = Path("/dev/nvidiactl")
_STAT = Path("/proc/stat")
_IDLE, _GUEST = slice(3, 5), 8  # columns of proc_stat(5): idle and waiting for I/O; from here on, what others contain already


def shortest_s(work: Callable[[], Any], time_s: float = TIME_S) -> float:
    """Return the shortest time of a piece of work that is repeated for a while: other work of the host disturbs it least."""
    end_s, best_s = time.perf_counter() + time_s, float("inf")
    while best_s == float("inf") or time.perf_counter() < end_s:
        began_s = time.perf_counter()
        work()
        best_s = min(best_s, time.perf_counter() - began_s)
    return max(best_s, 1e-9)


def compute() -> tuple[float, str]:
    """Return GFLOP/s of a product of float32 ``[SIDE, SIDE]`` matrices, and what is wrong.

    The entries are small whole numbers, so the sums are exact, and a second way to compute them must give the same.
    """
    source = np.random.default_rng(1)
    one, other = (source.integers(-8, 9, (SIDE, SIDE)).astype(np.float32) for _ in range(2))
    vector = source.integers(-2, 3, SIDE).astype(np.float64)
    expected = one.astype(np.float64) @ (other.astype(np.float64) @ vector)
    product = one @ other
    wrong = "" if np.array_equal(product.astype(np.float64) @ vector, expected) else "compute: a matrix product is wrong"
    return 2e-9 * SIDE**3 / shortest_s(lambda: np.matmul(one, other, out=product)), wrong


def memory() -> tuple[float, str]:
    """Return GB/s of a copy of ``MEMORY_BYTES`` bytes, read and write, and what is wrong."""
    first, second = (np.empty(MEMORY_BYTES // 16, np.uint64) for _ in range(2))
    wrong = ""
    for pattern in PATTERNS:
        first.fill(pattern)
        second[:] = first
        if (second != pattern).any():
            wrong = "memory: a pattern has changed"
    return 1e-9 * MEMORY_BYTES / shortest_s(lambda: np.copyto(second, first)), wrong


def ticks() -> tuple[float, float]:
    """Return the processor time of this machine so far, and what other programs, or other virtual machines, have used of it.

    In ticks of the clock; (0, 0) if it is unknown.
    """
    try:
        columns = [int(word) for word in _STAT.read_text().partition("\n")[0].split()[1:]][:_GUEST]
    except (OSError, ValueError):
        return 0.0, 0.0
    own = sum(os.times()[:2]) * os.sysconf("SC_CLK_TCK")
    return float(sum(columns)), sum(columns) - sum(columns[_IDLE]) - own


def others_share(before: tuple[float, float], after: tuple[float, float]) -> float:
    """Return the share of the processor time between two results of ``ticks`` that other programs used, 0 to 1."""
    whole = after[0] - before[0]
    return min(max((after[1] - before[1]) / whole, 0.0), 1.0) if whole > 0 else 0.0


def devices() -> tuple[float, str]:
    """Return GFLOP/s of the slowest GPU for float32 products, and what is wrong; (0, '') without a GPU of CUDA."""
    if not _NVIDIA.exists():
        return 0.0, ""
    try:
        import torch
    except ImportError:
        return 0.0, ""
    if not torch.cuda.is_available():
        return 0.0, "GPU: the driver is there, and CUDA finds no device" if torch.version.cuda else ""
    found = [_device(torch, torch.device("cuda", number)) for number in range(torch.cuda.device_count())]
    slow = slowest([speed for speed, _ in found])
    return slow[0], next((wrong for _, wrong in found if wrong), slow[1])


def slowest(speeds: Sequence[float]) -> tuple[float, str]:
    """Return the speed of the slowest GPU of a host in GFLOP/s, and what is wrong beside the others."""
    usual, least = median(speeds), min(speeds)
    bad = least < DEVICE_SHARE * usual
    at = speeds.index(least)
    return least, f"GPU cuda:{at}: {least:.4g} GFLOP/s, and the median of the host's is {usual:.4g} GFLOP/s" if bad else ""


def _device(torch: Any, device: Any) -> tuple[float, str]:
    one, other = (torch.randint(-8, 9, (DEVICE_SIDE, DEVICE_SIDE), device=device).float() for _ in range(2))
    vector = torch.randint(-2, 3, (DEVICE_SIDE,), device=device).double()
    expected = one.double() @ (other.double() @ vector)
    wrong = "" if torch.equal((one @ other).double() @ vector, expected) else "a matrix product is wrong"
    for pattern in PATTERNS:
        block = torch.full((DEVICE_BYTES // 8,), pattern, dtype=torch.int64, device=device)
        if not bool((block.clone() == pattern).all()):
            wrong = "a pattern in its memory has changed"

    def work() -> None:
        one @ other
        torch.cuda.synchronize(device)

    work()
    return 2e-9 * DEVICE_SIDE**3 / shortest_s(work), f"GPU {device}: {wrong}" if wrong else ""


def main() -> None:
    """Measure, and write the result. With the argument ``--devices``, GPUs are measured too."""
    busy = 0.0
    try:
        began = ticks()
        (speed, wrong_compute), (copied, wrong_memory) = compute(), memory()
        busy = others_share(began, ticks())
        device, wrong_device = devices() if DEVICES in sys.argv else (0.0, "")
        wrong = "; ".join(filter(None, [wrong_compute, wrong_memory, wrong_device]))
    except Exception as err:  # of a device, or no memory: that is a finding
        speed, copied, device, wrong = 0.0, 0.0, 0.0, f"{type(err).__name__}: {err}"
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps([speed, device, copied, wrong[:500], busy]), flush=True)
    os._exit(0)  # without the end of a device that may hang


if __name__ == "__main__":
    main()
