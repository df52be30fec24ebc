"""Microbatches and chunks of Megatron's pipeline, predicted and run, for ``docs/evidence/replay.md``.

python -m evidence.replay.pipelines --keep results/replay-pipelines.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.forked_jobs import fork_ranks
from unickpt.planning.replay.price import Questions, WhatIf, analyse
from unickpt.planning.replay.sources import read_trace

STEPS, LAYERS_S = 7, [0.08] * 4
PLAIN, CHUNKED = "gpt-pp2dp2-dist", "gpt-pp2vpp2dp2-dist"


def run(layout: str, batch: int, questions: Questions) -> WhatIf:
    """Run a job with ``batch`` rows in a step, and analyse it. A microbatch is one row, and there are two replicas."""
    with tempfile.TemporaryDirectory() as folder:
        rings = Path(folder) / "rings"
        asked = {
            "kind": "megatron", "rings": str(rings), "steps": STEPS, "layers": LAYERS_S, "batch": batch, "layout": layout,
        }  # fmt: skip
        fork_ranks(4, "evidence.plan.planned_job", json.dumps(asked), env={"GLOO_SOCKET_IFNAME": "lo"})
        return analyse(read_trace([str(rings)]), None, questions)


def compared() -> Iterator[dict[str, Any]]:
    """Yield one result for each prediction."""
    four = run(PLAIN, 8, Questions(microbatches=(8,), chunks=(2,)))
    eight = run(PLAIN, 16, Questions(microbatches=(4,), chunks=(2,)))
    chunked = {4: run(CHUNKED, 8, Questions()), 8: run(CHUNKED, 16, Questions())}
    for known, count, other in ((four, 4, eight), (eight, 8, four)):
        microbatches, chunks = known.answers
        for answer, really in ((microbatches, other), (chunks, chunked[count])):
            measured_s, run_s = (statistics.median(each.measured_steps_s) for each in (known, really))
            yield {
                "measured_with": count, "change": answer.question, "measured_s": measured_s,
                "predicted_s": measured_s - answer.gain_s, "run_s": run_s,
            }  # fmt: skip


def section(kept: list[dict[str, Any]]) -> list[str]:
    """Return the section of the page."""
    lines = [
        "## Microbatches and chunks of Megatron's pipeline",
        "",
        f"Megatron's GPT with PP2 DP2 on 4 ranks; a layer sleeps {LAYERS_S[0] * 1e3:.0f} ms for each microbatch. "
        "`--microbatches` and `--chunks` are compared with jobs that have them.",
        "",
        "`python -m evidence.replay.pipelines --keep results/replay-pipelines.jsonl`",
        "",
        "| measured with | change | measured, s | predicted, s | run, s | error |",
        "|---|---|---|---|---|---|",
    ]
    for each in kept:
        lines.append(
            f"| {each['measured_with']} microbatches | {each['change']} | {each['measured_s']:.3f} | {each['predicted_s']:.3f} "
            f"| {each['run_s']:.3f} | {each['predicted_s'] / each['run_s'] - 1:+.1%} |"
        )
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", type=Path, required=True, help="file of results")
    args = parser.parse_args()
    args.keep.write_text("".join(json.dumps(each) + "\n" for each in compared()))


if __name__ == "__main__":
    main()
