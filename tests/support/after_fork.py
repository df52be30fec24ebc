"""What a process does first that a process with PyTorch has forked."""

from __future__ import annotations

import torch


def renew_threads(count: int | None = None) -> None:
    """Let this thread be the first to use PyTorch's pool of threads, with ``count`` threads, or as many as it has.

    After a fork PyTorch replaces the pool at the first use. Threads that come first together race for it, and one of them gets
    "Invalid thread pool!" (``ATen/ParallelOpenMP.cpp``).
    """
    torch.set_num_threads(count or torch.get_num_threads())
