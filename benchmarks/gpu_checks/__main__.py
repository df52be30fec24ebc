"""Run the checks, print the table, and leave JSON. Exit status 0 if no check has failed."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # so that asking for devices does not use CUDA before the forks

import torch

from benchmarks.gpu_checks import faults, host, huggingface, megatron, staging, timing, witness, zero
from benchmarks.gpu_checks.place import Place
from benchmarks.gpu_checks.ranks import LOG, Ranks
from benchmarks.gpu_checks.rows import FAILED, SKIPPED, Row, read, table

GROUPS = ("staging", "timing", "witness", "faults", "host", "deepspeed", "huggingface", "megatron")
# 9 minutes together
LIMITS_S = {
    "staging": 80.0,
    "timing": 60.0,
    "witness": 20.0,
    "faults": 130.0,
    "host": 20.0,
    "deepspeed": 120.0,
    "huggingface": 60.0,
    "megatron": 50.0,
}
MOST_RANKS = 4
MARK = "<!-- made by python -m benchmarks.gpu_checks --page -->"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Everything that only a GPU can show.")
    parser.add_argument("--dry", action="store_true", help="on the CPU: gloo and host memory")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS, metavar="GROUP", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of all checks")
    parser.add_argument("--out", type=Path, default=Path("gpu_checks.json"), help="output file")
    parser.add_argument("--log", type=Path, help="file that gets everything that the ranks write")
    parser.add_argument("--page", type=Path, help="Markdown page whose text below the mark is replaced by the table")
    parser.add_argument("--made", type=Path, metavar="FILE.json", help="make the page from this file, and check nothing")
    return parser.parse_args()


class Run:
    """All checks of one command.

    Args:
        place: device and backend.
        arguments: of the command line.
        folder: for files.
    """

    def __init__(self, place: Place, arguments: argparse.Namespace, folder: Path) -> None:
        self.place, self._arguments, self._folder = place, arguments, folder
        self._end = time.monotonic() + arguments.minutes * 60
        self.rows: list[Row] = []

    def all(self) -> None:
        """Run the groups that were asked for. Megatron is last: its CPU harness redirects torch's CUDA functions."""
        for group in [each for each in GROUPS if each in self._arguments.only]:
            begun = time.monotonic()
            getattr(self, f"_{group}")()
            print(f"{group}: {time.monotonic() - begun:.0f} s", file=sys.stderr)

    def _left_s(self, group: str) -> float:
        left: float = self._end - time.monotonic()
        return min(LIMITS_S[group], max(left, 0.0))

    def _take(self, group: str, path: Path, names: Sequence[str], reason: str) -> None:
        """Take in the rows of a file. Checks without a row have failed: their process ended before."""
        found = read(path)
        self.rows += found
        known = {row.name for row in found}
        on = found[0].on if found else ("dry" if self.place.dry else "device")
        self.rows += [Row(group, name, on, reason=reason or "no result") for name in names if name not in known]
        if reason and found and known >= set(names):
            self.rows.append(Row(group, "end of the ranks", on, reason=reason))

    def _ranks(self, group: str, world: int, names: Sequence[str], action: Callable[..., None], *arguments: Any) -> None:
        path = self._folder / f"{group}-{len(self.rows)}.rows"
        left = self._left_s(group)
        reason = "no time left" if left <= 0 else Ranks(self.place, world, action, (self.place, path, *arguments)).wait(left)
        self._take(group, path, names, reason)

    def _staging(self) -> None:
        self._ranks("staging", 1, staging.ROWS, staging.check)

    def _timing(self) -> None:
        self._ranks("timing", min(self.place.ranks, 2), timing.ROWS, timing.check)

    def _witness(self) -> None:
        self._ranks("witness", 1, witness.ROWS, witness.check)

    def _faults(self) -> None:
        path = self._folder / "faults.rows"
        place = self.place
        if not place.dry and place.ranks < 3:  # NCCL's ranks do not communicate here
            place = replace(place, dry=True, backend="gloo", ranks=MOST_RANKS)
        faults.check(place, path, self._left_s("faults"))
        self._take("faults", path, faults.ROWS, "")

    def _deepspeed(self) -> None:
        kinds = tuple(zero.KINDS)
        world = min(self.place.ranks, 2)
        saves = list(map(zero.save_row, kinds))
        loads = [
            (ranks, some, [zero.load_row(kind, ranks) for kind in some]) for ranks, some in {1: kinds, world: kinds[:3]}.items()
        ]
        if self._missing("deepspeed", "deepspeed", [*saves, *(name for *_, names in loads for name in names), zero.LATE_ROW]):
            return
        if self.place.dry:
            zero.preload()
        folder = self._folder / "zero"
        folder.mkdir()
        self._ranks("deepspeed", world, saves, zero.check_saves, folder, kinds)
        for ranks, some, names in loads:
            self._ranks("deepspeed", ranks, names, zero.check_loads, folder, some)
        path = self._folder / "late.rows"
        zero.check_late(self.place, path, min(self._left_s("deepspeed"), 30.0))
        self._take("deepspeed", path, [zero.LATE_ROW], "")

    def _host(self) -> None:
        path = self._folder / "host.rows"
        host.check(self.place, path, self._left_s("host"))
        self._take("host", path, host.ROWS, "")

    def _huggingface(self) -> None:
        if any(
            self._missing("huggingface", package, huggingface.ROWS) for package in ("deepspeed", "transformers", "accelerate")
        ):
            return
        path = self._folder / "huggingface.rows"
        huggingface.check(self.place, path, self._left_s("huggingface"))
        self._take("huggingface", path, huggingface.ROWS, "")

    def _megatron(self) -> None:
        world = min(self.place.ranks, 2)
        saves, loads = [megatron.save_row(world)], [megatron.load_row(1)]
        if self._missing("megatron", "megatron", [*saves, *loads]):
            return
        if self.place.dry:
            megatron.preload()
        folder = self._folder / "megatron"
        folder.mkdir()
        self._ranks("megatron", world, saves, megatron.check_save, folder)
        self._ranks("megatron", 1, loads, megatron.check_load, folder)

    def _missing(self, group: str, package: str, names: Sequence[str]) -> bool:
        if find_spec(package) is not None:
            return False
        on = "dry" if self.place.dry else "device"
        self.rows += [Row(group, name, on, status=SKIPPED, reason=f"{package} is not installed") for name in names]
        return True


def place_of(arguments: argparse.Namespace) -> tuple[Place, list[Row]]:
    """Return where the checks run, and what was tried to find out."""
    if arguments.dry:
        return Place(True, "gloo", MOST_RANKS, False), []
    devices = torch.cuda.device_count()
    if not devices:
        sys.exit("gpu_checks: torch sees no CUDA device; --dry runs the same checks on the CPU")
    place = Place(False, "nccl", MOST_RANKS, devices < MOST_RANKS)
    row = Row("place", f"{MOST_RANKS} ranks with NCCL on {devices} GPU", "device", "they communicate")
    problem = Ranks(place, MOST_RANKS, timing.probe, ()).wait(60)
    if not problem:
        row.status = "passed"
        return place, [row]
    row.reason = f"one rank is used instead, and gloo for faults: {problem}"
    return replace(place, ranks=1, shared=False), [row]


def about(*, dry: bool) -> dict[str, Any]:
    """Versions and devices. The latter are asked for in a process of its own, which may use CUDA."""
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "cpus": os.cpu_count()}
    for package in ("deepspeed", "megatron-core", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if not dry:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            found |= pool.apply(_about_devices)
    return found


def _about_devices() -> dict[str, Any]:
    cuda: Any = torch.cuda
    driver = Path("/proc/driver/nvidia/version")
    known = re.search(r"\d+\.\d+\.\d+", driver.read_text()) if driver.is_file() else None
    return {
        "devices": [cuda.get_device_name(at) for at in range(cuda.device_count())],
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, cuda.nccl.version())),
        "driver": known[0] if known else None,
    }


def publish(page: Path, document: dict[str, Any], rows: Sequence[Row]) -> None:
    """Replace the text below the mark of a page."""
    head, mark, _ = page.read_text().partition(MARK)
    names = ("devices", "driver", "cuda", "nccl", "torch", "deepspeed", "megatron-core", "python", "cpus")
    known = {**document, "devices": ", ".join(document.get("devices", ())) or None}
    facts = ", ".join(f"{name} {known[name]}" for name in names if known.get(name) is not None)
    page.write_text(f"{head}{mark}\n\n{facts}; {document['seconds']:.0f} s.\n\n{table(rows)}\n")


def main() -> None:
    arguments = parse()
    if arguments.made is not None:
        document = json.loads(arguments.made.read_text())
        publish(arguments.page, document, [Row(**each) for each in document["rows"]])
        return
    begun = time.monotonic()
    if arguments.log is not None:
        os.environ[LOG] = str(arguments.log.resolve())
    place, rows = place_of(arguments)
    facts = about(dry=place.dry)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(place, arguments, Path(folder))
        run.rows += rows
        run.all()
    document = {"dry": place.dry, "seconds": time.monotonic() - begun, **facts, "rows": [asdict(row) for row in run.rows]}
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    print(table(run.rows))
    if arguments.page is not None:
        publish(arguments.page, document, run.rows)
    counts = {status: sum(row.status == status for row in run.rows) for status in ("passed", "measured", SKIPPED, FAILED)}
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    print(f"\n{summary}, {document['seconds']:.0f} s; {arguments.out}")
    sys.exit(1 if counts[FAILED] else 0)


if __name__ == "__main__":
    main()
