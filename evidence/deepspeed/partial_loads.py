"""All loads of ``partial_loads``, on two ranks, as a table.

    python -m evidence.deepspeed.partial_loads [--page docs/evidence/partial-loads.md] [WRAPPER ...]

Without ``--page`` it prints the table. The section of the page is between the marks ``<!-- deepspeed -->``.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import traceback
from pathlib import Path

from tests.support.forked_jobs import fork_ranks

BEGIN, END = "<!-- deepspeed -->", "<!-- end of deepspeed -->"
Cells = dict[str, dict[str, list[str]]]  # wrapper -> column -> problems


def measure(folder: Path, wrappers: list[str]) -> None:
    """On each rank: make all loads. Writes FOLDER/cells-RANK.json."""
    from tests.jobs.deepspeed import partial_loads

    found: Cells = {}
    for wrapper in wrappers or partial_loads.WRAPPERS:
        for column in (*partial_loads.SOURCES, *partial_loads.KINDS):
            work = partial_loads.rolled_back if column in partial_loads.SOURCES else partial_loads.partly_loaded
            place = folder / f"{wrapper}-{column}".replace(" ", "-")
            try:
                problems = work(place, wrapper, column)
            except Exception:  # its text is the result of the cell; a rank that fails alone ends the job after a minute
                problems = [traceback.format_exc()]
            found.setdefault(wrapper, {})[column] = problems
            print(f"cell {wrapper}, {column}: {problems or 'equal'}", flush=True)
            (folder / f"cells-{os.environ['RANK']}.json").write_text(json.dumps(found))


def table(ranks: list[Cells]) -> list[str]:
    """Return the lines of the table. A cell is ``equal`` if no rank has found a problem."""
    columns = list(dict.fromkeys(column for found in ranks for row in found.values() for column in row))
    lines = [f"| optimizer | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    good = 0
    for wrapper, row in ranks[0].items():
        clean = {column: not any(found[wrapper][column] for found in ranks) for column in row}
        good += sum(clean.values())
        lines.append(f"| {wrapper} | {' | '.join('equal' if clean[column] else '**differs**' for column in columns)} |")
    total = sum(len(row) for row in ranks[0].values())
    return [f"{good} of {total} cells are equal.", "", *lines]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--page", type=Path)
    parser.add_argument("--folder", type=Path, help="of the ranks of the job")
    parser.add_argument("wrappers", nargs="*")
    given = parser.parse_args()
    if given.folder is not None:
        from tests.jobs.deepspeed.jobs import in_a_group
        from unickpt.testing.launch import leave

        in_a_group(lambda: measure(given.folder, given.wrappers))
        leave()
    with tempfile.TemporaryDirectory() as place:
        fork_ranks(
            2, "evidence.deepspeed.partial_loads", "--folder", place, *given.wrappers, timeout_s=7200
        )  # fmt: skip
        lines = table([json.loads((Path(place) / f"cells-{rank}.json").read_text()) for rank in range(2)])
    if given.page is None:
        print("\n".join(lines))
        return
    before, _, rest = given.page.read_text().partition(BEGIN)
    given.page.write_text("\n".join([before + BEGIN, *lines, END + rest.partition(END)[2]]))


if __name__ == "__main__":
    main()
