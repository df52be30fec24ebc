"""Compares the states of Megatron jobs, and runs them in a process group."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_unickpt.testing.truth import Truth, close


def differences(expected: Truth, found: Truth) -> list[str]:
    """Return the differences, bit for bit. A weight of another dtype must be the cast of the master."""
    problems = [f"{key}: only on one side" for key in sorted(expected.keys() ^ found.keys())]
    for key in sorted(expected.keys() & found.keys()):
        a, b = expected[key], found[key]
        if a.dtype != b.dtype and key.startswith("weight/"):
            a = expected[key.replace("weight/", "master/", 1)].to(b.dtype)
        if 1 in (a.dim(), b.dim()) and a.numel() == b.numel():  # before 0.15 torch_dist reads optimizer state back flat
            a, b = a.reshape(-1), b.reshape(-1)
        if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            problems.append(
                f"{key}: {a.dtype} {tuple(a.shape)} sum {a.double().sum():.9g} expected, "
                f"{b.dtype} {tuple(b.shape)} sum {b.double().sum():.9g} found"
            )
    return problems


def in_a_group(work: Callable[[], None], timeout: datetime.timedelta | None = None) -> None:
    """Run work that needs a process group, on all ranks of this job."""
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", timeout=timeout)
    work()
    dist.barrier()
    close()
