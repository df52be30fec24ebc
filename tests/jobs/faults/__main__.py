"""Faults made on purpose, counted: ``python -m tests.jobs.faults all --count 200 --out docs/evidence/faults.md``.

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
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # children are forked

import torch

from evidence.document import put, section
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
HEAD = """# Faults

Each row injects one kind of fault many times, into real processes and files, with the `Saver` that both adapters use. After
each fault a job resumes as the adapters do. The saved state is a function of (job, step, tensor, element), so every resumed
bit is compared with the state of its step.

The last three columns must be 0:

- *wrong resumes*: a resume that gave another bit.
- *deaths*: a training that ended or hung because of a save.
- *lost*: a checkpoint that was committed and not superseded, and could not be resumed.

The tables of `evidence.fuzz` give random hostile input to the readers. *Broken* counts every result other than an
accepted file or an error of unickpt within the limits of time and memory. It must be 0 as well.

`python -m tests.jobs.faults all` runs all faults except `kill-deepspeed` and those of launchers, which take minutes. The
command above a table runs its rows alone.
"""


def table(tallies: list[Tally]) -> str:
    rows = [
        "| fault | method | cases | outcome | wrong resumes | deaths | lost |",
        "|---|---|---|---|---|---|---|",
    ]
    for tally in tallies:
        outcomes = "<br>".join(f"{count:,}: {kind}" for kind, count in tally.outcomes.most_common())
        numbers = " | ".join(str(len(found)) for found in (tally.wrong, tally.deaths, tally.lost))
        rows.append(f"| {tally.fault} | {tally.how} | {tally.count:,} | {outcomes} | {numbers} |")
    notes = [f"- {tally.fault}: {note}" for tally in tallies for note in tally.notes]
    return "\n".join([*rows, "", *notes, ""] if notes else [*rows, ""])


def counted(given: list[str], name: str, usual: int) -> int:
    """The count of one fault: ``--count 5`` for all of them, ``--count kill=5`` for one."""
    for text in given:
        which, _, number = text.rpartition("=")
        if which in ("", name):
            usual = int(number)
    return usual


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fault", choices=[*FAULTS, "all"])
    parser.add_argument(
        "--count", action="append", default=[], metavar="[FAULT=]N", help="how often (of those that are exhaustive: at most)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="the document whose table is replaced")
    parser.add_argument("--json", type=Path, help="the counts as JSON")
    parser.add_argument(
        "--with", dest="earlier", action="append", type=Path, default=[], metavar="JSON",
        help="add the counts of another run of the same fault, with another seed, from its --json",
    )  # fmt: skip
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    tallies: dict[str, list[Tally]] = {}
    for name in [n for n in FAULTS if n not in APART] if options.fault == "all" else [options.fault]:
        fault, usual = FAULTS[name]
        count = counted(options.count, name, usual)
        folder = Path(tempfile.mkdtemp(prefix=f"unickpt-{name}-"))
        begin = time.monotonic()
        try:
            tallies[name] = fault(folder, count, options.seed)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        for path in options.earlier:
            for tally, before in zip(tallies[name], json.loads(path.read_text())[name], strict=True):
                tally.add(before)
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
        for tally in tallies[name]:
            print(json.dumps({**tally.to_json(), "how": "", "fault": tally.fault}, indent=1), flush=True)
        if options.out is not None:
            command = f"TMPDIR={os.environ['TMPDIR']} " if "TMPDIR" in os.environ else ""
            command += f"python -m tests.jobs.faults {name} --count {count} --seed {options.seed}"
            command += "".join(f" --with {path.name}" for path in options.earlier) + f" --out {options.out}"
            put(options.out, name, section(name, command, table(tallies[name])), HEAD)
    if options.json is not None:
        options.json.write_text(json.dumps({name: [tally.to_json() for tally in found] for name, found in tallies.items()}))
    bad = [line for found in tallies.values() for tally in found for line in tally.bad]
    for line in bad:
        print(line[:2000], file=sys.stderr)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
