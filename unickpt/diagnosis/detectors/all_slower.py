"""Find a job in which all ranks take longer than earlier, with the same calls: throttled devices, a limit, slow storage.

Steps also differ in length because their batches do. A job that has become slower differs from one with uneven batches:

- It was even before. The steps until the change, in short windows, differ by much less than the change. Batches that are
  sorted, come in buckets or grow with a curriculum have changed before, and by more.
- Its steps are as even as before, but longer. Batches of many lengths make long steps and short ones.

A job that does more work from one step on, and makes the same calls for it, cannot be told apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from unickpt.base.arrays import Floats
from unickpt.diagnosis.detectors.hints import AllSlower
from unickpt.diagnosis.detectors.losses import LONGER, LOST
from unickpt.diagnosis.detectors.medians import row_medians
from unickpt.diagnosis.detectors.observations import SlowerThanBefore
from unickpt.diagnosis.detectors.step_tables import COLUMNS, step_tables
from unickpt.diagnosis.detectors.verdicts import Cause, Syndrome, Verdict
from unickpt.diagnosis.snapshot.snapshot import kept_steps
from unickpt.diagnosis.snapshot.steps import StepRows

NEW, OLD = 32, 128  # fewest steps since a job has become slower, and before
FEWEST_OLD = 32  # in a job of so many ranks that few steps are kept
SLOWER = 1.25  # smallest multiple of the own time before
WINDOW = 12  # steps of a short window
EVEN = 0.2  # largest difference of short windows before, as a share of the change, both as logarithms
CHANCE = 1.4  # by how much short windows differ by chance, as a multiple of the difference from step to step
SPREAD = 0.1  # by how much more the steps of a sound throttle may differ than before, besides half as much again


def slower_than_before(steps: StepRows, hosts: Mapping[int, str], cpu_waits: Sequence[tuple[int, float]]) -> list[Verdict]:
    """Return a verdict on all ranks if each takes longer than earlier in the job, with the same calls in a step.

    It is not said if other programs use the processors.

    Args:
        steps: steps of every rank, in any order.
        hosts: host of each rank.
        cpu_waits: ``Snapshot.cpu_waits``. Without them it is not known what other programs do, and nothing is said.
    """
    ranks, table, numbers = step_tables(steps, LONGER)
    least = min(OLD, max(kept_steps(len(ranks)) - NEW, FEWEST_OLD))
    if not len(ranks) or table.shape[2] < NEW + least:
        return []
    calls = table[COLUMNS.index("calls")]
    alike = (calls == calls[:, -1:]).all(axis=0) & ~table[COLUMNS.index("long")].any(axis=0)  # other calls, other work
    table, numbers = table[:, :, alike], numbers[alike]
    if table.shape[2] < max(NEW + least, len(alike) / 2):
        return []
    own = table[COLUMNS.index("own_ns")]
    at = change_in(own, least)
    if at is None:
        return []
    times = row_medians(own[:, -NEW:]) / np.maximum(row_medians(own[:, :at]), 1.0)
    length = float(np.median(table[1, :, -NEW:] - table[0, :, -NEW:]))
    excess = _grown(own, at)
    if excess < LOST * length:
        return []
    before, now = _waited_per_step(table[:, :, :at], cpu_waits), _waited_per_step(table[:, :, -NEW:], cpu_waits)
    if before is None or now is None or now - before > excess / 2:
        return []
    evidence = SlowerThanBefore(excess, length, float(np.median(times)), NEW, (int(numbers[0]), int(numbers[at - 1])))
    cause = next(
        (
            cause
            for cause, name in ((Cause.DATA, "data_ns"), (Cause.GARBAGE, "garbage_ns"))
            if _grown(table[COLUMNS.index(name)], at) > excess / 2
        ),
        Cause.COMPUTE,
    )
    there = tuple(dict.fromkeys(hosts[rank] for rank in ranks.tolist() if rank in hosts))
    return [
        Verdict(
            Syndrome.NON_COMMUNICATION_SLOW, tuple(ranks.tolist()), int(table[0, :, -NEW].min()), victims=len(ranks),
            cause=cause, evidence=(evidence,), next=AllSlower(there, int(numbers[-NEW]), int(numbers[-1])),
        )
    ]  # fmt: skip


def change_in(own: Floats, least: int = OLD) -> int | None:
    """Return from which step on all ranks take longer; None if they do not, or if steps of this job differ anyway.

    Args:
        own: own times ``[rank, step]``.
        least: fewest steps before the change.
    """
    newest = np.log(np.maximum(row_medians(own[:, -NEW:]), 1.0))
    oldest = np.log(np.maximum(row_medians(own[:, :least]), 1.0))
    if (newest - oldest).min() < np.log(SLOWER) or own.shape[1] < NEW + least:
        return None
    logs = np.log(np.maximum(own, 1.0))
    level = np.median(logs - oldest[:, None], axis=0)  # of the job
    at = _split(level, least)
    old, new = logs[:, :at], logs[:, at:]
    changes = row_medians(new) - row_medians(old)
    as_even = _spread(new) <= 1.5 * _spread(old) + SPREAD
    even = _unevenness(level[:at]) <= EVEN * float(np.median(changes))
    return at if even and bool(as_even.all()) and changes.min() >= np.log(SLOWER) else None


def _split(level: Floats, least: int) -> int:
    """Return where the levels of all steps divide best into earlier and later ones."""
    level = np.clip(level, *np.quantile(level, (0.05, 0.95)))  # one long step says little
    sums, count = np.append(0.0, np.cumsum(level)), len(level)
    at = np.arange(least, count - NEW + 1)
    before, after = sums[at] / at, (sums[-1] - sums[at]) / (count - at)
    return int(at[np.argmax(at * (count - at) * (after - before) ** 2)])


def _spread(logs: Floats) -> Floats:
    """Return for each row between which two values, as a difference, four fifths of it lie."""
    low, high = np.quantile(logs, (0.1, 0.9), axis=1)
    found: Floats = high - low
    return found


def _unevenness(level: Floats) -> float:
    """Return by how much short windows differ; half of that, if steps that follow each other differ as much."""
    windows = np.lib.stride_tricks.sliding_window_view(level, WINDOW)[:: WINDOW // 2]
    medians = np.median(windows, axis=1)
    by_chance = CHANCE * float(np.median(np.abs(np.diff(level))))
    found = float(medians.max() - medians.min())
    return max(found / 2, found - by_chance)


def _waited_per_step(table: Floats, cpu_waits: Sequence[tuple[int, float]]) -> float | None:
    """Return how long the median rank waited for a processor in a step, in nanoseconds; None without a look in these steps."""
    begin, end = float(table[0].min()), float(table[1].max())
    shares = [share for at_ns, share in cpu_waits if begin <= at_ns <= end]
    return float(np.mean(shares)) * float(np.median(table[1] - table[0])) if shares else None


def _grown(times: Floats, at: int) -> float:
    """Return by how much a part of the own time has grown, median over ranks."""
    return float(np.median(row_medians(times[:, -NEW:]) - row_medians(times[:, :at])))
