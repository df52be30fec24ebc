"""Slow ranks in the first steps of a job, and stages without peers: ``docs/evidence/early-stragglers.md``.

    python -m evidence.diagnosis.early --keep results/early-stragglers.jsonl [--rounds 5] [--page FILE]

Layers sleep for a known time, half as long again on a slow rank. Each job runs first without a slow rank and with an empty
store, which it fills; then with a random slow rank and that store, with the same rank and an empty store, and without a slow
rank and with the store, on a quiet machine and on one that is busy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.jobs.diagnosis.early import FACTOR, SLOW, STEPS, ran

MARK = "<!-- made by evidence/diagnosis/early.py -->"
JOBS = (
    ("deepspeed", "zero1", 4),
    ("deepspeed", "zero3", 4),
    ("deepspeed", "pipeline8x4", 4),
    ("megatron", "gpt-dp4-dist", 4),
    ("megatron", "gpt-tp2dp2-dist", 4),
    ("megatron", "gpt-pp2dp2-dist", 4),
    ("megatron", "gpt-pp4-dist", 4),
)

ALONE = {"gpt-pp4-dist": (0, 3)}  # ranks without peers: the middle stages make the same calls


@contextlib.contextmanager
def busy(processes: int = 3) -> Iterator[None]:
    """Let other processes compute."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for each in others:
            each.kill()
            each.wait()


def measured(job: tuple[str, str, int], seed: int, cache: Path, folder: Path) -> list[dict[str, Any]]:
    """Run a job with the store in ``cache``, and with an empty one."""
    chance = random.Random(f"{job} {seed}")
    about = {"job": " ".join(job[:2]), "seed": seed}
    if not any(cache.rglob("*.jsonl")):
        sound = ran(job, folder / "first", cache)
        yield_first = [about | {"kind": "sound, empty store", "slow": -1, **sound}]
    else:
        yield_first = []
    slow = chance.choice(ALONE.get(job[1], range(job[2]))) if seed else chance.randrange(job[2])
    empty = folder / "empty"
    rows = [
        *yield_first,
        about | {"kind": "slow, store", "slow": slow, **ran(job, folder / "slow", cache, slow)},
        about | {"kind": "slow, empty store", "slow": slow, **ran(job, folder / "slow-empty", empty, slow)},
        about | {"kind": "sound, store", "slow": -1, **ran(job, folder / "sound", cache)},
    ]
    with busy():
        rows.append(about | {"kind": "sound, store, busy", "slow": -1, **ran(job, folder / "busy", cache)})
    return rows


def right(row: dict[str, Any]) -> int | None:
    """Return the step of the verdict if the first one names the slow rank; None otherwise."""
    first = row["named"][0] if row["named"] else None
    return first[2] if first is not None and first[0] == SLOW and first[1] == [row["slow"]] else None


def _alone(row: dict[str, Any]) -> bool:
    return row["slow"] in ALONE.get(row["job"].split()[1], ())


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the tables."""
    lines = [
        f"`python -m evidence.diagnosis.early --keep results/early-stragglers.jsonl`, {os.cpu_count()} cores, "
        f"{STEPS} steps, layers of one rank {FACTOR} times as long from the first step on.",
        "",
        "| job | step, s | slow runs | with earlier times: right | step of the verdict | without: right | step of the verdict "
        "| false alarms in sound runs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    kinds = dict.fromkeys((row["job"], _alone(row)) for row in rows if row["slow"] >= 0)
    for job, alone in kinds:
        mine = [row for row in rows if row["job"] == job and (row["slow"] < 0 or _alone(row) == alone)]
        cells = []
        for kind in ("slow, store", "slow, empty store"):
            found = [right(row) for row in mine if row["kind"] == kind]
            at = [step for step in found if step is not None]
            where = f"{statistics.median(at):.0f} ({min(at)} to {max(at)})" if at else "-"
            cells += [f"{len(at)} of {len(found)}", where]
        sound = [row for row in mine if row["slow"] < 0]
        alarms = sum(bool(row["named"]) for row in sound)
        runs = sum(row["kind"] == "slow, store" for row in mine)
        step_s = statistics.median(row["step_s"] for row in mine if row["kind"] == "slow, store")
        name = f"{job}, {'a stage without peers' if alone else 'a middle stage'}" if job.split()[1] in ALONE else job
        lines.append(f"| {name} | {step_s:.2f} | {runs} | {' | '.join(cells)} | {alarms} of {len(sound)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, required=True, help="file of results; runs that are in it are not repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="layouts")
    parser.add_argument("--page", type=Path, help="write the tables into this page")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.keep.read_text().splitlines()] if args.keep.exists() else []
    done = {(row["job"], row["seed"]) for row in rows}
    with tempfile.TemporaryDirectory() as caches:
        for seed in range(args.rounds):
            for job in JOBS:
                if (" ".join(job[:2]), seed) in done or (args.only and job[1] not in args.only):
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    fresh = measured(job, seed, Path(caches) / job[1], Path(folder))
                rows += fresh
                with args.keep.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in fresh)
    if args.page:
        before = args.page.read_text().split(MARK)[0].rstrip()
        args.page.write_text(f"{before}\n\n{MARK}\n\n{page(rows)}\n")


if __name__ == "__main__":
    main()
