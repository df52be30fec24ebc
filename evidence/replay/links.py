"""Slow links, rates of links, slow data and orders of ranks: predictions against what was run, for ``docs/evidence/replay.md``.

As root: python -m evidence.replay.links --keep results/replay-links.jsonl [--only NAME ...]

Each rank of a DeepSpeed job is in a network namespace of its own. Every pair of ranks has a link of its own rate (``tc``, one
HTB class for each peer).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.jobs.steering.namespaces import LINK, Network, missing
from tests.support.repository import REPO
from unickpt.planning.replay.price import Questions, WhatIf, analyse
from unickpt.planning.replay.sources import read_trace
from unickpt.planning.replay.trace import Trace

HOSTS = ("a", "b", "c", "d")
STEPS, FAST, SLOW = 16, 400, 100  # megabits per second
LIMIT_S, PORT = 400.0, 29_517
PIPELINE: dict[str, Any] = {
    "kind": "pipeline",
    "steps": STEPS,
    "width": 1024,
    "rows": 128,
    "microbatches": 4,
    "layers": [0.02] * 4,
    "stages": 4,
}
TWO_STAGES = PIPELINE | {"stages": 2, "layers": [0.03] * 4}
UNEVEN = TWO_STAGES | {"layers": [0.05, 0.05, 0.02, 0.02], "rows": 8, "places": {"0": 1.6}}
ZERO = {"kind": "zero1", "steps": STEPS, "width": 512, "rows": 4, "layers": [0.03] * 4}
DATA = ZERO | {"kind": "data", "layers": [0.05] * 4, "width": 64}


def rate(megabits: float, peer: int, verb: str = "change") -> list[str]:
    """Return the command of a host that sets the rate to a peer."""
    return [
        "tc", "class", verb, "dev", LINK, "parent", "1:", "classid", f"1:{10 + peer}", "htb", "rate", f"{megabits:.0f}mbit",
        "burst", "32kb", "cburst", "32kb", "quantum", "60000",
    ]  # fmt: skip


def shape(network: Network, megabits: float) -> None:
    """Give each pair of hosts a link of its own."""
    for host in HOSTS:
        commands = [["tc", "qdisc", "replace", "dev", LINK, "root", "handle", "1:", "htb"]]
        for peer, name in enumerate(HOSTS):
            if name != host:
                commands += [
                    rate(megabits, peer, "replace"),
                    ["tc", "filter", "add", "dev", LINK, "parent", "1:", "protocol", "ip", "prio", "1", "u32", "match", "ip",
                     "dst", f"{network.address(name)}/32", "flowid", f"1:{10 + peer}"],
                ]  # fmt: skip
        subprocess.run([*network.command(host), "tc", "qdisc", "del", "dev", LINK, "root"], capture_output=True, check=False)
        for command in commands:
            subprocess.run([*network.command(host), *command], check=True)


def run(task: dict[str, Any], *, order: tuple[int, ...] = (0, 1, 2, 3), slow_pair: tuple[int, int] | None = None) -> Trace:
    """Run a job on hosts, with rank ``r`` on host ``order[r]``, and return its records."""
    network = Network(HOSTS)
    with tempfile.TemporaryDirectory() as folder:
        given, rings = Path(folder) / "task.json", Path(folder) / "rings"
        given.write_text(json.dumps(task | {"rings": str(rings)}))
        try:
            shape(network, FAST)
            if slow_pair is not None:
                for host, peer in (slow_pair, slow_pair[::-1]):
                    subprocess.run([*network.command(HOSTS[host]), *rate(SLOW, peer)], check=True)
            started = []
            for rank, place in enumerate(order):
                env = {
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(order)),
                    "LOCAL_RANK": "0",
                    "MASTER_PORT": str(PORT),
                    "MASTER_ADDR": network.address(HOSTS[order[0]]),
                    "GLOO_SOCKET_IFNAME": LINK,
                    "OMP_NUM_THREADS": "1",
                    "DS_ACCELERATOR": "cpu",
                }
                command = [
                    *network.command(HOSTS[place]),
                    sys.executable,
                    "-m",
                    "evidence.replay.linked_job",
                    str(given),
                ]
                started.append(subprocess.Popen(command, cwd=REPO, env=env))
            try:
                codes = [process.wait(LIMIT_S) for process in started]
            finally:
                for process in started:
                    process.kill()
            assert not any(codes), codes
            return read_trace([str(rings)])
        finally:
            network.close()


def halves(trace: Trace, sound: Questions, changed: Questions) -> tuple[WhatIf, WhatIf]:
    """Analyse both halves, each without its first step, which has parts of the step before it."""
    first, last = int(trace.marks["number"].max()) - STEPS + 1, int(trace.marks["number"].max())
    return analyse(trace, (first + 1, first + STEPS // 2 - 1), sound), analyse(trace, (first + STEPS // 2 + 1, last), changed)


def _step_s(found: WhatIf) -> float:
    return statistics.median(found.measured_steps_s)


def _row(name: str, job: str, change: str, known: WhatIf, gain_s: float, run_s: float, error_s: float) -> dict[str, Any]:
    measured_s = _step_s(known)
    return {
        "name": name,
        "job": job,
        "change": change,
        "measured_s": measured_s,
        "predicted_s": measured_s - gain_s,
        "run_s": run_s,
        "error_s": error_s,
    }


def slow_link() -> Iterator[dict[str, Any]]:
    """One pair of a pipeline becomes slow in the second half."""
    slower = {"1": [rate(SLOW, 3)], "3": [rate(SLOW, 1)]}
    sound, slow = halves(run(TWO_STAGES | {"at_half": slower}), Questions(), Questions(links=((1, 3),)))
    answer = slow.answers[0]
    job = "pipeline of 2 stages, 4 ranks"
    row = _row("slow link", job, "link 1-3 like its class", slow, answer.gain_s, _step_s(sound), answer.error_s)
    yield row | {
        "by_link": slow.by_link,
        "by_link_sound": sound.by_link,
        "by_rank": {str(r): s for r, s in slow.by_rank.items()},
    }


def rates() -> Iterator[dict[str, Any]]:
    """All links become slow in the second half. Each half predicts the other one."""
    for job, task, ranks in (("pipeline of 4 stages, 4 ranks", PIPELINE, 4), ("ZeRO-1, 2 ranks", ZERO, 2)):
        slower = {str(rank): [rate(SLOW, peer) for peer in range(4) if peer != rank] for rank in range(ranks)}
        trace = run(task | {"at_half": slower}, order=tuple(range(ranks)))
        kind, factor = _busiest(trace), FAST / SLOW
        asked = [Questions(speeds=((kind, 1 / factor),)), Questions(speeds=((kind, factor),))]
        sound, slow = halves(trace, *asked)
        for known, other, text in ((sound, slow, f"{FAST} to {SLOW}"), (slow, sound, f"{SLOW} to {FAST}")):
            answer = known.answers[0]
            yield _row("link rate", job, f"{text} Mbit/s", known, answer.gain_s, _step_s(other), answer.error_s)


def _busiest(trace: Trace) -> str:
    """Return the kind of groups with the most bytes."""
    sent = np.bincount(trace.calls["comm"], trace.calls["bytes"], minlength=len(trace.groups))
    labels = [group.label for group in trace.groups]
    return max(labels, key=lambda label: sum(sent[at] for at, each in enumerate(labels) if each == label))


def orders() -> Iterator[dict[str, Any]]:
    """Ranks on other hosts: one link is slow, or one host computes slowly."""
    job = "pipeline of 4 stages, link of hosts 1 and 2 slow"
    yield from _orders(job, ((1, 0, 3, 2), (0, 2, 1, 3)), lambda order: run(PIPELINE, order=order, slow_pair=(1, 2)))
    job = "uneven pipeline of 2 stages, host 0 computes slowly"
    yield from _orders(job, ((2, 1, 0, 3), (1, 0, 2, 3)), lambda order: run(_moved(UNEVEN, order), order=order))


def _orders(
    job: str, others: tuple[tuple[int, ...], ...], made: Callable[[tuple[int, ...]], Trace]
) -> Iterator[dict[str, Any]]:
    known = analyse(made((0, 1, 2, 3)), None, Questions(orders=others))
    for order, answer in zip(others, known.answers, strict=True):
        run_s = _step_s(analyse(made(order)))
        yield _row("order", job, f"order {','.join(map(str, order))}", known, answer.gain_s, run_s, answer.error_s)


def _moved(task: dict[str, Any], order: tuple[int, ...]) -> dict[str, Any]:
    """Return the task with the slow host's rank slow."""
    return task | {"places": {str(order.index(int(place))): factor for place, factor in task["places"].items()}}


def slow_data() -> Iterator[dict[str, Any]]:
    """The data of one rank take long in the second half."""
    sound, slow = halves(run(DATA | {"wait_s": 0.05}), Questions(), Questions(like_peers=(1,)))
    job = "ZeRO-1, 4 ranks; data of rank 1 take 0.2 s"
    yield _row(
        "slow data", job, "no waits for data (cause)", slow, slow.by_cause.get("data", 0.0), _step_s(sound), slow.error_s
    )
    row = _row("slow data", job, "rank 1 like its peers", slow, slow.answers[0].gain_s, _step_s(sound), slow.error_s)
    yield row | {"by_rank": {str(rank): seconds for rank, seconds in slow.by_rank.items()}}


PARTS = {"slow link": slow_link, "link rate": rates, "order": orders, "slow data": slow_data}


def section(kept: list[dict[str, Any]]) -> list[str]:
    """Return the section of the page."""
    lines = [
        "## Links, data and orders of ranks",
        "",
        "DeepSpeed jobs with each rank in a network namespace, and a link for each pair of ranks "
        f"({FAST} Mbit/s, slow ones {SLOW}; `tc`). Links and data change in the second half of a job, which predicts the "
        "other half. An order is predicted from a job in the order 0,1,2,3, and run in another job.",
        "",
        "As root: `python -m evidence.replay.links --keep results/replay-links.jsonl`",
        "",
        "| job | change | measured, s | predicted, s | run, s | error | error bar |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in kept:
        error, bar = each["predicted_s"] / each["run_s"] - 1, each["error_s"] / each["measured_s"]
        lines.append(
            f"| {each['job']} | {each['change']} | {each['measured_s']:.3f} | {each['predicted_s']:.3f} | {each['run_s']:.3f} "
            f"| {error:+.1%} | {bar:.1%} |"
        )
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", type=Path, required=True, help="file of results; a part that is in it is not run again")
    parser.add_argument("--only", nargs="*", default=list(PARTS))
    args = parser.parse_args()
    if why := missing():
        parser.error(why)
    done = {json.loads(line)["name"] for line in args.keep.read_text().splitlines()} if args.keep.exists() else set()
    for part in args.only:
        if part not in done:
            for found in PARTS[part]():
                with args.keep.open("a") as file:
                    file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
