"""What torch says of its devices and of unickpt. Runs in a process of its own: ``import torch`` can take long, or hang."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any


def main(_arguments: Sequence[str]) -> None:
    """Print the facts as one JSON object."""
    with contextlib.redirect_stdout(sys.stderr):
        found = facts()
    print(json.dumps(found))


def facts() -> dict[str, Any]:
    """Return what torch says after its import.

    Returns:
        ``torch`` (its version), ``armed`` (whether its import has called unickpt), ``devices`` (names of GPUs), ``cuda``,
        ``hip``, ``nccl`` (versions or null), ``backends`` (of ``torch.distributed``).
    """
    import torch
    import torch.distributed as dist

    autoload = sys.modules.get("_unickpt_autoload")
    distributed = dist.is_available()
    known = (
        {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available} if distributed else {}
    )
    backends = [name for name, available in known.items() if available()]
    version: Any = torch.cuda.nccl.version  # without types
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "torch": torch.__version__,
        "armed": bool(autoload is not None and autoload.asked()),
        "devices": [torch.cuda.get_device_name(at) for at in range(count)],
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": ".".join(map(str, version())) if "nccl" in backends else None,
        "backends": backends,
    }
