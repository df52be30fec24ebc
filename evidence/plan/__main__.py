"""Plans of real jobs against what was run: the page ``docs/evidence/plan.md``.

python -m evidence.plan --keep results/plan.jsonl --page docs/evidence/plan.md [--only PART ...]
                                          [--page-only]

Part ``deepspeed`` runs a pipeline of eight unlike layers in every cut into two stages, and in some cuts into four. Part
``megatron`` runs every layout of four ranks that ``unickpt plan parallel`` may choose from. Part ``scripts`` needs
``MEGATRON_LM``: ``pretrain_gpt.py`` trains, and resumes with the arguments of both plans. Layers of the first two parts sleep,
so that other programs on the machine disturb them little.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from evidence.plan import precision
from tests.support.cli import json_of
from tests.support.forked_jobs import fork_ranks
from tests.support.result_lines import results_in
from unickpt.diagnosis.recording.layer_times import LayerTimes, TimedLayer
from unickpt.planning.plan.parallel import PlannedLayout
from unickpt.planning.plan.partition import StageCut
from unickpt.planning.plan.records import recorded
from unickpt.planning.plan.sources import read_layers
from unickpt.planning.replay.price import analyse
from unickpt.planning.replay.programs import PipelineSchedule
from unickpt.planning.replay.sources import read_trace
from unickpt.testing.launch import torchrun

LAYERS_S = [0.01, 0.01, 0.01, 0.01, 0.02, 0.03, 0.02, 0.04]
MICROBATCHES, STEPS, CALLS = 8, 6, 200
CUTS = [[0, at, 8] for at in range(1, 8)] + [[0, 2, 4, 6, 8], [0, 4, 6, 7, 8], [0, 3, 5, 7, 8], [0, 4, 5, 7, 8]]
BATCH, MEGATRON_S = 8, [0.08] * 4
PRECISION = Path("results/plan-precision.jsonl")  # of ``evidence.plan.precision``
EARLIER = "megatron, 20 ms"  # part of the results: the same with shorter layers, and one measured job


def job(folder: Path, name: str, world: int, **asked: Any) -> dict[str, Any]:
    """Run a job. Return its step, the median of those measured, and what it printed."""
    rings = folder / name
    asked = {"rings": str(rings), "steps": STEPS, **asked}
    done = fork_ranks(world, "evidence.plan.planned_job", json.dumps(asked), env={"GLOO_SOCKET_IFNAME": "lo"})
    found = analyse(read_trace([str(rings)]))
    said = {name: value for name in ("LOSSES", "RESUMED") for value in results_in(done.stdout, name)}
    return {"step_s": statistics.median(found.measured_steps_s), "steps_s": found.measured_steps_s, **said}


def deepspeed(folder: Path) -> Iterator[dict[str, Any]]:
    """Run the cuts. The first job measures; the best plan resumes from its checkpoint."""
    from unickpt.cli.plan_pipeline import predicted_s
    from unickpt.planning.plan.partition import Device

    base = {"kind": "deepspeed", "layers": LAYERS_S, "microbatches": MICROBATCHES}
    save = str(folder / "checkpoint")
    first = job(folder, "measured", 2, **base, stages=2, every=1, save=save)
    rings = folder / "measured"
    files = read_layers([rings])
    known = recorded(read_trace([str(rings)]), files.ranks)
    plans = {
        stages: json_of("plan", "pipeline", str(rings), "--stages", str(stages), "--microbatches", str(MICROBATCHES))
        for stages in (2, 4)
    }
    yield {"part": "deepspeed", "what": "measured", **first}
    for parts in CUTS:
        stages = len(parts) - 1
        cut = StageCut(tuple(parts), tuple(range(stages)), (), 0.0)
        expected = predicted_s(cut, files.layers, [Device()] * stages, MICROBATCHES, known, PipelineSchedule.DEEPSPEED)
        chosen = plans[stages]["parts"] == parts
        found = job(folder, f"cut-{'-'.join(map(str, parts))}", stages, **base, parts=parts, save=save if chosen else "")
        yield {"part": "deepspeed", "what": "cut", "parts": parts, "predicted_s": expected, "chosen": chosen, **found}


def megatron(folder: Path) -> Iterator[dict[str, Any]]:
    """Run every layout of four ranks with microbatches of one or two rows. Two of them are measured before."""
    base = {"kind": "megatron", "layers": MEGATRON_S, "batch": BATCH}
    plan: list[dict[str, Any]] = []
    for layout in ("gpt-pp2dp2-dist", "gpt-tp2pp2-dist"):
        first = job(folder, layout, 4, **base, layout=layout, every=1)
        yield {"part": "megatron", "what": "measured", "layout": layout, **first}
        plan = json_of(  # from the records of the last job, and the layers of both, by the store
            "plan", "parallel", str(folder / layout), "--devices", "4", "--global-batch", str(BATCH), "--most-micro-batch", "2",
            "--most-chunks", "2", "--per-host", "4", "--show", "1000", "--store", str(folder / "store"),
        )["layouts"]  # fmt: skip
    for at, each in enumerate(plan):
        chosen = PlannedLayout(*(each[name] for name in PlannedLayout.__slots__))
        if len(MEGATRON_S) % (chosen.pipeline * chosen.chunks):
            continue  # the small model of the tests has no such layout
        name = f"gpt-tp{chosen.tensor}pp{chosen.pipeline}vpp{chosen.chunks}dp{chosen.data}-dist"
        arguments = each["megatron_arguments"]
        given = dict(itertools.pairwise(arguments)).get("--pipeline-model-parallel-layout")
        found = job(folder, str(at), 4, **base, layout=name, rows=chosen.rows, pipeline=given)
        yield {"part": "megatron", "what": "layout", "layout": str(chosen), "predicted_s": each["step_s"], **found}


def scripts(folder: Path) -> Iterator[dict[str, Any]]:
    """Train with ``pretrain_gpt.py``, then resume with the arguments of each plan."""
    rings, out = folder / "rings", folder / "out"
    common = f"--ckpt-format unickpt --save {out} --load {out} --save-interval 2"
    timing = f"--unickpt-timing --unickpt-timing-no-watch --unickpt-timing-folder {rings} --unickpt-timing-layers-every 1"

    def run(until: int, *arguments: str) -> list[str]:
        # Megatron's scheduler needs the same end in every run
        end = ("--train-iters", "8", "--exit-interval", str(until))
        done = torchrun(
            2, "tests.jobs.megatron.pretrain", *common.split(), *end, *arguments,
            env={"MEGATRON_LM": os.environ["MEGATRON_LM"]},
        )  # fmt: skip
        return re.findall(r"iteration +(\d+)/.*lm loss: (\S+)", done.stdout + done.stderr)

    lines = run(4, "--pipeline-model-parallel-size", "2", *timing.split())
    yield {"part": "scripts", "what": "pretrain_gpt.py, PP2", "arguments": [], "iterations": lines}
    pipeline = json_of("plan", "pipeline", str(rings), "--stages", "2", "--microbatches", "8")
    arguments = pipeline["megatron_arguments"]
    yield {"part": "scripts", "what": "`plan pipeline`", "arguments": arguments, "iterations": run(6, *arguments)}
    best = json_of(
        "plan", "parallel", str(rings), "--devices", "2", "--global-batch", "8", "--per-host", "2",
        "--store", str(folder / "store"),
    )["layouts"][0]  # fmt: skip
    arguments = best["megatron_arguments"]
    yield {"part": "scripts", "what": "`plan parallel`", "arguments": arguments, "iterations": run(8, *arguments)}


def deepspeed_json(folder: Path) -> Iterator[dict[str, Any]]:
    """Train a pipeline, then resume with the JSON of the best parallel layout."""
    base = {"kind": "deepspeed", "layers": LAYERS_S, "microbatches": MICROBATCHES, "save": str(folder / "checkpoint")}
    first = job(folder, "measured", 2, **base, stages=2, every=1)
    yield {"part": "json", "what": "measured", **first}
    found = json_of(
        "plan", "parallel", str(folder / "measured"), "--devices", "2", "--global-batch", str(MICROBATCHES), "--tensor", "1",
        "--most-chunks", "1", "--most-micro-batch", "4", "--show", "1000", "--store", str(folder / "store"),
    )["layouts"]  # fmt: skip
    best = {each["pipeline"]: each for each in reversed(found)}  # the best layout with each number of stages
    for stages, each in sorted(best.items()):
        run = job(
            folder, f"stages-{stages}", 2, **base, parts=each["parts"], rows=each["rows"], config=each["deepspeed_json"]
        )  # fmt: skip
        yield {
            "part": "json", "what": "json", "stages": stages, "parts": each["parts"], "config": each["deepspeed_json"],
            "predicted_s": each["step_s"], **run,
        }  # fmt: skip


def cost(folder: Path) -> Iterator[dict[str, Any]]:
    """Measure what the hooks of a sampled step cost: small layers, so that the hooks are most of the time."""
    layers = [torch.nn.Linear(8, 8) for _ in range(8)]
    times = LayerTimes(folder / "00000.layers.json", 1, {"rank": 0, "world": 1, "host": "here"})
    times.add(layers, lambda: [TimedLayer(at, str(at), "layer", layer, 8) for at, layer in enumerate(layers)])

    def step_us() -> float:
        begin = time.perf_counter()
        for _ in range(CALLS):
            x = torch.ones(4, 8, requires_grad=True)
            for layer in layers:
                x = layer(x)
            x.sum().backward()
        return (time.perf_counter() - begin) * 1e6 / CALLS / len(layers)

    step_us()
    bare = [step_us() for _ in range(5)]
    times.stepped()
    times.stepped()
    step_us()  # its first calls count what the layers save
    sampled = []
    for _ in range(5):
        times.stepped()
        sampled.append(step_us())
    times.stop()
    yield {"part": "cost", "what": "cost", "bare_us": statistics.median(bare), "sampled_us": statistics.median(sampled)}


PARTS = {"deepspeed": deepspeed, "megatron": megatron, "scripts": scripts, "json": deepspeed_json, "cost": cost}


def _row(name: str, each: dict[str, Any], best_s: float) -> str:
    error = each["predicted_s"] / each["step_s"] - 1
    return f"| {name} | {each['predicted_s']:.3f} | {each['step_s']:.3f} | {error:+.1%} | {each['step_s'] / best_s - 1:+.1%} |"


def _table(rows: list[tuple[str, dict[str, Any]]], first: str) -> list[str]:
    best_s = min(each["step_s"] for _, each in rows)
    ordered = sorted(rows, key=lambda row: row[1]["predicted_s"])
    head = [f"| {first} | predicted, s | run, s | error | slower than the best that was run |", "|---|---|---|---|---|"]
    return [*head, *(_row(name, each, best_s) for name, each in ordered), ""]


def _errors(rows: list[tuple[str, dict[str, Any]]]) -> str:
    errors = sorted(abs(each["predicted_s"] / each["step_s"] - 1) for _, each in rows)
    within = sum(error <= 0.1 for error in errors)
    middle = statistics.median(errors)
    return f"Error of the prediction: {middle:.1%} (median), {errors[-1]:.1%} (worst); {within} of {len(errors)} within 10%."


_NOT_SHOWN = {
    "megatron": "No parallel layout was run against its prediction.",
    "scripts": "Megatron's scripts were not started with the arguments of a plan.",
}


def _summary(kept: list[dict[str, Any]]) -> str:
    """Return in one sentence how many predictions of steps are close."""
    runs = [each for each in kept if each["what"] in ("cut", "layout") and each["part"] != EARLIER]
    within = sum(abs(each["predicted_s"] / each["step_s"] - 1) <= 0.1 for each in runs)
    return f"{within} of {len(runs)} predicted steps of cuts and layouts are within 10% of the step that was run."


def page(kept: list[dict[str, Any]]) -> str:
    """Return the page."""
    cuts = [each for each in kept if each["what"] == "cut"]
    lines = [
        "# Plan",
        "",
        "Do the plans of [`unickpt plan`](../guides/plan.md) start, and run as predicted?",
        "",
        f"All that were run start. {_summary(kept)}",
        "",
        "Jobs are real DeepSpeed and Megatron code on gloo, on two cores beside other programs. Layers sleep for fixed times, "
        "twice as long backward as forward. Steps are medians of five.",
        "",
        "Command: `python -m evidence.plan --keep results/plan.jsonl --page docs/evidence/plan.md`, with "
        "`MEGATRON_LM=/path/to/Megatron-LM` for the last part.",
        "",
        "## Pipeline stages",
        "",
        "A DeepSpeed pipeline of eight unlike layers and 8 microbatches, measured in a job of two even stages. All cuts into "
        "two stages were run, and some into four.",
        "",
    ]
    for stages in (2, 4):
        rows = [
            (", ".join(map(str, each["parts"])) + (" (plan)" if each["chosen"] else ""), each)
            for each in cuts
            if len(each["parts"]) == stages + 1
        ]
        if rows:
            lines += [*_table(rows, f"parts, {stages} stages"), _errors(rows), ""]
    resumed = [each for each in cuts if "RESUMED" in each]
    if resumed:
        steps = " and ".join(f"step {each['RESUMED']}" for each in resumed)
        lines += [f"The planned cuts resumed from the checkpoint of the even stages, at {steps}.", ""]
    layouts = [(each["layout"], each) for each in kept if each["part"] == "megatron" and each["what"] == "layout"]
    if layouts:
        lines += [
            "## Parallel layouts",
            "",
            f"Megatron's GPT with {len(MEGATRON_S)} layers on 4 ranks, {BATCH} rows in a step. Measured: the layers of PP2 DP2 "
            "and TP2 PP2, and the transfers of the second. A layer sleeps "
            f"{MEGATRON_S[0] * 1e3:.0f} ms for each row, divided by the tensor parallel size. Every layout with "
            "microbatches of one or two rows was run. The first row is the plan. The predictions are from later jobs than the "
            "runs.",
            "",
            *_table(layouts, "layout"),
            _errors(layouts),
            "",
            "All layouts beyond 10% have tensor parallelism, whose ranks exchange at the same moment and here share two cores.",
            "",
        ]
    earlier = [(each["layout"], each) for each in kept if each["part"] == EARLIER and each["what"] == "layout"]
    if earlier:
        lines += [
            "With layers of 20 ms and only PP2 DP2 measured, the transfers of a tensor parallel group are unknown. "
            f"{_errors(earlier)} The plan is the best layout there, too.",
            "",
        ]
    for each in kept:
        if each["what"] == "cost":
            more = each["sampled_us"] - each["bare_us"]
            lines += [
                "## Cost of measured layers",
                "",
                f"In a sampled step, hooks take {more:.0f} µs for each layer and microbatch, forward and backward together "
                f"(a layer of 8 x 8 without hooks: {each['bare_us']:.0f} µs). Other steps have no hooks.",
                "",
            ]
    runs = [each for each in kept if each["part"] == "scripts"]
    if runs:
        lines += [
            "## Arguments that start",
            "",
            "`pretrain_gpt.py` on 2 ranks. Each run resumes from the run before, with the arguments of the plan.",
            "",
            "| run | arguments | iterations | loss, first and last |",
            "|---|---|---|---|",
        ]
        for each in runs:
            (first, loss), (last, lost) = each["iterations"][0], each["iterations"][-1]
            given = f"`{' '.join(each['arguments'])}`" if each["arguments"] else ""
            lines.append(
                f"| {each['what']} | {given.replace('|', '&#124;')} | {first} to {last} | {float(loss):.4f}, "
                f"{float(lost):.4f} |"
            )
        lines.append("")
    written = [each for each in kept if each["what"] == "json"]
    if written:
        lines += [
            "A DeepSpeed pipeline of two stages on 2 ranks saved at step 6. Each job resumes with the JSON and the parts of "
            "the best layout with this number of stages. A new job begins at a loss of 9.7e-03.",
            "",
            "| JSON | parts | resumed at step | loss, first and last | predicted, s | run, s |",
            "|---|---|---|---|---|---|",
        ]
        for each in written:
            losses, step = json.loads(each["LOSSES"]), each.get("RESUMED", "not printed")
            lines.append(
                f"| `{json.dumps(each['config'])}` | {each['parts']} | {step} | {losses[0]:.2e}, {losses[-1]:.2e} "
                f"| {each['predicted_s']:.3f} | {each['step_s']:.3f} |"
            )
        lines.append("")
    missing = [text for part, text in _NOT_SHOWN.items() if not any(each["part"] == part for each in kept)]
    if PRECISION.exists():
        lines += precision.section([json.loads(line) for line in PRECISION.read_text().splitlines()])
    lines += ["## Not tested", "", *missing, "Unlike devices, orders of real hosts, devices other than processors.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, required=True, help="file of results; a part that is in it is not run again")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--only", nargs="*", default=list(PARTS))
    parser.add_argument("--page-only", action="store_true")
    args = parser.parse_args()
    kept = [json.loads(line) for line in args.keep.read_text().splitlines()] if args.keep.exists() else []
    for part in () if args.page_only else args.only:
        if any(each["part"] == part for each in kept):
            continue
        with tempfile.TemporaryDirectory() as folder:
            for found in PARTS[part](Path(folder)):
                kept.append(found)
                with args.keep.open("a") as file:
                    file.write(json.dumps(found) + "\n")
    if args.page is not None:
        args.page.write_text(page(kept))


if __name__ == "__main__":
    main()
