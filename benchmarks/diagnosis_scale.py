"""Accuracy and duration of a diagnosis of very large simulated jobs with one fault each.

The jobs come from ``unickpt.testing.simulation``. Each has its fault in a random rank or link at a random place of a step. A
pass is a full diagnosis after 26 steps: deadline, hangs, stragglers, and links.

python -m benchmarks.diagnosis_scale [--ranks 1024 16384] [--runs 10] [--sound 20] [--out docs/evidence/diagnosis-scale.md]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unickpt.testing.simulation.faults import STEPS, JobFault, diagnosed, right_place, right_syndrome, simulate
from unickpt.testing.simulation.layout import ParallelLayout

LAYOUTS = {
    64: ParallelLayout(2, 4, 8),
    256: ParallelLayout(4, 4, 16),
    1024: ParallelLayout(8, 8, 16),
    16384: ParallelLayout(8, 16, 128),
}
COLUMNS = [
    "fault", "runs", "with a verdict", "right syndrome", "right rank or link only", "pass s (longest)", "processor s", "MB",
]  # fmt: skip
Result = dict[str, Any]


def measured(layout: ParallelLayout, fault: JobFault, runs: int, seed: int) -> Result:
    """Diagnose many jobs with one fault. Returns the numbers of verdicts and of right ones, and the times of the passes."""
    found: Result = {"runs": runs, "judged": 0, "syndrome": 0, "place": 0, "seconds": [], "processor": []}
    for number in range(seed, seed + runs):
        scene = simulate(layout, fault, number)
        begin, processor = time.perf_counter(), time.process_time()
        verdicts = diagnosed(scene)
        found["seconds"].append(time.perf_counter() - begin)
        found["processor"].append(time.process_time() - processor)
        found["judged"] += bool(verdicts)
        syndrome = right_syndrome(verdicts, scene.expected)
        found["syndrome"] += syndrome
        found["place"] += syndrome and right_place(verdicts, scene.expected)
        if not (syndrome and right_place(verdicts, scene.expected)):
            print(fault.name, number, scene.expected, [each.evidence[:1] for each in verdicts[:3]], file=sys.stderr)
    tracemalloc.start()  # again, because tracing takes time itself
    diagnosed(scene)
    found["bytes"] = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found


def all_faults(layout: ParallelLayout, runs: int, sound: int, seed: int) -> Result:
    """Diagnose every fault, and measure this process."""
    found = {fault.name: measured(layout, fault, sound if fault is JobFault.SOUND else runs, seed) for fault in JobFault}
    return {"faults": found, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def table(found: Result) -> list[str]:
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for fault in JobFault:
        each = found["faults"][fault.name]
        cells = [
            fault.value,
            str(each["runs"]),
            str(each["judged"]),
            str(each["syndrome"]),
            str(each["place"]),
            f"{statistics.median(each['seconds']):.2f} ({max(each['seconds']):.2f})",
            f"{statistics.median(each['processor']):.2f}",
            f"{each['bytes'] / 1e6:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", f"{answer([found])} The process, including the simulated job, took {found['peak_bytes'] / 1e6:.0f} MB."]


def answer(results: Sequence[Result]) -> str:
    """Return in one sentence how many faults are diagnosed correctly, and how long a pass takes."""
    tables = [found["faults"] for found in results]
    faulty = [each for faults in tables for name, each in faults.items() if name != JobFault.SOUND.name]
    sound = [faults[JobFault.SOUND.name] for faults in tables]
    runs, place = sum(each["runs"] for each in faulty), sum(each["place"] for each in faulty)
    judged, quiet = sum(each["judged"] for each in sound), sum(each["runs"] for each in sound)
    every = [second for faults in tables for each in faults.values() for second in each["seconds"]]
    return (
        f"{place} of {runs} faults are diagnosed correctly, with no other verdict, and {judged} of {quiet} sound jobs have "
        f"one; a pass takes {statistics.median(every):.2f} s, the longest {max(every):.2f} s."
    )


HEAD = f"""# Diagnosis at scale

Does diagnosis name the right rank in a job of thousands of ranks, and how long does it take?

{{answer}} Several machines were not tried.

Jobs are simulated call by call (`unickpt.testing.simulation`): tensor, pipeline and data parallel, {STEPS} steps of
varying length, clocks that differ slightly between hosts, more work in the first and the last stage, one fault at a random
place. No network, process or ring: the figures cover the detectors alone. [Diagnosis](diagnosis.md) has faults in running
jobs.

| column | meaning |
|---|---|
| runs | number of jobs |
| with a verdict | jobs with any verdict |
| right syndrome | jobs with the right syndrome and no other |
| right rank or link only | jobs with the right ranks or links and no other, and with the right cause of a slow rank |
| pass s (longest) | median and longest wall time of one pass |
| processor s | processor time of one pass |
| MB | memory of one pass in addition to its input |
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, choices=LAYOUTS, default=[1024, 16384])
    parser.add_argument("--runs", type=int, default=10, help="jobs of each fault")
    parser.add_argument("--sound", type=int, default=20, help="sound jobs")
    parser.add_argument("--seed", type=int, default=0, help="of the first job")
    parser.add_argument("--out", type=Path, help="document to write")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(all_faults(LAYOUTS[args.one], args.runs, args.sound, args.seed)))
        return
    shown = " ".join(["python -m benchmarks.diagnosis_scale", *sys.argv[1:]])
    lines: list[str] = []
    results: list[Result] = []
    for ranks in args.ranks:
        busy = os.getloadavg()[0]
        numbers = ["--runs", str(args.runs), "--sound", str(args.sound), "--seed", str(args.seed)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.diagnosis_scale", "--one", str(ranks), *numbers],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        layout = LAYOUTS[ranks]
        lines += [f"## {ranks:,} ranks: tensor {layout.tp}, pipeline {layout.pp}, data {layout.dp}", ""]
        results.append(json.loads(done.stdout))
        lines += [*table(results[-1]), ""]
        lines += [
            f"`{shown}`: {os.cpu_count()} cores, {platform.machine()}, one used by a pass, load {busy:.1f} before and "
            f"{os.getloadavg()[0]:.1f} after; Python {platform.python_version()}, numpy {np.__version__}.",
            "",
        ]
        text = "\n".join([HEAD.format(answer=answer(results)), *lines]).rstrip() + "\n"
        if args.out:
            args.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
