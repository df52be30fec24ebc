"""Replay of real jobs against what was run: the tables of ``docs/evidence/replay.md``.

python -m tests.integration.replay.evidence --keep results/replay.jsonl --page docs/evidence/replay.md [--only zero1 ...]
                                            [--page-only]

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

from tests.integration.replay import links, pipelines, published
from tests.integration.replay.baselines import sums_s
from unickpt.replay.price import Questions, WhatIf, analyse
from unickpt.replay.sources import read_trace
from unickpt.replay.trace import Trace
from unickpt.testing.launch import fork_ranks

STEPS, EXTRA = 16, 0.5
RESULTS = Path("results")
SCALE, PUBLISHED = RESULTS / "replay-scale.txt", RESULTS / "replay-published.jsonl"
LINKS, PIPELINES = RESULTS / "replay-links.jsonl", RESULTS / "replay-pipelines.jsonl"
# Two jobs run by hand, with the commands in the text.
MICROBATCHES = """\
## Another number of microbatches

A DeepSpeed pipeline of 2 stages with ZeRO-1 on 4 ranks ran with 4 and with 8 microbatches. Each run predicts the other \
one (`--microbatches`). No rank is slow. One run each:

| measured with | measured, s | predicted for | predicted, s | run, s | error |
|---|---|---|---|---|---|
| 4 microbatches | 1.853 | 8 | 3.328 | 3.328 | +0.0% |
| 8 microbatches | 3.328 | 4 | 1.852 | 1.853 | -0.1% |

`torchrun --nproc-per-node 4 -m tests.integration.replay.timed_job deepspeed pipeline4 RINGS 12 0.03 -1 0`, the same \
with `pipeline8`, then `unickpt whatif RINGS --steps 5:14 --microbatches 8`. Layers sleep, so a microbatch costs the \
same in both runs. Real layers vary more.
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
            job.world, "tests.integration.replay.timed_job", job.kind, job.layout, str(rings), str(STEPS),
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


def _rows(runs: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the rows of the tables of self-replay and of predictions."""
    own, predicted = [], []
    for each in runs:
        sound, slow = each["halves"]
        errors = [
            abs(half["typical_s"] / measured - 1) for half in each["held_out"] for measured in half["measured_steps_s"]
        ]  # fmt: skip
        graph = max(abs(half["replayed_s"] / half["step_s"] - 1) for half in each["halves"])
        bars = [half["error_s"] / half["step_s"] for half in each["halves"]]
        own.append(
            f"| {_name(each)} | {graph:.2%} | {max(bars):.1%} | {len(errors)} | {statistics.median(errors):.1%} "
            f"| {max(errors):.1%} |"
        )
        fast, held = (statistics.median(half["measured_steps_s"]) for half in each["halves"])
        true, price = held - fast, slow["by_rank"][str(each["slow"])]
        expected = held - (slow["step_s"] - slow["predicted_s"])
        added = next(job.added_s for job in JOBS if job.name == each["name"])
        others = [
            seconds / half["step_s"]
            for half in each["halves"]
            for rank, seconds in half["by_rank"].items()
            if half is sound or int(rank) != each["slow"]
        ]
        predicted.append(
            f"| {_name(each)} | {held:.3f} | {fast:.3f} | {expected:.3f} ({expected / fast - 1:+.1%}) | {added:.3f} "
            f"| {true:.3f} | {price:.3f} ({price / true - 1:+.1%}) | {max(others):.1%} |"
        )
    return own, predicted


def _name(found: dict[str, Any]) -> str:
    """Return the name of a run, with a mark if it ran beside other programs."""
    return f"{found['name']}{' *' if found.get('beside') else ''}"


def _compared(runs: list[dict[str, Any]]) -> list[str]:
    """Return the rows of the table of three ways to predict."""
    rows, totals = [], [[] for _ in range(6)]
    for each in (run for run in runs if "sums_s" in run):
        _, slow = each["halves"]
        fast, held = (statistics.median(half["measured_steps_s"]) for half in each["halves"])
        later = [
            statistics.median(
                abs(half[name] / measured - 1) for half in each["held_out"] for measured in half["measured_steps_s"]
            )
            for name in ("typical_s", "sums_s", "mean_s")
        ]
        replayed = held - (slow["step_s"] - slow["predicted_s"])
        other = [abs(found / fast - 1) for found in (replayed, each["sums_s"], slow["step_s"])]
        rows.append(f"| {_name(each)} | " + " | ".join(f"{error:.1%}" for error in (*later, *other)) + " |")
        for total, error in zip(totals, (*later, *other), strict=True):
            total.append(error)
    return [*rows, "| **median** | " + " | ".join(f"{statistics.median(total):.1%}" for total in totals) + " |"]


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
            "What [`unickpt whatif`](../guides/whatif.md) says of real jobs, against what was run. Every job runs on gloo with "
            "real DeepSpeed or Megatron code. Its layers sleep for a fixed time, twice as long backward as forward, so compute "
            "times are known and repeatable. In the second half of the steps the layers of one rank sleep half as long again.",
            "",
            "The machine has two cores for all ranks. Jobs marked * and those of the later tables ran beside other programs, "
            "which held up single steps, and the others alone. Delays are part of all measured times: the same rank is not "
            "equally fast in both halves.",
            "",
            "Command: `python -m tests.integration.replay.evidence --keep results/replay.jsonl --page docs/evidence/replay.md`",
            "",
            "## Self-replay",
            "",
            "The *graph* column is the distance between the measured step and a replay with all measured durations. It shows "
            "that the graph holds every dependency, and is near 0 by design. The *error bar* is the share of a step in which "
            "hosts go on later than the transfer that they wait for is over. The last columns are a prediction: the typical "
            "durations of the first steps of a half are replayed, and compared with each of the steps after them.",
            "",
            "| job | graph | error bar | steps predicted | error, median | error, worst step |",
            "|---|---|---|---|---|---|",
            *own,
            "",
            "## A slow rank",
            "",
            "The sound step is predicted from the slow half alone (`--rank-like-peers`) and compared with the sound half. "
            "Steps of both halves are medians. *Added* is the time that the "
            "layers of the slow rank sleep longer in a step. The true price is the difference of both halves, with all "
            "disturbances of the machine. The last column is the largest price of any sound rank, in both halves. Each row is "
            "one run. The two last jobs ran beside a test suite that took both cores: their steps vary by half.",
            "",
            "| job | slow, s | sound, s | predicted, s | added, s | true price, s | price, s | sound ranks, at most |",
            "|---|---|---|---|---|---|---|---|",
            *predicted,
            "",
            "## Three ways to predict",
            "",
            "As in dPRO's evaluation, errors of three predictions from the same records, as medians. *Sums* is the largest "
            "sum, over the ranks, of their own computation and of bytes by bandwidth (that of all transfers of a kind of "
            "group), without a graph. *Mean step* is the mean of the known steps. *Next steps* are those of the table of "
            "self-replay. *Sound half* is predicted from the slow half, with the slow rank like its peers; the mean step "
            "cannot know of that.",
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
            "One step of simulated jobs (1F1B, 16 microbatches, tensor, pipeline and data parallelism), on one core: the "
            "time to make the graph, to order its nodes, and to replay it. "
            "`python -m benchmarks.replay_scale > results/replay-scale.txt`",
            "",
            *(scale or ["Not measured."]),
            "",
            "## Not shown",
            "",
            "Links between real hosts, other layouts than those above, devices. Prices of a job with "
            "one rank for each role cannot tell a slow rank from an uneven partition.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, required=True, help="file of results; a job that is in it is not run again")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--only", nargs="*", help="layouts to run")
    parser.add_argument("--page-only", action="store_true")
    args = parser.parse_args()
    kept = [json.loads(line) for line in args.keep.read_text().splitlines()] if args.keep.exists() else []
    done = {each["name"] for each in kept}
    for job in JOBS:
        if args.page_only or job.name in done or (args.only and job.layout not in args.only):
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
