"""Whether a job in which all ranks have become slower is told apart from one whose steps differ in length.

    python -m evidence.diagnosis.slower_jobs [--jobs 10] [--seed 1] [--page docs/evidence/slower-jobs.md]

The steps are simulated (``tests/support/step_lengths.py``), 600 of each job, and are looked at 20 times. A job has
1, 2, 4 or 8 ranks. It is throttled at a random step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.support.step_lengths import SOUND, STEP_S, Chance, Lengths, looks, rows, steady, throttled
from unickpt.diagnosis.detectors.all_slower import OLD, slower_than_before
from unickpt.diagnosis.snapshot.snapshot import KEPT_STEPS

BEGIN, FINISH = "<!-- table: made by python -m evidence.diagnosis.slower_jobs -->\n\n", "\n<!-- end of table -->"
STEPS, EVERY, RANKS = 600, 30, (1, 2, 4, 8)
TIMES = (1.3, 1.5, 2.0, 3.0)


def lognormal(sigma: float) -> Callable[[Chance, int, int], Lengths]:
    """Return what makes batches of such lengths."""
    return lambda chance, ranks, steps: STEP_S * np.exp(chance.normal(0, sigma, (ranks, steps)))


THROTTLED = {
    "equal steps": steady,
    **{f"lognormal lengths, sigma {sigma}": lognormal(sigma) for sigma in (0.1, 0.2, 0.4)},
}


def told(own: Lengths, every: int = EVERY) -> list[int]:
    """Return after how many steps something is said."""
    waits = [(int(end), 0.3) for end in np.unique(rows(own)["end_ns"])]
    return [count for count, made in looks(own, KEPT_STEPS, every) if slower_than_before(made, {}, waits)]


def sound_table(jobs: int, seed: int) -> list[str]:
    """Return the rows of sound jobs."""
    found, wrong = ["| steps of a sound job | windows | false |", "|---|---|---|"], 0
    for number, (name, make) in enumerate(SOUND.items()):
        false = 0
        for job in range(jobs):
            chance = np.random.default_rng([seed, number, job])
            false += len(told(make(chance, int(chance.choice(RANKS)), STEPS)))
        found.append(f"| {name} | {jobs * (STEPS // EVERY):,} | {false} |")
        wrong += false
    return [*found, f"| all | {len(SOUND) * jobs * (STEPS // EVERY):,} | {wrong} |"]


def throttled_table(jobs: int, seed: int) -> list[str]:
    """Return the rows of throttled jobs: how many are found, and after how many steps."""
    found = [f"| steps of a throttled job | {' | '.join(f'{times} times' for times in TIMES)} |", f"|---{'|---' * len(TIMES)}|"]
    for number, (name, make) in enumerate(THROTTLED.items()):
        cells = []
        for times in TIMES:
            after = []
            for job in range(jobs):
                chance = np.random.default_rng([seed, number, int(10 * times), job])
                at = int(chance.integers(OLD + 12, 400))
                own = throttled(chance, make(chance, int(chance.choice(RANKS)), STEPS), at, times)
                after += [count - at for count in told(own, 4)[:1] if count >= at]
            cells.append(f"{len(after)} of {jobs}" + (f", after {int(np.median(after))} steps" if after else ""))
        found.append(f"| {name} | {' | '.join(cells)} |")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    made = "\n".join([*sound_table(args.jobs, args.seed), "", *throttled_table(args.jobs, args.seed)])
    print(made)
    if args.page is not None:
        head, rest = args.page.read_text().split(BEGIN, 1)
        args.page.write_text(head + BEGIN + made + "\n" + FINISH + rest.split(FINISH, 1)[1])


if __name__ == "__main__":
    main()
