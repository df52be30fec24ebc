"""Writers of all kinds against copies behind training, beside a model that knows what each save must hold.

    python -m evidence.torn_copies [--trials 10000] [--seed 1] [--out docs/evidence/late-copies.md]

A trial is one save of a job of 5 MB (``tests/jobs/late_copies.py`` has the writers). The interpreter changes threads each
0.1 ms, and two saves may be in flight. The exit code is 1 if a committed checkpoint differs from the state at the call, or if a
save is given up although nothing has broken the rule that only a step changes the state.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from evidence.document import put, section
from tests.jobs import late_copies

_PIECE = 250  # trials of one job
_MEANING = {
    "_in_place": "an operation of torch on a parameter",
    "_one_in_place": "the same on one element",
    "_state_in_place": "the same on a moment",
    "_frozen_in_place": "the same on a frozen parameter",
    "_weight_in_place": "the same on a bfloat16 weight",
    "_data": "a write to a whole parameter through `.data`",
    "_half_data": "the same to one half of it",
    "_numpy": "a write through NumPy",
    "_swap_in_place": "a swap with averaged weights, by `copy_`",
    "_swap_through_data": "the same through `.data`",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sys.setswitchinterval(1e-4)
    logging.disable(logging.CRITICAL)
    whole, by = late_copies.Found(), Counter[tuple[str, bool]]()
    begin = time.monotonic()
    for number in range(-(-args.trials // _PIECE)):
        with tempfile.TemporaryDirectory() as folder:
            found = late_copies.run(Path(folder), _PIECE, args.seed * 1_000_000 + number)
        whole.wrong += found.wrong
        whole.committed += found.committed
        whole.refused += found.refused
        whole.reused += found.reused
        by += found.by
        print(f"{(number + 1) * _PIECE} trials, {len(whole.wrong)} wrong, {time.monotonic() - begin:.0f} s", flush=True)
    print(*whole.wrong, sep="\n")
    lines = [
        f"{whole.committed + whole.refused:,} saves: {whole.committed:,} committed, {whole.refused:,} given up, "
        f"**{len(whole.wrong)} wrong**. {whole.reused:,} used what an earlier save had described.",
        "",
        "| a writer between two steps | saves given up | saves that had been copied before |",
        "|---|---|---|",
        *(f"| {text} | {by[name, False]} | {by[name, True]} |" for name, text in _MEANING.items()),
    ]
    if args.out is not None:
        command = f"python -m evidence.torn_copies --trials {args.trials} --seed {args.seed}"
        put(args.out, "torn copies", section("torn copies", command, "\n".join(lines) + "\n"))
    else:
        print("\n".join(lines))
    return 1 if whole.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
