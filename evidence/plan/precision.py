"""Plans of precision against what was run: a section of ``docs/evidence/plan.md``.

python -m evidence.plan.precision --keep results/plan-precision.jsonl

Each job has slow ranks. It runs without a plan, with the plan that its records and its checkpoint give, and with all layers of
the slow ranks in bf16. Layers sleep for known times.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from tests.jobs.plan.precision import planned, ran

LAYERS_S = [0.03, 0.01, 0.04, 0.02, 0.02, 0.03, 0.01, 0.02]
JOBS: tuple[dict[str, Any], ...] = (
    {"name": "DeepSpeed ZeRO-1, 4 ranks", "kind": "deepspeed", "world": 4, "stage": 1, "layers": LAYERS_S, "slow": [2, 3]},
    {"name": "DeepSpeed ZeRO-3, 4 ranks", "kind": "deepspeed", "world": 4, "stage": 3, "layers": LAYERS_S, "slow": [1]},
    {
        "name": "Megatron DP4, 4 ranks", "kind": "megatron", "world": 4, "layout": "gpt-dp4-fp32",
        "layers": [0.08, 0.04, 0.06, 0.02], "slow": [3],
    },
    {
        "name": "Megatron PP2 DP2, 4 ranks", "kind": "megatron", "world": 4, "layout": "gpt-pp2dp2-fp32",
        "layers": [0.08, 0.04, 0.06, 0.05], "slow": [2, 3],
    },
)  # fmt: skip


def measured(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run a job three times, and return what was predicted and what came."""
    saved = folder / "saved"
    before = ran(job, folder, "before", save=str(saved))
    plan, every = folder / "plan.json", folder / "all.json"
    found = planned(job, folder, plan, "--checkpoint", str(saved))
    names = [each["name"] for group in found["groups"] for each in group["layers"]]
    every.write_text(json.dumps(found | {"dtypes": dict.fromkeys(names, "bf16")}))
    with_plan = ran(job, folder, "with", plan=str(plan), load=str(saved))
    lowest = ran(job, folder, "all", plan=str(every), load=str(saved))
    return {
        "name": job["name"], "slow": job["slow"], "indicator": found["indicator"],
        "low": [f"{layer['name']}" for group in found["groups"] for layer in group["layers"] if layer["low"]],
        "layers": len(names), "before_s": before["step_s"], "predicted_s": found["step_s"], "run_s": with_plan["step_s"],
        "lowest_predicted_s": found["lowest_s"], "lowest_s": lowest["step_s"], "unhindered_s": found["unhindered_s"],
        "losses": [before["losses"][-1], with_plan["losses"][0], lowest["losses"][0]],
    }  # fmt: skip


def section(kept: list[dict[str, Any]]) -> list[str]:
    """Return the section of the page."""
    lines = [
        "## Precision",
        "",
        "Jobs in float32 whose slow ranks take 1.6 times as long for each layer, and half of that in bf16. The plan comes from "
        "the records and the checkpoint of a run without one; the next run resumes with it. *All in bf16*: all layers of the "
        "slow ranks in bf16. The plan is to be as fast, with the other layers in float32.",
        "",
        "`python -m evidence.plan.precision --keep results/plan-precision.jsonl`",
        "",
        "| job | slow ranks | in bf16 | without, s | predicted, s | run, s | error | all in bf16: predicted, s | run, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in kept:
        lines.append(
            f"| {each['name']} | {', '.join(map(str, each['slow']))} | {len(each['low'])} of {each['layers']} "
            f"| {each['before_s']:.3f} | {each['predicted_s']:.3f} | {each['run_s']:.3f} "
            f"| {each['predicted_s'] / each['run_s'] - 1:+.1%} | {each['lowest_predicted_s']:.3f} | {each['lowest_s']:.3f} |"
        )
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", type=Path, required=True, help="file of results; a job that is in it is not run again")
    parser.add_argument("--only", nargs="*", help="names of jobs")
    args = parser.parse_args()
    done = {json.loads(line)["name"] for line in args.keep.read_text().splitlines()} if args.keep.exists() else set()
    for job in JOBS:
        if job["name"] not in done and (not args.only or job["name"] in args.only):
            with tempfile.TemporaryDirectory() as folder:
                found = measured(job, Path(folder))
            with args.keep.open("a") as file:
                file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
