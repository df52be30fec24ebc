"""Forked ranks: save every source layout, then load the sources into every target layout. See ``tests/jobs/pairs.py``.

pairs_worker DIR JOBS [--steps BEFORE AFTER] [--only save|load] [--memory]

JOBS is a key of ``JOBS``; with ``--memory`` it is ``zero``. BEFORE and AFTER are the steps of a source before its save, and
those after the save and a load. Also writes DIR/<layout>/, DIR/<layout>.truth.
"""

from __future__ import annotations

import argparse
import json
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
    zero_jobs,
)
from tests.jobs.deepspeed.jobs import in_a_group
from tests.jobs.deepspeed.truth import comparable, differences
from tests.jobs.pairs import STEPS, Layout, host_of
from tests.support import deepspeed_imports  # noqa: F401
from tests.support.turns import forget_garbage, in_turn
from unickpt.checkpoint.save import shutdown
from unickpt.testing.launch import leave

JOBS: dict[str, Any] = {
    "zero": zero_jobs, "pipelines": pipeline_jobs, "experts": expert_jobs, "tensors": tensor_jobs, "mpu": megatron_jobs,
    "averaged": averaged_jobs, "piped-experts": expert_pipeline_jobs, "auto-experts": auto_expert_jobs,
    "tensor-experts": tensor_expert_jobs,
}  # fmt: skip


def in_memory(folder: Path, source: Layout) -> dict[str, Any]:
    """Return the options of an engine whose checkpoints are in the memory of hosts."""
    place = host_of(folder, source, dist.get_rank(), dist.get_world_size())
    return {"unickpt": {"enabled": True, "memory": {"to_disk_every": 1000, "folder": str(place)}}}


def save_all(jobs: Any, folder: Path, steps: tuple[int, int], layouts: list[Layout], *, memory: bool) -> None:
    for layout in layouts:
        engine = jobs.build(layout, seed=1, **(in_memory(folder, layout) if memory else {}))
        before = jobs.train(engine, steps[0])
        jobs.mark(engine)
        assert engine.save_checkpoint(str(folder / layout.name), client_state={"note": layout.name}) is True
        assert memory or engine.checkpoint_engine.last_save is not None, "DeepSpeed has saved by itself"
        truth = jobs.truth_of(engine)
        after = jobs.train(engine, steps[1])
        if memory:
            shutdown.finish_all(ending=False)  # of the copies on other hosts
            engine.checkpoint_engine.memory.saved_to_disk(str(folder / layout.name), 0.0)  # the end writes nothing from memory
        if dist.get_rank() == 0:
            torch.save(truth, folder / f"{layout.name}.truth")
            (folder / f"{layout.name}.json").write_text(json.dumps({"losses": before + after}))
        engine.destroy()
        del engine
        forget_garbage()


def load_all(jobs: Any, folder: Path, steps: int, targets: list[tuple[Layout, list[Layout]]], *, memory: bool) -> None:
    for seed, (layout, sources) in enumerate(targets, start=20):
        engine = jobs.build(layout, seed=seed, **(in_memory(folder, sources[0]) if memory else {}))
        results: list[dict[str, Any]] = []
        for source in sources:
            jobs.scramble(engine)
            where, client = engine.load_checkpoint(str(folder / source.name))
            assert memory == (not list((folder / source.name).glob("*/manifest.json")))
            truth = torch.load(folder / f"{source.name}.truth", weights_only=False)
            expected, found = comparable(*jobs.common(truth, jobs.truth_of(engine)), source, layout)
            problems = differences(expected, found)
            if where is None or client["note"] != source.name:
                problems.append(f"returned {where}, {client}")
            report = engine.checkpoint_engine.last_report
            losses = jobs.train(engine, steps)
            tensors = sum(isinstance(value, torch.Tensor) for value in expected.values())
            results.append({
                "source": source.name, "target": layout.name, "problems": problems, "tensors": tensors, "losses": losses,
                "report": report.count(),
            })  # fmt: skip
        if dist.get_rank() == 0:
            (folder / f"results-{layout.name}-{seed}.json").write_text(json.dumps(results))
        engine.destroy()
        del engine
        forget_garbage()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("jobs", choices=JOBS)
    parser.add_argument("--steps", type=int, nargs=2, default=STEPS)
    parser.add_argument("--only", choices=("save", "load"))
    parser.add_argument("--memory", action="store_true")
    given = parser.parse_args()
    jobs, folder = JOBS[given.jobs], given.folder
    chosen: dict[Layout, list[Layout]] = {}
    for source, target in json.loads((folder / "pairs.json").read_text()):
        chosen.setdefault(jobs.LAYOUT(**target), []).append(jobs.LAYOUT(**source))
    # In the order of the targets: in bf16, the engines that a process had before have an effect on the rounding.
    every = dict.fromkeys(source for found in chosen.values() for source in found)
    sources = [layout for layout in dict.fromkeys([*chosen, *every]) if layout in every]
    each: list[tuple[int, Any]] = []
    for world in sorted({layout.world for layout in sources}) if given.only != "load" else []:
        here = [source for source in sources if source.world == world]
        each.append((world, partial(save_all, jobs, folder, given.steps, here, memory=given.memory)))
    for world in sorted({layout.world for layout in chosen}) if given.only != "save" else []:
        targets = [(target, found) for target, found in chosen.items() if target.world == world]
        if given.memory:  # an engine has one folder of each host
            targets = [(target, [source]) for target, found in targets for source in found]
        each.append((world, partial(load_all, jobs, folder, given.steps[1], targets, memory=given.memory)))
    in_turn((world, partial(in_a_group, job)) for world, job in each)
    leave()


if __name__ == "__main__":
    main()
