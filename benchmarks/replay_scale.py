"""Duration of the replay of one step of very large simulated jobs, on one core.

The records are those of one simulated data parallel replica, repeated for the others.

python -m benchmarks.replay_scale [--ranks 1024 16384]
"""

from __future__ import annotations

import argparse
import platform
import resource
import time

from unickpt.planning.replay import edits
from unickpt.planning.replay.graph import graph_of
from unickpt.planning.replay.schedule import columns, schedule_of, simulate, step_times
from unickpt.planning.replay.trace import window_of
from unickpt.testing.simulation.layout import ParallelLayout
from unickpt.testing.simulation.traces import simulated_trace

LAYOUTS = {1024: ParallelLayout(8, 8, 16), 16384: ParallelLayout(8, 16, 128)}
MICROBATCHES = 16


def measured(ranks: int) -> str:
    """Replay one step, and return a row of the table."""
    layout = LAYOUTS[ranks]
    trace = simulated_trace(layout, 1, MICROBATCHES, tiled=True)
    begin, processor = time.perf_counter(), time.process_time()
    graph = graph_of(window_of(trace))
    built = time.process_time() - processor
    schedule = schedule_of(graph)
    ordered = time.process_time() - processor - built
    now = edits.measured(graph)
    steps = step_times(simulate(graph, schedule, columns([now.own_ns]), columns([now.took_ns])), graph.window.begin_ns)
    total = time.process_time() - processor
    error = abs(float(steps.mean()) / graph.window.step_ns - 1)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return (
        f"| {ranks:,} | {len(trace.calls):,} | {built:.1f} | {ordered:.1f} | {total - built - ordered:.1f} | {total:.1f} "
        f"| {time.perf_counter() - begin:.1f} | {error:.1e} | {memory:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", choices=sorted(LAYOUTS), default=sorted(LAYOUTS))
    args = parser.parse_args()
    print(platform.platform())
    print("| ranks | calls | graph s | order s | replay s | processor s | wall s | error | GB |")
    print("|---" * 9 + "|")
    for ranks in args.ranks:
        print(measured(ranks), flush=True)


if __name__ == "__main__":
    main()
