"""The check of a host that recovery makes before it admits one: compute, memory, and each GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_checks.place import Place
from benchmarks.gpu_checks.rows import Rows
from unickpt.steering.links import self_measure

ROWS = ("the measurement of a sound host",)


def check(place: Place, path: Path, limit_s: float) -> None:
    """Measure this host as the agent does, in a process of its own. Called in the parent of the ranks."""
    rows = Rows(path, "host", "dry" if place.dry else "device")
    with rows.row(ROWS[0], "nothing is wrong" + ("" if place.dry else "; the GPU is measured")) as row:
        command = [sys.executable, "-m", self_measure.__name__, self_measure.DEVICES]
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(limit_s, 1.0))
        row.require(bool(done.stdout), f"no result, exit status {done.returncode}: {done.stderr[-300:]}")
        speed, device, copied, wrong, _ = json.loads(done.stdout)
        row.values |= {"GFLOP/s of a core": float(speed), "GFLOP/s of the GPU": float(device), "memory GB/s": float(copied)}
        row.require(not wrong, wrong)
        row.require(place.dry or device > 0, "no GPU was measured")
