"""Under torchrun: save every layout of this world size, or load every source into every layout of it.

matrix_worker save DIR          DIR/<layout>/global_step3, DIR/<layout>.truth, DIR/<layout>.json
matrix_worker load DIR          DIR/results-w<world>.json; DIR/pairs.json says which sources to load
matrix_worker both DIR          on every world size up to this one: all saves, then all loads
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist

from tests.jobs.deepspeed.jobs import Layout, build, in_a_group, layouts, scramble, train
from tests.jobs.deepspeed.truth import consolidated, differences
from tests.support import deepspeed_imports  # noqa: F401
from tests.support.turns import in_turn
from unickpt.testing.launch import leave

STEPS_BEFORE, STEPS_AFTER = 3, 3
STATES = ("exp_avg", "exp_avg_sq")


def save_all(folder: Path) -> None:
    for layout in layouts(dist.get_world_size()):
        engine = build(layout, seed=1, unickpt={"enabled": True})
        before = train(engine, STEPS_BEFORE)
        assert engine.save_checkpoint(str(folder / layout.name), client_state={"note": layout.name}) is True
        truth = consolidated(engine, STATES)
        after = train(engine, STEPS_AFTER)
        if dist.get_rank() == 0:
            torch.save(truth, folder / f"{layout.name}.truth")
            (folder / f"{layout.name}.json").write_text(json.dumps({"layout": layout.to_json(), "losses": before + after}))
        engine.destroy()


def load_all(folder: Path) -> None:
    world = dist.get_world_size()
    results: list[dict[str, Any]] = []
    chosen = json.loads((folder / "pairs.json").read_text())
    for seed, layout in enumerate(layouts(world), start=20):
        engine = build(layout, seed=seed)
        for name in chosen.get(layout.name, []):
            source = Layout(**json.loads((folder / f"{name}.json").read_text())["layout"])
            truth = torch.load(folder / f"{source.name}.truth", weights_only=False)
            scramble(engine)
            where, client = engine.load_checkpoint(str(folder / source.name))
            found = consolidated(engine, STATES)
            problems = differences(*comparable(truth, found, source, layout))
            if where is None or client["note"] != source.name:
                problems.append(f"returned {where}, {client}")
            report = engine.checkpoint_engine.last_report
            losses = train(engine, STEPS_AFTER)
            if dist.get_rank() == 0:
                results.append(
                    {
                        "source": source.name,
                        "target": layout.name,
                        "problems": problems,
                        "losses": losses,
                        "report": report.count(),
                    }
                )
        engine.destroy()
    if dist.get_rank() == 0:
        (folder / f"results-w{world}.json").write_text(json.dumps(results))


def comparable(truth: Any, found: Any, source: Layout, target: Layout) -> Any:
    """Weights in another precision than the source's are the cast of its masters; the rest is equal as it is."""
    bf16_source, bf16_target = source.precision != "fp32", target.precision != "fp32"
    expected = dict(truth)
    if bf16_source != bf16_target:
        dtype = torch.bfloat16 if bf16_target else torch.float32
        for key in [k for k in expected if k.startswith("weight/")]:
            expected[key] = expected.get(key.replace("weight/", "master/"), expected[key]).to(dtype)
    # floating-point buffers have the dtype that this DeepSpeed gives them (0.18 casts them to bf16, 0.19 does not)
    for key in [k for k in expected if k.startswith("buffer/") and expected[k].is_floating_point()]:
        expected[key] = expected[key].to(found[key].dtype)
    return expected, found


def main() -> None:
    kinds, folder = {"save": [save_all], "load": [load_all], "both": [save_all, load_all]}[sys.argv[1]], Path(sys.argv[2])
    worlds = range(1, int(os.environ["WORLD_SIZE"]) + 1)
    in_turn(
        (world, partial(in_a_group, partial(work, folder)))
        for work in kinds
        for world in (worlds if len(kinds) > 1 else worlds[-1:])
    )
    leave()


if __name__ == "__main__":
    main()
