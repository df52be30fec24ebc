"""How often a diagnosis of a very large job is right, and how long it takes: on made-up jobs with one fault each.

The jobs are those of ``unickpt.diagnosis.simulation``, every one with its fault in a random rank or link and a random
place of a step. A pass is all of a diagnosis after 26 steps: the deadline, hangs, stragglers, and links.

python benchmarks/diagnosis_scale.py [--ranks 1024 16384] [--runs 10] [--sound 20] [--out docs/diagnosis-scale.md]
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
from pathlib import Path
from typing import Any

import numpy as np

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from unickpt.diagnosis.simulation.faults import STEPS, Fault, diagnosed, right_place, right_syndrome, simulate  # noqa: E402
from unickpt.diagnosis.simulation.layout import Layout  # noqa: E402

LAYOUTS = {64: Layout(2, 4, 8), 256: Layout(4, 4, 16), 1024: Layout(8, 8, 16), 16384: Layout(8, 16, 128)}
COLUMNS = [
    "fault", "runs", "told of", "right syndrome", "right rank or link, no other", "pass s (longest)", "processor s", "MB",
]  # fmt: skip
Result = dict[str, Any]


def measured(layout: Layout, fault: Fault, runs: int, seed: int) -> Result:
    """Many jobs with one fault: how many were told of, and rightly, and what the passes took."""
    found: Result = {"runs": runs, "told": 0, "syndrome": 0, "place": 0, "seconds": [], "processor": []}
    for number in range(seed, seed + runs):
        scene = simulate(layout, fault, number)
        begin, processor = time.perf_counter(), time.process_time()
        verdicts = diagnosed(scene)
        found["seconds"].append(time.perf_counter() - begin)
        found["processor"].append(time.process_time() - processor)
        found["told"] += bool(verdicts)
        syndrome = right_syndrome(verdicts, scene.expected)
        found["syndrome"] += syndrome
        found["place"] += syndrome and right_place(verdicts, scene.expected)
        if not (syndrome and right_place(verdicts, scene.expected)):
            print(fault.name, number, scene.expected, [each.evidence[:1] for each in verdicts[:3]], file=sys.stderr)
    tracemalloc.start()  # once more, for it takes time of its own
    diagnosed(scene)
    found["bytes"] = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found


def all_faults(layout: Layout, runs: int, sound: int, seed: int) -> Result:
    """Every fault, and what this process took for it."""
    found = {fault.name: measured(layout, fault, sound if fault is Fault.SOUND else runs, seed) for fault in Fault}
    return {"faults": found, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def table(found: Result) -> list[str]:
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for fault in Fault:
        each = found["faults"][fault.name]
        cells = [
            fault.value,
            str(each["runs"]),
            str(each["told"]),
            str(each["syndrome"]),
            str(each["place"]),
            f"{statistics.median(each['seconds']):.2f} ({max(each['seconds']):.2f})",
            f"{statistics.median(each['processor']):.2f}",
            f"{each['bytes'] / 1e6:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    faulty = [each for name, each in found["faults"].items() if name != Fault.SOUND.name]
    runs, place = sum(each["runs"] for each in faulty), sum(each["place"] for each in faulty)
    every = [second for each in found["faults"].values() for second in each["seconds"]]
    lines += [
        "",
        f"{place} of {runs} faults told rightly and nothing else; {found['faults'][Fault.SOUND.name]['told']} of "
        f"{found['faults'][Fault.SOUND.name]['runs']} sound jobs told of. A pass took {statistics.median(every):.2f} s, the "
        f"longest {max(every):.2f} s; the process, with the job that it made up, {found['peak_bytes'] / 1e6:.0f} MB.",
    ]
    return lines


HEAD = f"""# Diagnosis of very large jobs

How often a diagnosis is right, and how long one takes, on jobs that are made up (`unickpt/diagnosis/simulation`): tensor,
pipeline and data parallel, {STEPS} steps whose times vary, clocks of hosts that differ a little, the first and the last stage
with more to do, and one fault in a random place. Who waits for whom is played call by call; no network, no process and no ring
is in it, so that these figures are of the reasoning alone. What real faults do in real jobs is in [timing.md](timing.md).

In the columns: jobs, jobs that something was told of, those with nothing but the right syndrome, and those with nothing
but the right ranks or links, and the right cause of a rank that drags. Then seconds of one pass, the median and the longest,
processor seconds, and the memory that a pass takes beyond its input.
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
    shown = " ".join(["python benchmarks/diagnosis_scale.py", *sys.argv[1:]])
    lines = [HEAD]
    for ranks in args.ranks:
        busy = os.getloadavg()[0]
        numbers = ["--runs", str(args.runs), "--sound", str(args.sound), "--seed", str(args.seed)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, __file__, "--one", str(ranks), *numbers], check=True, stdout=subprocess.PIPE, text=True, env=env
        )
        layout = LAYOUTS[ranks]
        lines += [f"## {ranks:,} ranks: tensor {layout.tp}, pipeline {layout.pp}, data {layout.dp}", ""]
        lines += [*table(json.loads(done.stdout)), ""]
        lines += [
            f"`{shown}`: {os.cpu_count()} cores, {platform.machine()}, of which a pass uses one, load {busy:.1f} before and "
            f"{os.getloadavg()[0]:.1f} after; Python {platform.python_version()}, numpy {np.__version__}.",
            "",
        ]
        text = "\n".join(lines).rstrip() + "\n"
        if args.out:
            args.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
