"""Processor time of a host's agent, by the number of ranks on its host.

    python -m benchmarks.agent_cost [--ranks 2 8 64] [--seconds 30] [--rounds 3]

Every rank is a process that writes the calls of a training job into its ring: steps of 0.5 s with 60 all_reduces in four
groups. The agent is the one that training starts. Its processor time is read from /proc, after the first ten seconds, in which
it imports and sees its first steps.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from unickpt.diagnosis.agent import launch
from unickpt.diagnosis.recording.rank_ranges import progressions
from unickpt.diagnosis.recording.records import Op, Phase
from unickpt.diagnosis.recording.ring import SUFFIX, Identity, RingWriter

STEP_S, CALLS, GROUPS, WARM_S = 0.5, 60, 4, 10.0
RANKS, SECONDS = (2, 8, 64), 30.0
TICKS = os.sysconf("SC_CLK_TCK")


def be_rank(folder: Path, rank: int, world: int) -> None:
    """Write the calls of a rank until the process is killed."""
    made = RingWriter(folder / f"{rank:05d}{SUFFIX}", Identity.here(rank, world, "cost"), capacity=65_536)
    for group in range(GROUPS):
        made.list_communicator({"name": f"g{group}", "label": "data parallel", "ranks": progressions(range(world))})
    number, step, began_ns = 0, 0, time.monotonic_ns()
    seq = [0] * GROUPS
    step_ns = int(STEP_S * 1e9)
    while True:
        step += 1
        for at in range(CALLS):
            number, group = number + 1, at % GROUPS
            seq[group] += 1
            call_ns = began_ns + at * (step_ns // CALLS)
            end_ns = call_ns + 1_000_000
            made.put(
                number, call_ns, 0, call_ns, end_ns, seq[group], 1 << 20, 1 << 20, 0, int(Op.ALL_REDUCE), 2, group, 0, 0, -1, 0,
                step, int(Phase.BACKWARD),
            )  # fmt: skip
        end_ns = began_ns + step_ns
        number += 1
        made.put(number, began_ns, 0, 0, end_ns, step, 0, 0, 0, int(Op.STEP), 0, 0, 0, 0, -1, 0, step, int(Phase.BACKWARD))
        made.state(heartbeat_ns=time.monotonic_ns(), step=step, newest=number, phase=int(Phase.BACKWARD))
        began_ns = end_ns
        time.sleep(max(end_ns - time.monotonic_ns(), 0) / 1e9)


def processor_s(pid: int) -> float:
    """Return the seconds of processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def measure(ranks: int, seconds: float) -> float:
    """Return the share of one core that the agent of so many ranks takes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder, children = Path(name), []
        os.chmod(folder, 0o700)
        try:
            for rank in range(ranks):
                child = os.fork()
                if not child:
                    be_rank(folder, rank, ranks)
                children.append(child)
            agent = launch.start(folder, 0, None)
            if agent is None:
                raise SystemExit("the agent did not start")
            children.append(agent.pid)
            time.sleep(WARM_S)
            began, before = time.monotonic(), processor_s(agent.pid)
            time.sleep(seconds)
            return (processor_s(agent.pid) - before) / (time.monotonic() - began)
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
            for child in children:
                os.waitpid(child, 0)


def table(ranks: Sequence[int], seconds: float, rounds: int) -> str:
    """Return the Markdown table of the agent's processor time."""
    found: dict[int, list[float]] = {count: [] for count in ranks}
    for _ in range(rounds):
        for count, shares in found.items():
            shares.append(measure(count, seconds))
    lines = ["| ranks on the host | agent, share of one core |", "|---|---|"]
    for count, shares in found.items():
        lines.append(f"| {count} | {statistics.median(shares):.2%} ({min(shares):.2%} to {max(shares):.2%}) |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(table(args.ranks, args.seconds, args.rounds))


if __name__ == "__main__":
    main()
