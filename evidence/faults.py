"""Faults made on purpose, counted in a page: ``python -m evidence.faults all --count 200 --out docs/evidence/faults.md``.

``tests/jobs/faults`` makes them. Exit status 1 if a resume was wrong, a training died or hung because of a save, or a committed
checkpoint was lost.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from evidence.document import put, section
from tests.jobs.faults.run import each, finish, parser
from tests.jobs.faults.tally import Tally

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

`python -m evidence.faults all` runs all faults except `kill-deepspeed` and those of launchers, which take minutes. The
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


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--out", type=Path, help="the document whose table is replaced")
    arguments.add_argument(
        "--with", dest="earlier", action="append", type=Path, default=[], metavar="JSON",
        help="add the counts of another run of the same fault, with another seed, from its --json",
    )  # fmt: skip
    options = arguments.parse_args()
    tallies: dict[str, list[Tally]] = {}
    for name, count, found in each(options, options.earlier):
        tallies[name] = found
        if options.out is not None:
            command = f"TMPDIR={os.environ['TMPDIR']} " if "TMPDIR" in os.environ else ""
            command += f"python -m evidence.faults {name} --count {count} --seed {options.seed}"
            command += "".join(f" --with {path.name}" for path in options.earlier) + f" --out {options.out}"
            put(options.out, name, section(name, command, table(found)), HEAD)
    return finish(options, tallies)


if __name__ == "__main__":
    sys.exit(main())
