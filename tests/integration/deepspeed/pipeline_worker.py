"""Forked ranks: save every pipeline layout, then load sources into every layout. See ``test_pipeline_matrix.py``.

pipeline_worker DIR    DIR/pairs.json has the sources of each target. Writes DIR/<layout>/..., .truth, .json, DIR/results-*.json
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist

from tests.integration.deepspeed.jobs import in_a_group
from tests.integration.deepspeed.pipeline_jobs import build, mark, scramble, train, truth_of
from tests.integration.deepspeed.pipeline_names import PipelineLayout
from tests.integration.deepspeed.truth import Truth, differences
from tests.support import lazy_imports  # noqa: F401
from tests.support.turns import in_turn
from unickpt.testing.launch import leave

STEPS_BEFORE, STEPS_AFTER = 3, 2


def save_all(folder: Path, layouts: list[PipelineLayout]) -> None:
    for layout in layouts:
        engine = build(layout, seed=1)
        before = train(engine, STEPS_BEFORE)
        mark(engine)
        assert engine.save_checkpoint(str(folder / layout.name), client_state={"note": layout.name}) is True
        assert engine.checkpoint_engine.last_save is not None, "DeepSpeed has saved by itself"
        truth = truth_of(engine)
        after = train(engine, STEPS_AFTER)
        if dist.get_rank() == 0:
            torch.save(truth, folder / f"{layout.name}.truth")
            (folder / f"{layout.name}.json").write_text(json.dumps(before + after))


def load_all(folder: Path, targets: list[tuple[PipelineLayout, list[PipelineLayout]]]) -> None:
    for seed, (layout, sources) in enumerate(targets, start=20):
        engine = build(layout, seed=seed)
        results: list[dict[str, Any]] = []
        for source in sources:
            scramble(engine)
            where, client = engine.load_checkpoint(str(folder / source.name))
            truth = torch.load(folder / f"{source.name}.truth", weights_only=False)
            problems = differences(*comparable(truth, truth_of(engine), source, layout))
            if where is None or client["note"] != source.name:
                problems.append(f"returned {where}, {client}")
            report = engine.checkpoint_engine.last_report
            losses = train(engine, STEPS_AFTER)
            results.append({"source": source.name, "problems": problems, "losses": losses, "report": report.count()})
        if dist.get_rank() == 0:
            (folder / f"results-{layout.name}.json").write_text(json.dumps(results))


def comparable(truth: Truth, found: Truth, source: PipelineLayout, target: PipelineLayout) -> tuple[Truth, Truth]:
    """Return what the two layouts should have in common.

    Weights in another precision than the source's are the cast of its masters. A stage's own copy of a tied parameter exists
    only with several stages: without one in the checkpoint it has the original's value.
    """
    expected = {key: value for key, value in truth.items() if "@" not in key or key in found}
    if "micro-batches" not in expected or "micro-batches" not in found:  # a plain module has none
        expected.pop("micro-batches", None)
        found.pop("micro-batches", None)
    for key in found.keys() - expected.keys():
        if "@" in key:
            expected[key] = truth[key.replace("@6", "")]
    low, high = (layout.precision != "fp32" for layout in (source, target))
    if low != high:
        dtype = torch.bfloat16 if high else torch.float32
        for key in [k for k in expected if k.startswith("weight/")]:
            expected[key] = expected.get(key.replace("weight/", "master/"), expected[key]).to(dtype)
    for key in [k for k in expected if k.startswith("buffer/")]:
        expected[key] = expected[key].to(found[key].dtype)
    return expected, found


def main() -> None:
    folder = Path(sys.argv[1])
    chosen = [
        (PipelineLayout(**t), [PipelineLayout(**s) for s in found])
        for t, found in json.loads((folder / "pairs.json").read_text())
    ]
    layouts = list({s.name: s for _, sources in chosen for s in sources}.values())
    worlds = sorted({layout.world for layout in layouts})
    saves = [partial(save_all, folder, [s for s in layouts if s.world == world]) for world in worlds]
    loads = [partial(load_all, folder, [pair for pair in chosen if pair[0].world == world]) for world in worlds]
    jobs = [*zip(worlds, saves, strict=True), *zip(worlds, loads, strict=True)]
    in_turn((world, partial(in_a_group, job)) for world, job in jobs)
    leave()


if __name__ == "__main__":
    main()
