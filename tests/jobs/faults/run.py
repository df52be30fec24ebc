"""Make faults on purpose and count what comes of them: ``python -m tests.jobs.faults.run all --count 5 --json FILE``.

Each fault is made in real processes and files with the package's own ``Saver``; then a job resumes as the
adapters do, and every bit is compared with what that step's save was given. Exit status 1 if a resume was
wrong, a training died or hung because of a save, or a committed checkpoint was lost.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # children are forked

import torch

from tests.jobs.faults import damaging, deepspeed_kills, jobs, killing, launchers, memory, refusing, stalling
from tests.jobs.faults.tally import Tally

Fault = Callable[[Path, int, int], list[Tally]]
FAULTS: dict[str, tuple[Fault, int]] = {  # and how often where --count does not say
    "kill": (killing.at_random, 200),
    "kill-deepspeed": (deepspeed_kills.at_random, 6),
    "kill-agent": (launchers.agents, 20),
    "kill-launcher": (launchers.launchers, 20),
    "kill-launcher-only": (launchers.outlived, 20),
    "kill-calls": (killing.at_every_call, 1000),
    "errors": (refusing.errors, 1000),
    "gone": (refusing.gone, 1000),
    "short-writes": (refusing.short, 100),
    "full": (refusing.full, 100),
    "stall": (stalling.stalls, 60),
    "sigterm": (stalling.terminations, 100),
    "two-jobs": (jobs.two, 50),
    "memory": (memory.at_random, 250),
    "memory-stages": (memory.stages, 150),
    "memory-flight": (memory.flight, 100),
    "memory-keepers": (memory.keepers, 50),
    "memory-names": (memory.names, 150),
    "memory-full": (memory.full, 50),
    "bits": (damaging.bits, 1000),
    "truncation": (damaging.ends, 1000),
    "zeros": (damaging.pages, 500),
}
APART = ("kill-deepspeed", "kill-agent", "kill-launcher", "kill-launcher-only")  # take minutes, so they are not among all


def counted(given: list[str], name: str, usual: int) -> int:
    """The count of one fault: ``--count 5`` for all of them, ``--count kill=5`` for one."""
    for text in given:
        which, _, number = text.rpartition("=")
        if which in ("", name):
            usual = int(number)
    return usual


def run(name: str, count: int, seed: int, earlier: Sequence[Path] = ()) -> list[Tally]:
    """Make one fault so many times. ``earlier``: files of counts of other runs, which are added."""
    folder = Path(tempfile.mkdtemp(prefix=f"unickpt-{name}-"))
    begin = time.monotonic()
    try:
        tallies = FAULTS[name][0](folder, count, seed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for path in earlier:
        for tally, before in zip(tallies, json.loads(path.read_text())[name], strict=True):
            tally.add(before)
    print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    for tally in tallies:
        print(json.dumps({**tally.to_json(), "how": "", "fault": tally.fault}, indent=1), flush=True)
    return tallies


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the arguments that choose faults."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("fault", nargs="+", choices=[*FAULTS, "all"])
    found.add_argument(
        "--count", action="append", default=[], metavar="[FAULT=]N", help="how often (of those that are exhaustive: at most)"
    )
    found.add_argument("--seed", type=int, default=1)
    found.add_argument("--json", type=Path, help="the counts as JSON")
    return found


def each(options: argparse.Namespace, earlier: Sequence[Path] = ()) -> Iterator[tuple[str, int, list[Tally]]]:
    """Make the chosen faults. Yields name, count and tallies of each of them."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    for name in [n for n in FAULTS if n not in APART] if options.fault == ["all"] else options.fault:
        count = counted(options.count, name, FAULTS[name][1])
        yield name, count, run(name, count, options.seed, earlier)


def finish(options: argparse.Namespace, tallies: dict[str, list[Tally]]) -> int:
    """Write the counts, and print what must not happen. Returns the exit status."""
    if options.json is not None:
        options.json.write_text(json.dumps({name: [tally.to_json() for tally in found] for name, found in tallies.items()}))
    bad = [line for found in tallies.values() for tally in found for line in tally.bad]
    for line in bad:
        print(line[:2000], file=sys.stderr)
    return int(bool(bad))


def main() -> int:
    options = parser(__doc__).parse_args()
    return finish(options, {name: tallies for name, _, tallies in each(options)})


if __name__ == "__main__":
    sys.exit(main())
