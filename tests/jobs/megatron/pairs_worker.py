"""Forked ranks: save every source layout, then load the sources into the target layouts. See ``tests/jobs/pairs.py``.

pairs_worker DIR [--only save|load] [--memory]
                                       Also writes DIR/<layout>/, DIR/<layout>.truth. The losses have ``moved`` beside them:
                                       those of weights that move in the last place
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from megatron_unickpt.testing.jobs import BATCH, LAYERS, Job  # before anything of megatron

import torch
import torch.distributed as dist

import megatron.core.dist_checkpointing.strategies.torch  # noqa: F401  # once, before the forks
import megatron_unickpt
import megatron_unickpt.api
from megatron_unickpt.edge import RUNTIME
from unickpt.testing.launch import leave

from megatron_unickpt.testing.layouts import Layout
from megatron_unickpt.testing.truth import consolidated
from tests.jobs.megatron.compared import differences, in_a_group
from tests.jobs.megatron.layout_pairs import worlds
from tests.jobs.megatron.moved import moved_losses
from tests.jobs.pairs import Pairs, host_of
from tests.jobs.sizes import size_of
from tests.support.turns import forget_garbage, in_turn
from unickpt.base.options.job import MemoryOptions
from unickpt.checkpoint.save import shutdown

STEPS_BEFORE, STEPS_AFTER = 2, 2
SIZES = {"batch": size_of("BATCH", BATCH), "layers": size_of("LAYERS", LAYERS)}
# torch 2.13 keeps three threads of a gloo group for each job that has trained, with experts of several groups: after 40 jobs
# of four ranks these were 1,750 threads in each process, which occupied all processors.
PAIRS_OF_A_PROCESS = 12


def in_memory(folder: Path, source: Layout) -> MemoryOptions:
    place = host_of(folder, source, dist.get_rank(), dist.get_world_size())
    return MemoryOptions(to_disk_every=1000, folder=str(place))


def save_one(folder: Path, layout: Layout, *, memory: bool) -> None:
    job = Job(layout, seed=1, tied=not layout.moe, **SIZES)
    before = job.train(STEPS_BEFORE)
    to_move = checkpoint = folder / layout.name
    save = partial(megatron_unickpt.save, iteration=job.step, extra={"note": layout.name})
    if memory:
        to_move = folder / f"{layout.name}.again"
        save(checkpoint / f"iter_{job.step:07d}", job.chunks, job.optimizer, memory=in_memory(folder, layout))
        shutdown.finish_all(ending=False)  # of the copies on other hosts
        RUNTIME.saved_to_disk(str(checkpoint), 0.0)  # the end of this process writes nothing from memory
    save(to_move, job.chunks, job.optimizer)
    truth = consolidated(job, folder / "scratch")
    groups = _groups(job)
    after = job.train(STEPS_AFTER)
    moved = moved_losses(job, to_move, len(before), STEPS_AFTER)
    if dist.get_rank() == 0:
        torch.save(truth, folder / f"{layout.name}.truth")
        (folder / f"{layout.name}.json").write_text(json.dumps({"losses": before + after, "groups": groups, "moved": moved}))


def load_one(folder: Path, source: Layout, target: Layout, seed: int, *, memory: bool) -> dict[str, Any] | None:
    """Return the result of one pair, on rank 0."""
    job = Job(target, seed=seed, tied=not target.moe, **SIZES)
    if memory:
        options = in_memory(folder, source)
        found = megatron_unickpt.resume_or_start(folder / source.name, job.chunks, job.optimizer, memory=options)
        assert not list((folder / source.name).glob("*/manifest.json"))
    else:
        found = megatron_unickpt.load(folder / source.name, job.chunks, job.optimizer)
    job.step = found["iteration"]
    report = RUNTIME.last_report
    state = consolidated(job, folder / "scratch")
    record = json.loads((folder / f"{source.name}.json").read_text())
    problems = [] if found["extra"] == {"note": source.name} else [f"extra is {found['extra']}"]
    problems += _group_differences(record["groups"], _groups(job))
    losses = job.train(STEPS_AFTER)
    if state is None or report is None:
        return None
    problems += differences(torch.load(folder / f"{source.name}.truth"), state)
    problems += [f"{e.name} ({e.state}): {e.outcome}, {e.reason}" for e in report.entries if _is_odd(e)]
    return {"source": source.name, "target": target.name, "problems": problems, "losses": losses}


def _is_odd(entry: Any) -> bool:
    """Return a tensor that was left out although both jobs have the same model."""
    return entry.outcome == "left out" and entry.state != "object"


def _groups(job: Job) -> list[dict[str, Any]]:
    """Return the parameter groups of all ranks. On a rank without a parameter of a group, fused optimizers count no steps."""
    pairs = zip(job.hyperparameters(), job.optimizer.param_groups, strict=True)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [values for values, group in pairs if group["params"]])
    return [values for some in every for values in some]


def _group_differences(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[str]:
    """Compare steps, learning rates and weight decays of groups of the same kind."""

    def essence(groups: list[dict[str, Any]]) -> set[tuple[Any, ...]]:
        return {(g["wd_mult"], g["lr_mult"], g["lr"], g["weight_decay"], tuple(g["betas"]), g.get("step")) for g in groups}

    a, b = essence(expected), essence(found)
    return [] if b <= a else [f"groups: {sorted(map(str, a))} expected, {sorted(map(str, b))} found"]


def save_all(folder: Path, pairs: Pairs, *, memory: bool) -> None:
    for layout in dict.fromkeys(a for a, _ in pairs if a.world == dist.get_world_size()):
        save_one(folder, layout, memory=memory)
        forget_garbage()


def load_some(folder: Path, pairs: Pairs, first: int, *, memory: bool) -> None:
    """Load the pairs whose target has this world size, beginning with the one numbered ``first``: those of one process."""
    world = dist.get_world_size()
    mine = list(enumerate(targets(pairs, world), start=20))[first:][:PAIRS_OF_A_PROCESS]
    results = []
    for seed, pair in mine:
        results.append(load_one(folder, *pair, seed, memory=memory))
        forget_garbage()
    if dist.get_rank() == 0:
        (folder / f"results-w{world}-{first}.json").write_text(json.dumps(results))


def targets(pairs: Pairs, world: int) -> Pairs:
    """Return the pairs whose target has this world size."""
    return [pair for pair in pairs if pair[1].world == world]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=("save", "load"))
    parser.add_argument("--memory", action="store_true")
    given = parser.parse_args()
    folder = given.folder
    pairs = [(Layout(**a), Layout(**b)) for a, b in json.loads((folder / "pairs.json").read_text())]
    jobs: list[tuple[int, Any]] = []
    if given.only != "load":
        jobs += [
            (world, partial(save_all, folder, pairs, memory=given.memory)) for world in worlds(source for source, _ in pairs)
        ]
    for world in worlds(target for _, target in pairs) if given.only != "save" else []:
        parts = range(0, len(targets(pairs, world)), PAIRS_OF_A_PROCESS)
        jobs += [(world, partial(load_some, folder, pairs, first, memory=given.memory)) for first in parts]
    in_turn((world, partial(in_a_group, job)) for world, job in jobs)
    leave()


if __name__ == "__main__":
    main()
