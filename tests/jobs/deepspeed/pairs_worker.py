"""Forked ranks: save every source layout, then load the sources into every target layout. See ``pairs.py``.

pairs_worker JOBS DIR BEFORE AFTER    JOBS is a key of ``JOBS``. DIR/pairs.json has the sources of each target. BEFORE and AFTER
                                      are numbers of steps. Writes DIR/<layout>/..., .truth, .json, DIR/results-*.json
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist

from tests.jobs.deepspeed import (
    auto_expert_jobs,
    averaged_jobs,
    expert_jobs,
    expert_pipeline_jobs,
    megatron_jobs,
    pipeline_jobs,
    tensor_expert_jobs,
    tensor_jobs,
)
from tests.jobs.deepspeed.jobs import in_a_group
from tests.jobs.deepspeed.pairs import AnyLayout
from tests.jobs.deepspeed.truth import Truth, differences
from tests.support import deepspeed_imports  # noqa: F401
from tests.support.turns import in_turn
from unickpt.testing.launch import leave

JOBS: dict[str, Any] = {
    "pipelines": pipeline_jobs, "experts": expert_jobs, "tensors": tensor_jobs, "megatron": megatron_jobs,
    "averaged": averaged_jobs, "piped experts": expert_pipeline_jobs, "auto experts": auto_expert_jobs,
    "tensor experts": tensor_expert_jobs,
}  # fmt: skip
Steps = tuple[int, int]  # before the save of a source, and after the save or a load


def save_all(jobs: Any, folder: Path, steps: Steps, layouts: list[AnyLayout]) -> None:
    for layout in layouts:
        engine = jobs.build(layout, seed=1)
        before = jobs.train(engine, steps[0])
        jobs.mark(engine)
        assert engine.save_checkpoint(str(folder / layout.name), client_state={"note": layout.name}) is True
        assert engine.checkpoint_engine.last_save is not None, "DeepSpeed has saved by itself"
        truth = jobs.truth_of(engine)
        after = jobs.train(engine, steps[1])
        if dist.get_rank() == 0:
            torch.save(truth, folder / f"{layout.name}.truth")
            (folder / f"{layout.name}.json").write_text(json.dumps(before + after))


def load_all(jobs: Any, folder: Path, steps: Steps, targets: list[tuple[AnyLayout, list[AnyLayout]]]) -> None:
    for seed, (layout, sources) in enumerate(targets, start=20):
        engine = jobs.build(layout, seed=seed)
        results: list[dict[str, Any]] = []
        for source in sources:
            jobs.scramble(engine)
            where, client = engine.load_checkpoint(str(folder / source.name))
            truth = torch.load(folder / f"{source.name}.truth", weights_only=False)
            expected, found = comparable(*jobs.common(truth, jobs.truth_of(engine)), source, layout)
            problems = differences(expected, found)
            if where is None or client["note"] != source.name:
                problems.append(f"returned {where}, {client}")
            report = engine.checkpoint_engine.last_report
            losses = jobs.train(engine, steps[1])
            tensors = sum(isinstance(value, torch.Tensor) for value in expected.values())
            results.append({
                "source": source.name, "problems": problems, "tensors": tensors, "losses": losses, "report": report.count(),
            })  # fmt: skip
        if dist.get_rank() == 0:
            (folder / f"results-{layout.name}.json").write_text(json.dumps(results))


def comparable(expected: Truth, found: Truth, source: AnyLayout, target: AnyLayout) -> tuple[Truth, Truth]:
    """Return states that should be equal. Weights in another precision than the source's are the cast of its masters."""
    low, high = (layout.precision != "fp32" for layout in (source, target))
    if low != high:
        dtype = torch.bfloat16 if high else torch.float32
        for key in [k for k in expected if k.startswith("weight/")]:
            expected[key] = expected.get(key.replace("weight/", "master/"), expected[key]).to(dtype)
    for key in [k for k in expected if k.startswith("buffer/")]:
        expected[key] = expected[key].to(found[key].dtype)
    return expected, found


def main() -> None:
    jobs, folder, steps = JOBS[sys.argv[1]], Path(sys.argv[2]), (int(sys.argv[3]), int(sys.argv[4]))
    chosen = [
        (jobs.LAYOUT(**t), [jobs.LAYOUT(**s) for s in found]) for t, found in json.loads((folder / "pairs.json").read_text())
    ]
    layouts = list({s.name: s for _, sources in chosen for s in sources}.values())
    each = [
        (world, partial(save_all, jobs, folder, steps, [s for s in layouts if s.world == world]))
        for world in sorted({layout.world for layout in layouts})
    ]
    each += [
        (world, partial(load_all, jobs, folder, steps, [pair for pair in chosen if pair[0].world == world]))
        for world in sorted({layout.world for layout, _ in chosen})
    ]
    in_turn((world, partial(in_a_group, job)) for world, job in each)
    leave()


if __name__ == "__main__":
    main()
