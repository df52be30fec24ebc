"""What the phases of a save and a load cost as functions of the number of ranks, and how fast that grows.

    python -m evidence.sixty_four.growth [--ranks 8 16 32 64] [--out docs/evidence/sixty-four.md]

The state is the same for each number of ranks: FSDP2 with AdamW, 48 tensors, 6 MB. Numbers of rank 0, of the rank after it, and
of all ranks together are medians of three. An exponent of 1 is proportional to the number of ranks. All ranks share two cores,
so seconds grow at least as the number of ranks; the counts are exact. Parts of processor seconds overlap, and leave out other
threads.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from evidence.document import put, section
from tests.support.forked_jobs import fork_ranks

HEAD = "# Sixty-four ranks\n"
SECTION = "growth"
WORKER = "evidence.sixty_four.growth_worker"
Values = Mapping[int, float]  # by number of ranks


def measured(ranks: int) -> dict[tuple[str, str, str], float]:
    """Return values of a job, by phase, what was counted, and whose it is."""
    with tempfile.TemporaryDirectory() as folder:
        fork_ranks(ranks, WORKER, folder, timeout_s=1500)
        every = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    found: dict[tuple[str, str, str], float] = {}
    for phase, rounds in every[0]["phases"].items():
        for what in rounds[0]:
            of_rank = [statistics.median(each[what] for each in one["phases"][phase]) for one in every]
            if not what.startswith("processor seconds, "):
                found[phase, what, "rank 0"], found[phase, what, "rank 1"] = of_rank[0], of_rank[1]
            if what in ("requests to the store", "bytes at the store") or what.startswith("processor seconds"):
                found[phase, what, "all ranks"] = sum(of_rank)
    for what in every[0]["held"]:
        found["held after all", what, "rank 0"] = every[0]["held"][what]
        found["held after all", what, "rank 1"] = every[1]["held"][what]
    return found


def exponent(values: Values) -> float | None:
    """Return the slope of the logarithms; None if a value is not positive."""
    if min(values.values()) <= 0:
        return None
    xs, ys = zip(*((math.log(ranks), math.log(value)) for ranks, value in values.items()), strict=True)
    return statistics.linear_regression(xs, ys).slope


def table(by_ranks: Mapping[int, Mapping[tuple[str, str, str], float]]) -> str:
    """Return the Markdown table."""
    numbers: Sequence[int] = sorted(by_ranks)
    lines = [f"| phase | counted | whose | {' | '.join(map(str, numbers))} | exponent |", "|---" * (4 + len(numbers)) + "|"]
    for key in by_ranks[numbers[0]]:
        values = {ranks: by_ranks[ranks][key] for ranks in numbers}
        if not any(values.values()):
            continue
        slope = exponent(values)
        cells = [f"{value:,.3f}" if "seconds" in key[1] else f"{value:,.0f}" for value in values.values()]
        lines.append(f"| {' | '.join([*key, *cells])} | {'-' if slope is None else f'{slope:.2f}'} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    body = table({ranks: measured(ranks) for ranks in args.ranks})
    print(body)
    command = f"python -m evidence.sixty_four.growth --ranks {' '.join(map(str, args.ranks))}"
    if args.out:
        put(args.out, SECTION, section(SECTION, command, body), HEAD)


if __name__ == "__main__":
    main()
