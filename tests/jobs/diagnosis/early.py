"""Slow ranks in the first steps of a job, and stages without peers: ``docs/evidence/early-stragglers.md``.

    python -m tests.jobs.diagnosis.early --keep results/early-stragglers.jsonl [--rounds 5] [--page FILE]

Layers sleep for a known time, half as long again on a slow rank. Each job runs first without a slow rank and with an empty
store, which it fills; then with a random slow rank and that store, with the same rank and an empty store, and without a slow
rank and with the store, on a quiet machine and on one that is busy.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
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

from tests.support.result_lines import results_in
from unickpt.diagnosis.agent.loop import VERDICTS
from unickpt.testing.launch import fork_ranks

STEPS, LAYER_S, FACTOR = 36, 0.02, 1.5
MARK = "<!-- made by tests/jobs/diagnosis/early.py -->"
SLOW = "non-communication slow"
JOBS = (
    ("deepspeed", "zero1", 4), ("deepspeed", "zero3", 4), ("deepspeed", "pipeline8x4", 4), ("megatron", "gpt-dp4-dist", 4),
    ("megatron", "gpt-tp2dp2-dist", 4), ("megatron", "gpt-pp2dp2-dist", 4), ("megatron", "gpt-pp4-dist", 4),
)  # fmt: skip

ALONE = {"gpt-pp4-dist": (0, 3)}  # ranks without peers: the middle stages make the same calls


def ran(
    job: tuple[str, str, int],
    rings: Path,
    cache: Path,
    slow: int = -1,
    *,
    since: int = 1,
    steps: int = STEPS,
    layer_s: float = LAYER_S,
    factor: float = FACTOR,
) -> dict[str, Any]:
    """Run a job.

    Args:
        job: framework, layout, ranks.
        rings: folder of the rings.
        cache: cache folder of the user, with the store.
        slow: slow rank; -1 for none.
        since: first step in which it is slow.
        steps: steps of the job.
        layer_s: seconds of the forward computation of a layer.
        factor: multiplies them on the slow rank.

    Returns:
        ``named`` (ranks of each verdict, with the step in which it was written), ``step_s``, and the first ``sentence``.
    """
    kind, layout, world = job
    output = fork_ranks(
        world, "tests.jobs.diagnosis.early_job", kind, layout, str(rings), str(steps), str(layer_s), str(slow),
        str(factor), str(since), timeout_s=400, env={"GLOO_SOCKET_IFNAME": "lo", "XDG_CACHE_HOME": str(cache)},
    ).stdout  # fmt: skip
    (text,) = results_in(output, "ENDS")
    ends = json.loads(text)
    path = rings / VERDICTS
    said = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    said = [each for each in said if each["at_ns"] < ends[-1]]  # ranks end one after the other
    named = [[each["syndrome"], each["ranks"], sum(end < each["at_ns"] for end in ends)] for each in said]
    took = [(after - before) / 1e9 for before, after in itertools.pairwise(ends[5:])]
    return {"named": named, "step_s": statistics.median(took), "sentence": said[0]["sentence"] if said else ""}


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
        f"`python -m tests.jobs.diagnosis.early --keep results/early-stragglers.jsonl`, {os.cpu_count()} cores, "
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
