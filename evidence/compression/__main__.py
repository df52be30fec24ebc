"""Evidence for gradient compression: losses with and without error feedback, restarts, and bytes, on real process groups.

python -m evidence.compression.automatic_links --keep results/compression-automatic.jsonl  # as root, 2 minutes
python -m evidence.compression --keep FILE [--links FILE] [--page FILE] [--picture FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from evidence.compression import automatic_links
from evidence.compression.job import Task
from evidence.compression.shaped_links import row
from unickpt.testing.launch import torchrun
from unickpt.training.compression.settings import NONE, Compression
from unickpt.training.compression.sizes import sent_bytes

LAST = 50  # steps whose mean loss is compared
STEPS, SAVED, RESUMED, UNDER_ZERO = 400, 100, 250, 150
SEEDS = 3
LIMIT_S = 1200.0
WHOLE, AGAIN, MEAN, DROPPED = "uninterrupted", "resumed on 4", "resumed on 2", "resumed on 2, residuals dropped"
RESTARTED = Compression("top-k", ratio=0.02, least_elements=256)
CASES = (
    Compression("top-k", ratio=0.05, least_elements=256),
    Compression("random-k", ratio=0.25, least_elements=256),
    Compression("sign", least_elements=256),
    Compression("powersgd", rank=1, least_elements=256),
    Compression("int8", least_elements=256),
    Compression("fp16", least_elements=256),
    Compression("bf16", least_elements=256),
)


PAGE = """\
# Gradient compression

What does compression of gradients cost in loss, and does a restart lose it ([guide](../guides/compression.md))?

{verdict}

Process groups of gloo on one machine with two cores, beside other programs; torch 2.13.0, DeepSpeed 0.19.8. A network of three
layers ({parameters:,} parameters) learns the outputs of a fixed one, by SGD with momentum. The ranks have different inputs.
Parameters below 256 elements travel as float32.

```
python -m evidence.compression.shaped_links --keep results/compression-links.jsonl     # as root, 4 minutes
python -m evidence.compression.automatic_links --keep results/compression-automatic.jsonl  # as root, 2 minutes
python -m evidence.compression --keep results/compression.jsonl --links results/compression-links.jsonl \\
    --automatic results/compression-automatic.jsonl \\
    --page docs/evidence/compression.md --picture docs/images/compression.png                   # 4 minutes
```

## Losses and bytes

`DistributedDataParallel` on 4 ranks, {steps} steps. A loss is the mean of the last {last} steps, on 512 fixed samples. Without
compression it is {plain[0]:.4f}, and {plain[1]:.4f} and {plain[2]:.4f} with other weights and data: the spread is
{noise:.4f}. Bytes are those that one rank passes to others in a step, as `unickpt.training.compression.sizes` promises them and
as counted. The last column is the share of the bytes without compression.

| scheme | loss | more | loss without error feedback | more | bytes promised | bytes counted | share |
|---|---|---|---|---|---|---|---|
{rows}

For fp16, bf16 and int8, error feedback makes no difference in this job.

## Restarts

top-k with 2%, 4 ranks, a checkpoint after step {saved}. Resumed on 4 ranks, bit-equal: {equal}. Resumed on 2 ranks, the sum of
what the ranks owe changes by {moved:.1e} of its largest value in a parameter. Losses after the restart:

| steps after the restart | uninterrupted, 4 ranks | 2 ranks, mean of the residuals | 2 ranks, residuals dropped |
|---|---|---|---|
{kink}

![Loss around a restart from 4 to 2 ranks](../images/compression.png)

## DeepSpeed

Two ranks, {under_zero} steps, signs. *Resumed*: losses and weights of a run that loaded the checkpoint of step {saved},
against the run that went on. The last column is the same checkpoint on 3 ranks.

| ZeRO stage | uncompressed | signs | uncompressed, fp16 weights | signs, fp16 weights | resumed | resumed on 3 ranks |
|---|---|---|---|---|---|---|
{zero}

After {under_zero} steps the loss still falls, and signs are behind by some steps. Under ZeRO-0 in fp16, DeepSpeed's
`FP16_UnfusedOptimizer` keeps its first loss scale in this job and does not train, with compression or without.

## Advisor

Two ranks in network namespaces, joined by a link that `tc` limits in both directions. Three layers of 1 MiB each sleep 30 ms
forward and 60 ms backward. Each gradient is a bucket, exchanged beside the backward pass. `advise` gets the records of the job
without compression and the measured time of the code. All {links_count} combinations of `none`, `int8` and `sign` are run:
medians of 5 steps in ms, buckets in the order of the backward pass.

| Mbit/s | uncompressed | advised | predicted | run | best of all | run | from the best | worst | decided in |
|---|---|---|---|---|---|---|---|---|---|
{links}

`tests/unit/training/compression/test_advisor.py`: on ten jobs the choice is within 5% of the best of all 64 combinations, by
replay.

## The job's own choice

`"compression": "auto"` on the same links, with ZeRO-2 and 5 MiB of gradients. Medians of 10 steps in ms, before and after the
choice. *Resumed*: another engine loads a checkpoint saved after the choice.

| Mbit/s | choice after 20 steps | step before | step after | resumed |
|---|---|---|---|---|
{automatic}

If the store fails on one rank after the choice, no rank compresses, and training goes on
(`tests/integration/compression/test_automatic.py`).

## Not tested

Devices, NCCL, models of useful size, Adam with compressed gradients. On gloo the communication hook itself does not run beside
the backward pass, and the advisor does not know that.
"""


def jobs(folder: str) -> list[tuple[int, list[Task]]]:
    """Return the jobs: the number of ranks, and the tasks that run one after the other in one process group."""
    nothing = Compression(NONE)
    one, two = f"{folder}/ddp", f"{folder}/deepspeed"
    plain = [Task(f"ddp none seed {seed}", nothing, STEPS, seed) for seed in range(SEEDS)]
    coded = [
        Task(f"ddp {case.scheme} {'with' if fed else 'without'}", replace(case, error_feedback=fed), STEPS)
        for case in CASES
        for fed in (True, False)
    ]
    restarts = Task(WHOLE, RESTARTED, RESUMED, save_at=SAVED, folder=one)
    again = Task(AGAIN, RESTARTED, RESUMED, load=True, folder=one)
    sign = Compression("sign", least_elements=256)
    zero = [
        task
        for stage in (0, 1, 2)
        for task in (
            Task(f"deepspeed {stage} none", nothing, UNDER_ZERO, stage=stage),
            Task(f"deepspeed {stage} none fp16 weights", nothing, UNDER_ZERO, stage=stage, dtype="fp16"),
            Task(f"deepspeed {stage} sign", sign, UNDER_ZERO, stage=stage, save_at=SAVED, folder=f"{two}{stage}"),
            Task(f"deepspeed {stage} sign resumed", sign, UNDER_ZERO, stage=stage, load=True, folder=f"{two}{stage}"),
            Task(f"deepspeed {stage} fp16 weights", sign, UNDER_ZERO, stage=stage, dtype="fp16"),
        )
    ]
    other = [
        replace(task, name=f"{task.name} on 3", load=True, folder=f"{two}{task.stage}", save_at=0)
        for task in zero
        if task.name.endswith("sign")
    ]
    return [
        (4, [restarts, again, *plain, *coded]),
        (2, [replace(again, name=MEAN), replace(again, name=DROPPED, drop=True)]),
        (2, zero),
        (3, other),
    ]


def run(keep: Path) -> None:
    """Run the jobs that are not in ``keep`` yet, and append their results."""
    with tempfile.TemporaryDirectory() as folder:
        for number, (world, tasks) in enumerate(jobs(folder)):
            given = Path(folder, f"{number}.json")
            given.write_text(json.dumps([asdict(task) for task in tasks]))
            torchrun(world, "evidence.compression.job", str(given), str(keep), timeout_s=LIMIT_S)


def _last(found: dict[str, Any]) -> float:
    losses: list[float] = found["losses"][-LAST:]
    return sum(losses) / len(losses)


def page(results: Sequence[dict[str, Any]], links: Sequence[dict[str, Any]], chosen: Sequence[dict[str, Any]]) -> str:
    """Return the page of evidence."""
    by_name = {each["name"]: each for each in results}
    plain = [_last(by_name[f"ddp none seed {seed}"]) for seed in range(SEEDS)]
    noise = max(plain) - min(plain)
    first = by_name["ddp none seed 0"]
    rows = []
    worst = max(_last(by_name[f"ddp {case.scheme} with"]) - plain[0] for case in CASES)
    for case in CASES:
        fed, bare = (by_name[f"ddp {case.scheme} {word}"] for word in ("with", "without"))
        shapes = [tuple(shape) for shape in fed["shapes"]]
        promised = sent_bytes(case, shapes, fed["world"])
        share = fed["sent_bytes"] / sent_bytes(Compression(NONE), shapes, fed["world"])
        what = {"top-k": f"top-k, {case.ratio:.0%}", "random-k": f"random-k, {case.ratio:.0%}", "powersgd": "powersgd, rank 1"}
        rows.append(
            f"| {what.get(case.scheme, case.scheme)} | {_last(fed):.4f} | {_last(fed) - plain[0]:+.4f} | {_last(bare):.4f} | "
            f"{_last(bare) - plain[0]:+.4f} | {promised:,} | {fed['sent_bytes']:,.0f} | {share:.1%} |"
        )
    whole, again, mean, dropped = (by_name[name] for name in (WHOLE, AGAIN, MEAN, DROPPED))
    equal = whole["losses"][SAVED:] == again["losses"] and whole["weights"] == again["weights"]
    before = whole["debt"]
    scale = max(abs(value) for value in before.values())
    moved = max(abs(mean["debt"][name] - before[name]) for name in before) / scale
    after = range(10, 60, 10)
    three_runs = [(whole["losses"][SAVED + at - 1], mean["losses"][at - 1], dropped["losses"][at - 1]) for at in after]
    kink = "\n".join(f"| {at} | {a:.4f} | {b:.4f} | {c:.4f} |" for at, (a, b, c) in zip(after, three_runs, strict=True))
    zero = []
    for stage in (0, 1, 2):
        none, sign, back, plain_half, half, three = (
            by_name[f"deepspeed {stage} {word}"]
            for word in ("none", "sign", "sign resumed", "none fp16 weights", "fp16 weights", "sign on 3")
        )
        same = sign["losses"][SAVED:] == back["losses"] and sign["weights"] == back["weights"]
        zero.append(
            f"| {stage} | {_last(none):.4f} | {_last(sign):.4f} | {_last(plain_half):.4f} | {_last(half):.4f} | "
            f"{'equal' if same else 'NOT equal'} | {_last(three):.4f} |"
        )
    return PAGE.format(
        parameters=sum(map(_numel, first["shapes"])), steps=STEPS, last=LAST, plain=plain, noise=noise, rows="\n".join(rows),
        saved=SAVED, under_zero=UNDER_ZERO, equal="yes" if equal else "NO", moved=moved, kink=kink, zero="\n".join(zero),
        links="\n".join(map(row, links)), links_count=len(links[0]["steps_s"]),
        automatic="\n".join(map(automatic_links.row, chosen)),
        verdict=f"With error feedback, every scheme {'stays' if worst < noise else 'does NOT stay'} within the spread of "
        f"seeds. A restart on the same ranks {'loses nothing' if equal else 'LOSES state'}.",
    )  # fmt: skip


def _numel(shape: Sequence[int]) -> int:
    found = 1
    for each in shape:
        found *= each
    return found


def draw(results: Sequence[dict[str, Any]], picture: Path) -> None:
    """Draw the losses around the restart on another number of ranks."""
    import matplotlib as mpl

    mpl.use("svg" if picture.suffix == ".svg" else "agg")
    import matplotlib.pyplot as plt

    by_name = {each["name"]: each for each in results}
    figure, axes = plt.subplots(figsize=(8, 3.6))
    begin = SAVED - 20
    axes.plot(range(begin, RESUMED), by_name[WHOLE]["losses"][begin:], color="black", label="uninterrupted, 4 ranks")
    axes.plot(range(SAVED, RESUMED), by_name[MEAN]["losses"], label="2 ranks, mean of the residuals")
    axes.plot(range(SAVED, RESUMED), by_name[DROPPED]["losses"], linestyle="--", label="2 ranks, residuals dropped")
    axes.axvline(SAVED, color="gray", linewidth=0.8)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, required=True, help="file of results; if it exists, nothing is run again")
    parser.add_argument("--links", type=Path, help="file of results of shaped_links, for the page")
    parser.add_argument("--automatic", type=Path, help="file of results of automatic_links, for the page")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    if not args.keep.exists():
        run(args.keep)
    results = [json.loads(line) for line in args.keep.read_text().splitlines()]
    if args.page is not None:
        links, chosen = ([json.loads(line) for line in path.read_text().splitlines()] for path in (args.links, args.automatic))
        args.page.write_text(page(results, links, chosen))
    if args.picture is not None:
        draw(results, args.picture)


if __name__ == "__main__":
    main()
