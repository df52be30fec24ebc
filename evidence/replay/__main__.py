"""Replay of real jobs against what was run: the tables of ``docs/evidence/replay.md``.

python -m evidence.replay --keep results/replay.jsonl --page docs/evidence/replay.md [--only zero1 ...]
                                            [--rounds 10] [--page-only]

Each job makes ``STEPS`` steps. In the second half one rank computes longer. Its layers sleep, so that other programs on the
machine disturb it little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence.replay import links, pipelines, published
from evidence.replay.baselines import sums_s
from tests.support.forked_jobs import fork_ranks
from unickpt.planning.replay.price import Questions, WhatIf, analyse
from unickpt.planning.replay.sources import read_trace
from unickpt.planning.replay.trace import Trace

STEPS, EXTRA = 16, 0.5
RESULTS = Path("results")
SCALE, PUBLISHED = RESULTS / "replay-scale.txt", RESULTS / "replay-published.jsonl"
LINKS, PIPELINES = RESULTS / "replay-links.jsonl", RESULTS / "replay-pipelines.jsonl"
# Two jobs run by hand, with the commands in the text.
MICROBATCHES = """\
## Another number of microbatches

A DeepSpeed pipeline of 2 stages with ZeRO-1 on 4 ranks, none slow. Each run predicts the other one. One run each:

| measured with | measured, s | predicted for | predicted, s | run, s | error |
|---|---|---|---|---|---|
| 4 microbatches | 1.853 | 8 | 3.328 | 3.328 | +0.0% |
| 8 microbatches | 3.328 | 4 | 1.852 | 1.853 | -0.1% |

`torchrun --nproc-per-node 4 -m tests.jobs.replay.timed_job deepspeed pipeline4 RINGS 12 0.03 -1 0`, the same \
with `pipeline8`, then `unickpt whatif RINGS --steps 5:14 --microbatches 8`. Real layers vary more than sleeping ones.
"""


@dataclass(frozen=True, slots=True)
class TimedJob:
    """One job.

    Attributes:
        name: of the row.
        kind, layout: as in ``timed_job``.
        world: number of ranks.
        layer_s: seconds that a layer sleeps forward.
        slow: rank that is slow in the second half.
        added_s: seconds that its layers sleep longer in a step.
    """

    name: str
    kind: str
    layout: str
    world: int
    layer_s: float
    slow: int
    added_s: float


_SLEPT = 3 * EXTRA  # of a layer's time, forward and backward
JOBS = (
    TimedJob("DeepSpeed ZeRO-1, 4 ranks", "deepspeed", "zero1", 4, 0.08, 2, 8 * 0.08 * _SLEPT),
    TimedJob("DeepSpeed ZeRO-3, 4 ranks", "deepspeed", "zero3", 4, 0.08, 1, 8 * 0.08 * _SLEPT),
    TimedJob("Megatron DP4, 4 ranks", "megatron", "gpt-dp4-dist", 4, 0.12, 3, 4 * 0.12 * _SLEPT),
    TimedJob("Megatron TP2 PP2, 4 ranks", "megatron", "gpt-tp2pp2-dist", 4, 0.06, 2, 4 * 2 * 0.06 * _SLEPT),
    TimedJob("Megatron TP2 PP2 DP2, 8 ranks", "megatron", "gpt-tp2pp2dp2-dist", 8, 0.12, 5, 2 * 2 * 0.12 * _SLEPT),
    TimedJob("DeepSpeed pipeline of 2 stages, ZeRO-1, 4 ranks", "deepspeed", "pipeline", 4, 0.03, 1, 4 * 4 * 0.03 * _SLEPT),
    TimedJob("Megatron PP2 VPP2 DP2, 4 ranks", "megatron", "gpt-pp2vpp2dp2-dist", 4, 0.12, 1, 2 * 2 * 0.12 * _SLEPT),
    TimedJob("Megatron experts EP2 DP2, 4 ranks", "megatron", "moe-tp2ep2dp2-dist", 4, 0.08, 3, 2 * 4 * 0.08 * _SLEPT),
)


def run(job: TimedJob) -> dict[str, Any]:
    """Run a job and analyse both halves."""
    with tempfile.TemporaryDirectory() as folder:
        rings = Path(folder) / "rings"
        fork_ranks(
            job.world, "tests.jobs.replay.timed_job", job.kind, job.layout, str(rings), str(STEPS),
            str(job.layer_s), str(job.slow), str(EXTRA), timeout_s=600, env={"GLOO_SOCKET_IFNAME": "lo"},
        )  # fmt: skip
        trace = read_trace([str(rings)])
    last = int(trace.marks["number"].max())
    first = last - STEPS + 1
    asked = Questions(like_peers=(job.slow,))
    # the first step of a half has parts of the steps before it
    sound = analyse(trace, (first + 1, first + STEPS // 2 - 1), asked)
    slow = analyse(trace, (first + STEPS // 2 + 1, last), asked)
    held_out = [_held_out(trace, first + 1, STEPS // 2 - 1), _held_out(trace, first + STEPS // 2 + 1, STEPS // 2 - 1)]
    summed = sums_s(trace, (first + STEPS // 2 + 1, last), like_peers=job.slow)
    return {
        "name": job.name, "slow": job.slow, "halves": [_summary(sound), _summary(slow)], "held_out": held_out,
        "sums_s": summed,
    }  # fmt: skip


def _held_out(trace: Trace, first: int, steps: int) -> dict[str, Any]:
    """Predict the second part of some steps by the typical durations of the first part."""
    middle = first + steps // 2
    known, later = analyse(trace, (first, middle - 1)), analyse(trace, (middle, first + steps - 1))
    return {
        "typical_s": known.typical_s, "mean_s": known.step_s, "sums_s": sums_s(trace, (first, middle - 1)),
        "measured_steps_s": later.measured_steps_s,
    }  # fmt: skip


def _summary(found: WhatIf) -> dict[str, Any]:
    kept = ("step_s", "replayed_s", "undelayed_s", "error_s", "ideal_s", "slowdown", "measured_steps_s", "replayed_steps_s")
    return {
        **{name: getattr(found, name) for name in kept}, "by_rank": {str(rank): s for rank, s in found.by_rank.items()},
        "predicted_s": found.answers[0].step_s,
    }  # fmt: skip


def _of_jobs(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of each job."""
    found: dict[str, list[dict[str, Any]]] = {}
    for each in runs:
        found.setdefault(each["name"], []).append(each)
    return found


def _typical(values: list[float], text: str) -> str:
    """Return the median and the value that is farthest from 0."""
    return f"{statistics.median(map(abs, values)):{text}}, {max(map(abs, values)):{text}}"


def _range(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


@dataclass(frozen=True, slots=True)
class _Figures:
    """Figures of one run.

    Attributes:
        graph, bar: distance of the replay with measured durations, and error bar, of a step.
        next_run, next_step: error of the prediction of the next steps: of their median, and the largest of one step.
        held_s, sound_s: steps of both halves, medians.
        sound: error of the sound step that the slow half predicts.
        true_s, price_s: price of the slow rank, as difference of both halves and by the replay.
        others: largest price of a sound rank, of a step.
    """

    graph: float
    bar: float
    next_run: float
    next_step: float
    held_s: float
    sound_s: float
    sound: float
    true_s: float
    price_s: float
    others: float


def _figures(run: dict[str, Any]) -> _Figures:
    sound, slow = halves = run["halves"]
    fast, held = (statistics.median(half["measured_steps_s"]) for half in halves)
    held_out = run["held_out"]
    expected = held - (slow["step_s"] - slow["predicted_s"])
    return _Figures(
        max(abs(half["replayed_s"] / half["step_s"] - 1) for half in halves),
        max(half["error_s"] / half["step_s"] for half in halves),
        max(abs(half["typical_s"] / statistics.median(half["measured_steps_s"]) - 1) for half in held_out),
        max(abs(half["typical_s"] / measured - 1) for half in held_out for measured in half["measured_steps_s"]),
        held, fast, expected / fast - 1, held - fast, slow["by_rank"][str(run["slow"])],
        max(
            seconds / half["step_s"]
            for half in halves
            for rank, seconds in half["by_rank"].items()
            if half is sound or int(rank) != run["slow"]
        ),
    )  # fmt: skip


def _rows(runs: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the rows of the tables of self-replay and of predictions."""
    own, predicted = [], []
    for name, same in _of_jobs(runs).items():
        found = [_figures(each) for each in same]
        own.append(
            f"| {name} | {len(found)} | {max(each.graph for each in found):.2%} | {max(each.bar for each in found):.1%} "
            f"| {_typical([each.next_run for each in found], '.1%')} | {max(each.next_step for each in found):.1%} |"
        )
        added = next(job.added_s for job in JOBS if job.name == name)
        predicted.append(
            f"| {name} | {statistics.median(each.held_s for each in found):.3f} "
            f"| {statistics.median(each.sound_s for each in found):.3f} | {_typical([each.sound for each in found], '.1%')} "
            f"| {added:.3f} | {_range([each.true_s for each in found])} | {_range([each.price_s for each in found])} "
            f"| {_typical([each.price_s / each.true_s - 1 for each in found], '.1%')} "
            f"| {max(each.others for each in found):.1%} |"
        )
    return own, predicted


def _beyond(runs: list[dict[str, Any]]) -> str:
    """Return what is to say of prices that differ from the true price by more than a tenth."""
    added = {job.name: job.added_s for job in JOBS}
    found = [(_figures(run), added[run["name"]]) for run in runs]
    beyond = [
        (each.price_s / each.true_s - 1, each.price_s / more - 1)
        for each, more in found
        if abs(each.price_s / each.true_s - 1) > 0.1
    ]
    if not beyond:
        return f"All {len(found)} prices are within 10% of the true price."
    most = max(abs(share) for _, share in beyond)
    return (
        f"{len(found) - len(beyond)} of {len(found)} prices are within 10% of the true price. In the other {len(beyond)} the "
        f"halves do not differ by the added time; these prices are within {most:.1%} of it."
    )


def _compared(runs: list[dict[str, Any]]) -> list[str]:
    """Return the rows of the table of three ways to predict."""
    rows, totals = [], [[] for _ in range(6)]
    for name, same in _of_jobs([run for run in runs if "sums_s" in run]).items():
        each_run = [_three_ways(run) for run in same]
        errors = [statistics.median(column) for column in zip(*each_run, strict=True)]
        rows.append(f"| {name} | " + " | ".join(f"{error:.1%}" for error in errors) + " |")
        for total, error in zip(totals, errors, strict=True):
            total.append(error)
    return [*rows, "| **median** | " + " | ".join(f"{statistics.median(total):.1%}" for total in totals) + " |"]


def _three_ways(run: dict[str, Any]) -> list[float]:
    """Return the errors of one run: of the next steps and of the sound half, each by replay, sums and mean step."""
    _, slow = run["halves"]
    fast, held = (statistics.median(half["measured_steps_s"]) for half in run["halves"])
    later = [
        statistics.median(abs(half[name] / measured - 1) for half in run["held_out"] for measured in half["measured_steps_s"])
        for name in ("typical_s", "sums_s", "mean_s")
    ]
    replayed = held - (slow["step_s"] - slow["predicted_s"])
    return [*later, *(abs(found / fast - 1) for found in (replayed, run["sums_s"], slow["step_s"]))]


def page(runs: list[dict[str, Any]], scale: list[str], more: list[str]) -> str:
    """Return the page.

    Args:
        runs: results of ``run``.
        scale: lines of the table of ``benchmarks.replay_scale``.
        more: sections of other scripts.
    """
    own, predicted = _rows(runs)
    return "\n".join(
        [
            "# Replay",
            "",
            "Is what [`unickpt whatif`](../guides/whatif.md) says of a job what happens when it is run?",
            "",
            _beyond(runs),
            "",
            "Jobs are real DeepSpeed or Megatron code on gloo, on two cores beside other programs. Layers sleep for a fixed "
            "time, twice as long backward as forward. In the second half of the steps those of one rank sleep half as long "
            "again.",
            "",
            "Command: `python -m evidence.replay --keep results/replay.jsonl --page docs/evidence/replay.md`",
            "",
            "## Self-replay",
            "",
            "| column | meaning |",
            "|---|---|",
            "| graph | distance between the measured step and a replay with all measured durations, near 0 by design |",
            "| error bar | share of a step in which hosts go on later than the transfer that they wait for ends |",
            "| error of a run | of the typical durations of the first steps of a half, replayed, against the median of the "
            "steps after them (the worse half of each run; median and worst of all runs) |",
            "| worst step | the same against the step that is farthest |",
            "",
            "| job | runs | graph, at most | error bar, at most | error of a run: median, worst | worst step |",
            "|---|---|---|---|---|---|",
            *own,
            "",
            "## A slow rank",
            "",
            "The sound step is predicted from the slow half alone (`--rank-like-peers`). Steps are medians, errors the median "
            "and the worst of all runs.",
            "",
            "| column | meaning |",
            "|---|---|",
            "| added | time that the layers of the slow rank sleep longer in a step |",
            "| true price | difference of both halves, with all disturbances of the machine |",
            "| price | by replay |",
            "| sound ranks, at most | largest price of any sound rank, in both halves of all runs |",
            "",
            "| job | slow, s | sound, s | error of the predicted sound step | added, s | true price, s | price, s "
            "| error of the price | sound ranks, at most |",
            "|---|---|---|---|---|---|---|---|---|",
            *predicted,
            "",
            "## Three ways to predict",
            "",
            "Median errors of three predictions from the same records, as in dPRO's evaluation.",
            "",
            "| column | meaning |",
            "|---|---|",
            "| sums | the largest sum over the ranks of their own computation and of bytes by bandwidth (of all transfers of a "
            "kind of group), without a graph |",
            "| mean step | the mean of the known steps |",
            "| next steps, sound half | the steps of self-replay; the sound half, predicted from the slow one |",
            "",
            "| job | next steps: replay | sums | mean step | sound half: replay | sums | mean step |",
            "|---|---|---|---|---|---|---|",
            *_compared(runs),
            "",
            *MICROBATCHES.splitlines(),
            "",
            *more,
            "## Scale",
            "",
            "One step of simulated jobs (1F1B, 16 microbatches, tensor, pipeline and data parallelism) on one core: time to "
            "make the graph, order its nodes, and replay it. "
            "`python -m benchmarks.replay_scale > results/replay-scale.txt`",
            "",
            *(scale or ["Not measured."]),
            "",
            "## Not tested",
            "",
            "Links between real hosts, other layouts than those above, devices. With one rank for each role, prices cannot "
            "tell a slow rank from an uneven partition.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, required=True, help="file of results; the runs that are in it are not repeated")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--only", nargs="*", help="layouts to run")
    parser.add_argument("--rounds", type=int, default=10, help="runs of each job that the file shall hold")
    parser.add_argument("--page-only", action="store_true")
    args = parser.parse_args()
    kept = [json.loads(line) for line in args.keep.read_text().splitlines()] if args.keep.exists() else []
    rounds = 0 if args.page_only else args.rounds
    for job, at in ((job, at) for at in range(rounds) for job in JOBS):
        if sum(each["name"] == job.name for each in kept) > at or (args.only and job.layout not in args.only):
            continue
        found = run(job)
        kept.append(found)
        with args.keep.open("a") as file:
            file.write(json.dumps(found) + "\n")
    if args.page is not None:
        scale = SCALE.read_text().splitlines()[1:] if SCALE.exists() else []
        more: list[str] = []
        for path, section in ((PIPELINES, pipelines.section), (LINKS, links.section), (PUBLISHED, published.section)):
            if path.exists():
                more += section([json.loads(line) for line in path.read_text().splitlines()])
        args.page.write_text(page(kept, scale, more))


if __name__ == "__main__":
    main()
