"""Faults made on purpose, counted: ``python scripts/faults.py all --count 200 --out docs/reliability.md``.

Each fault is made in real processes and files with the package's own ``Saver``; then a job resumes as the
adapters do, and every bit is compared with what that step's save was given. Exit status 1 if a resume was
wrong, a training died or hung because of a save, or a committed checkpoint was lost.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # children are forked
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from tests.faults import damaging, deepspeed_kills, jobs, killing, refusing, stalling
from tests.faults.tally import Tally

Fault = Callable[[Path, int, int], list[Tally]]
FAULTS: dict[str, tuple[Fault, int]] = {  # and how often where --count does not say
    "kill": (killing.at_random, 200),
    "kill-deepspeed": (deepspeed_kills.at_random, 6),
    "kill-calls": (killing.at_every_call, 1000),
    "errors": (refusing.errors, 1000),
    "gone": (refusing.gone, 1000),
    "short-writes": (refusing.short, 100),
    "full": (refusing.full, 100),
    "stall": (stalling.stalls, 60),
    "sigterm": (stalling.terminations, 100),
    "two-jobs": (jobs.two, 50),
    "bits": (damaging.bits, 1000),
    "truncation": (damaging.ends, 1000),
    "zeros": (damaging.pages, 500),
}
APART = ("kill-deepspeed",)  # takes minutes and needs DeepSpeed, so it is not among all
HEAD = """# Reliability, counted

Every row is made by the command above its table, on real processes and files, with the `Saver` of both adapters. The
state is a function of (job, step, tensor, element), so whatever is resumed can be compared bit for bit with what that
step's save was given. A *wrong resume* is any other bit; a *death* is a training that ended or hung because of a save; a
*lost* checkpoint is one that was committed (and not superseded) and could not be resumed afterwards. All three must be 0.
"""


def machine() -> str:
    return f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()}, {os.cpu_count()} cores."


def section(name: str, command: str, body: str) -> str:
    """A part of the document that a command replaces as a whole."""
    return f"<!-- {name} -->\n\n`{command}`\n\n{machine()}\n\n{body}\n<!-- end of {name} -->\n"


def put(out: Path, name: str, text: str) -> None:
    """Replace a section of the document, or add it."""
    document = out.read_text() if out.exists() else HEAD
    pattern = re.compile(rf"<!-- {re.escape(name)} -->\n.*?<!-- end of {re.escape(name)} -->\n", re.S)
    document = pattern.sub(lambda _: text, document) if pattern.search(document) else f"{document}\n{text}"
    out.write_text(document)


def table(tallies: list[Tally]) -> str:
    rows = [
        "| fault | how it is made | times | what came of it | wrong resumes | deaths | lost |",
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
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
        for tally in tallies[name]:
            print(json.dumps({**tally.to_json(), "how": "", "fault": tally.fault}, indent=1), flush=True)
        if options.out is not None:
            command = f"TMPDIR={os.environ['TMPDIR']} " if "TMPDIR" in os.environ else ""
            command += f"python scripts/faults.py {name} --count {count} --seed {options.seed} --out {options.out}"
            put(options.out, name, section(name, command, table(tallies[name])))
    if options.json is not None:
        options.json.write_text(json.dumps({name: [tally.to_json() for tally in found] for name, found in tallies.items()}))
    bad = [line for found in tallies.values() for tally in found for line in tally.bad]
    for line in bad:
        print(line[:2000], file=sys.stderr)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
