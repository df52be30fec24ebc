"""Forked ranks: save every source layout, then load the sources into the target layouts. See ``tests/jobs/pairs.py``.

pairs_worker DIR [--asynchronous | --memory]    Also writes DIR/<layout>/ and DIR/<layout>.truth
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torch_unickpt
import torch_unickpt.loading.load_training
import torch_unickpt.saving.save_training  # once, before the forks
import unickpt
from tests.jobs.pairs import Pairs, host_of
from tests.jobs.torch.layouts import Layout
from tests.jobs.torch.model import BATCH, Job
from tests.support.turns import forget_garbage, in_turn
from torch_unickpt.edge import RUNTIME
from unickpt.checkpoint.save import shutdown
from unickpt.testing.launch import leave

BEFORE, AFTER = 3, 2


def memory_of(folder: Path, saved: Layout) -> torch_unickpt.MemoryOptions | None:
    """Return where a layout is saved in the memory of the host of this rank; None: not in memory."""
    if "--memory" not in sys.argv:
        return None
    place = host_of(folder, saved, dist.get_rank(), dist.get_world_size())
    return torch_unickpt.MemoryOptions(to_disk_every=1000, folder=str(place))


def save_one(folder: Path, layout: Layout) -> None:
    job = Job(layout, seed=1)
    before = job.train(BEFORE)
    saved = unickpt.save_training(
        job.model, job.optimizer, _place(folder, layout), step=job.step, samples=BATCH * job.step, scheduler=job.scheduler,
        client_state={"note": layout.name}, options=unickpt.SaveOptions(asynchronous="--asynchronous" in sys.argv),
        memory=memory_of(folder, layout),
    )  # fmt: skip
    truth = job.truth()
    after = job.train(AFTER)
    if not isinstance(saved, unickpt.SaveResult):
        saved.wait()
    if memory_of(folder, layout) is not None:
        shutdown.finish_all(ending=False)  # of the copies on other hosts
        RUNTIME.saved_to_disk(str(folder / layout.name), 0.0)  # the end of this process writes nothing from memory
    if dist.get_rank() == 0:
        torch.save(truth, folder / f"{layout.name}.truth")
        (folder / f"{layout.name}.json").write_text(json.dumps({"losses": before + after}))


def _place(folder: Path, layout: Layout) -> Path:
    return folder / layout.name / f"step{BEFORE}"


def load_one(folder: Path, source: Layout, target: Layout, seed: int) -> dict[str, Any]:
    job = Job(target, seed=seed)
    if seed % 2:
        job.train(1)  # states of an earlier step do not stay
    memory = memory_of(folder, source)
    if memory is None:
        start = unickpt.load_training(job.model, job.optimizer, _place(folder, source), scheduler=job.scheduler)
    else:
        place = folder / source.name
        start = torch_unickpt.resume_or_start(job.model, job.optimizer, place, scheduler=job.scheduler, memory=memory)
        assert not list(place.glob("*/manifest.json"))
    job.step = start.step
    found = job.truth()
    losses = job.train(AFTER)
    problems = [] if start.client_state == {"note": source.name} and start.samples == BATCH * start.step else [str(start)]
    problems += differences(torch.load(folder / f"{source.name}.truth"), found)
    problems += [
        f"{each.name} ({each.state}): {each.outcome}, {each.reason}"
        for each in start.report.entries
        if each.outcome == "left out"
    ]
    return {"source": source.name, "target": target.name, "problems": problems, "losses": losses}


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Compare bit for bit; of another dtype, with the cast."""
    problems = [f"{name}: only in one of them" for name in sorted(expected.keys() ^ found.keys())]
    for name in sorted(expected.keys() & found.keys()):
        a, b = expected[name], found[name]
        if isinstance(a, torch.Tensor):
            a = a.to(b.dtype)
            equal = torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)) and a.shape == b.shape
        else:
            equal = a == b
        if not equal:
            problems.append(f"{name}: differs")
    return problems


def save_all(folder: Path, pairs: Pairs) -> None:
    for layout in dict.fromkeys(a for a, _ in pairs if a.world == dist.get_world_size()):
        save_one(folder, layout)
        forget_garbage()


def load_some(folder: Path, pairs: Pairs) -> None:
    world = dist.get_world_size()
    mine = [pair for pair in pairs if pair[1].world == world]
    results = []
    for seed, pair in enumerate(mine, start=20):
        results.append(load_one(folder, *pair, seed))
        forget_garbage()
    if dist.get_rank() == 0:
        (folder / f"results-w{world}.json").write_text(json.dumps(results))


def in_a_group(job: Any) -> None:
    dist.init_process_group("gloo")
    job()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    pairs = [(Layout(**a), Layout(**b)) for a, b in json.loads((folder / "pairs.json").read_text())]
    worlds = sorted({source.world for source, _ in pairs}), sorted({target.world for _, target in pairs})
    jobs: list[tuple[int, Any]] = [(world, partial(save_all, folder, pairs)) for world in worlds[0]]
    jobs += [(world, partial(load_some, folder, pairs)) for world in worlds[1]]
    in_turn((world, partial(in_a_group, job)) for world, job in jobs)
    leave()


if __name__ == "__main__":
    main()
