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

The last three columns must be 0:

- *wrong resumes*: a resume that gave another bit.
- *deaths*: a training that ended or hung because of a save.
- *lost*: a checkpoint that was committed and not superseded, and could not be resumed.
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
    notes = [f"| {tally.fault} | {note} |" for tally in tallies for note in tally.notes]
    return "\n".join([*rows, "", "| fault | noted |", "|---|---|", *notes, ""] if notes else [*rows, ""])


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--out", type=Path, help="the document whose table is replaced")
    arguments.add_argument(
        "--with",
        dest="earlier",
        action="append",
        type=Path,
        default=[],
        metavar="JSON",
        help="add the counts of another run of the same fault, with another seed, from its --json",
    )
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
