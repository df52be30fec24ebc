"""Run all benchmarks; write ``docs/evidence/benchmarks.md`` and ``memory.md``, their pictures, and a line of the history.

    python -m benchmarks.run [--rounds N] [--only deepspeed-50M-2 ...] [--list]
    python -m benchmarks.run --page-only             # redraw the page from results/performance.json
    python -m benchmarks.run --details [NAME ...]    # all measurements, as text
    python -m benchmarks.run --history               # the last two runs side by side

The parts of the pages between the marks are replaced; the rest is written by hand.
Benchmarks that do not run keep their earlier results. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks import history, page
from benchmarks.questions import MEMORY_QUESTIONS, QUESTIONS

REPO = Path(__file__).resolve().parent.parent
DATA = REPO / "results" / "performance.json"
DIRECT_IO = "direct-io"

PARTS: dict[str, list[str]] = {
    DIRECT_IO: ["direct_io"],
    "deepspeed-50M-1": ["deepspeed_save_load", "--ranks=1", "--millions=50", "--peers", "dcp", "fastpersist"],
    "deepspeed-50M-2": ["deepspeed_save_load", "--ranks=2", "--millions=50", "--peers", "dcp", "universal", "fastpersist"],
    "deepspeed-50M-4": ["deepspeed_save_load", "--ranks=4", "--millions=50", "--peers", "dcp"],
    "deepspeed-50M-2-zero3": [
        "deepspeed_save_load", "--ranks=2", "--millions=50", "--stage=3", "--peers", "dcp", "fastpersist"
    ],
    "deepspeed-3d-50M-4": [
        "deepspeed_save_load", "--ranks=4", "--millions=50", "--tensor=2", "--pipeline=2", "--peers", "universal"
    ],
    "megatron-50M": ["megatron_save_load", "--millions=50", "--layouts", "tp2", "tp2dp2"],
    "deepspeed-350M-1": ["deepspeed_save_load", "--ranks=1", "--millions=350", "--no-steps", "--peers", "fastpersist"],
    "deepspeed-350M-2": ["deepspeed_save_load", "--ranks=2", "--millions=350", "--peers", "fastpersist"],
    "deepspeed-350M-4-zero3": [
        "deepspeed_save_load", "--ranks=4", "--millions=350", "--stage=3", "--no-steps", "--peers"
    ],
    "deepspeed-3d-350M-4": [
        "deepspeed_save_load", "--ranks=4", "--millions=350", "--tensor=2", "--pipeline=2", "--no-steps", "--peers", "universal"
    ],
    "memory-50M-2": ["memory_tier", "--ranks=2", "--millions=50", "--stage=1"],
    "memory-50M-4": ["memory_tier", "--ranks=4", "--millions=50", "--stage=1"],
    "memory-50M-2-zero3": ["memory_tier", "--ranks=2", "--millions=50", "--stage=3"],
    "memory-megatron-50M-2": ["memory_tier", "--framework=megatron", "--ranks=2", "--millions=50"],
    "memory-megatron-50M-4": ["memory_tier", "--framework=megatron", "--ranks=4", "--millions=50"],
    "memory-350M-4-zero3": ["memory_tier", "--ranks=4", "--millions=350", "--stage=3", "--saves-only"],
    "memory-megatron-350M-2": ["memory_tier", "--framework=megatron", "--ranks=2", "--millions=350", "--saves-only"],
}  # fmt: skip
ROUNDS = {"50M": 5, "350M": 3}
MEMORY = "memory-"  # benchmarks of the page of the memory tier
VERSIONS = ("torch", "deepspeed", "megatron-core", "unickpt")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, help="of every benchmark (default: 5 for 50M parameters, 3 for 350M)")
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--list", action="store_true", help="print the names of the benchmarks and their commands")
    parser.add_argument("--page-only", action="store_true", help="redraw the page from the results of earlier runs")
    parser.add_argument("--details", nargs="*", choices=PARTS, metavar="NAME", help="print all measurements")
    parser.add_argument("--history", action="store_true", help="print the last two runs side by side")
    args = parser.parse_args()
    data: dict[str, Any] = json.loads(DATA.read_text()) if DATA.is_file() else {}
    if args.list:
        for name in PARTS:
            took = f"{data[name]['took_s']:.0f} s" if "took_s" in data.get(name, {}) else "-"
            print(f"{name} ({took}): python -m benchmarks.{' '.join(command(name, args.rounds))}")
    elif args.details is not None:
        print(page.details(results(data, args.details or list(PARTS))))
    elif args.history:
        print(history.compare(history.read()))
    elif args.page_only:
        redraw(data)
    else:
        failed = measure_all(data, args.only, args.rounds)
        history.append(history.record(results(data, [name for name in args.only if name not in failed]), about()))
        redraw(data)
        print(history.compare(history.read()))
        if failed:
            sys.exit(f"failed: {' '.join(failed)}")


def command(name: str, rounds: int | None) -> list[str]:
    """Return the module of a benchmark and its options."""
    known = next((count for size, count in ROUNDS.items() if f"-{size}" in name), 5)
    return [*PARTS[name], f"--rounds={rounds or known}"]


def measure_all(data: dict[str, Any], names: list[str], rounds: int | None) -> list[str]:
    """Run benchmarks, and add each to ``data`` and to the file of results. Return the names of those that failed."""
    failed = []
    began = time.perf_counter()
    for name in names:
        begin = time.perf_counter()
        try:
            found = measured(command(name, rounds))
        except subprocess.CalledProcessError as error:
            print(f"{name}: {error}", flush=True)
            failed.append(name)
            continue
        took = time.perf_counter() - begin
        data[name] = {**about(), "took_s": round(took, 1), **found}
        DATA.write_text(json.dumps({key: data[key] for key in PARTS if key in data}, indent=1) + "\n")
        print(f"{name}: {took:.0f} s, in all {(time.perf_counter() - began) / 60:.1f} min", flush=True)
    return failed


def measured(options: list[str]) -> dict[str, Any]:
    """Run a benchmark. Return its text and, if it has any, its results."""
    with tempfile.TemporaryDirectory() as folder:
        out, found = Path(folder) / "out.md", Path(folder) / "found.json"
        script, *more = options
        more += ["--json", str(found)] if script != "direct_io" else []
        subprocess.run([sys.executable, "-m", f"benchmarks.{script}", *more, "--out", str(out)], check=True, cwd=REPO)
        return {"results": json.loads(found.read_text())} if found.is_file() else {"text": out.read_text()}


def results(data: dict[str, Any], names: list[str]) -> list[Any]:
    """Return the results of benchmarks in the order of the page: one per layout, with the cores of its machine."""
    found = [data[name] for name in PARTS if name in names and name in data]
    return [{**each, "cores": int(part["machine"].split()[0])} for part in found for each in part.get("results", [])]


def body(data: dict[str, Any]) -> str:
    """Return the generated part of the page of benchmarks."""
    found = _of_page(data, memory=False)
    return page.body(found, data.get(DIRECT_IO, {}).get("text", ""), _unavailable(found))


def memory_body(data: dict[str, Any]) -> str:
    """Return the generated part of the page of the memory tier."""
    found = _of_page(data, memory=True)
    return page.memory_body(found, _unavailable(found))


def redraw(data: dict[str, Any]) -> None:
    """Write both pages and their pictures."""
    page.write(page.PAGE, body(data), QUESTIONS, _of_page(data, memory=False))
    page.write(page.MEMORY_PAGE, memory_body(data), MEMORY_QUESTIONS, _of_page(data, memory=True))


def _of_page(data: dict[str, Any], *, memory: bool) -> list[Any]:
    return results(data, [name for name in PARTS if name.startswith(MEMORY) == memory])


def _unavailable(found: list[Any]) -> list[str]:
    layouts: dict[str, list[str]] = {}
    for each in found:
        for line in each.get("unavailable", {}).values():
            layouts.setdefault(line, []).append(each["title"])
    return [f"{line} So it was with {'; '.join(titles)}." for line, titles in layouts.items()]


def about() -> dict[str, Any]:
    """Return the date, the machine and the versions of a run."""
    versions = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "-"
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes")
    return {"date": date, "machine": f"{os.cpu_count()} cores, {memory_gb:.0f} GB", "versions": versions}


if __name__ == "__main__":
    main()
