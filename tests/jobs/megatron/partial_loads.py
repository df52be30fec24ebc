"""Loads of checkpoints that lack a part of the state: what the next step does, and what an earlier life of the job leaves.

A cell is a kind of load, the layout that saved and the layout that loads. In each cell two jobs load the same checkpoint, a new
one and one that has trained. Both must then be equal in every state. A step with a learning rate of zero must leave the loaded
weights as they are, and the next steps must be equal in both jobs.

``partial_loads DIR [CELL ...]`` runs cells under torchrun, by default all, and writes DIR/*/results.json. CI runs ``CHOSEN``;
``evidence/megatron/partial_loads.py`` makes a page of all.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_unickpt.testing.layouts import Layout

if TYPE_CHECKING:
    import torch

    from megatron_unickpt.testing.jobs import Job

KINDS = {
    "middle": "saved in the middle of a run",
    "before": "saved before the first step",
    "weights": "saved without optimizer",
    "alone": "loaded without optimizer",
    "frozen": "some parameters were frozen when it was saved",
    "half": "the model has layers that the checkpoint lacks, loaded with strict=False",
}
WRAPPERS = {
    "dist": "DistributedOptimizer", "plain": "Float16OptimizerWithFloat16Params", "fp32": "FP32Optimizer",
    "fp32dist": "DistributedOptimizer, fp32 weights", "offload": "DistributedOptimizer, CPU offload",
    "fp32offload": "FP32Optimizer, CPU offload", "aware": "DistributedOptimizer, precision-aware",
    "layers": "LayerWiseDistributedOptimizer",
}  # fmt: skip
TARGETS = (*(f"gpt-dp2-{wrapper}" for wrapper in WRAPPERS), "moe-ep2dp2-dist", "moe-ep2dp2-plain", "gpt-pp2vpp2-dist")
STEPS = 2


@dataclass(frozen=True)
class Cell:
    """A kind of load, and the layouts that save and load."""

    kind: str
    source: Layout
    target: Layout

    @property
    def name(self) -> str:
        return f"{self.kind} {self.source.name} {self.target.name}"

    @classmethod
    def parse(cls, name: str) -> Cell:
        kind, source, target = name.split(" ")
        return cls(kind, Layout.parse(source), Layout.parse(target))


def cells() -> list[Cell]:
    """Return every kind with every target, loaded from its own layout and from one of another shape and optimizer."""
    found = []
    for kind in KINDS:
        for target in map(Layout.parse, TARGETS):
            if kind == "half" and target.vpp > 1:
                continue  # the layers that it adds are on the last stage, which then has another number of chunks
            other = Layout(tp=2, moe=target.moe, optimizer="plain" if target.optimizer == "dist" else "dist")
            found += [Cell(kind, target, target), Cell(kind, other, target)]
    return found


# In CI: every kind and every wrapper, and the cells that failed.
CHOSEN = (
    "weights gpt-tp2-dist gpt-dp2-offload", "before gpt-dp2-plain gpt-dp2-plain", "alone gpt-tp2-dist gpt-dp2-aware",
    "alone gpt-tp2-dist gpt-dp2-layers", "half gpt-dp2-dist gpt-dp2-dist",
)  # fmt: skip


# ---------------------------------------------------------------- one cell, on all ranks


def _frozen(name: str) -> bool:
    return "linear_fc2" in name


def _inner(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers of torch, or fused, that step."""
    for wrapper in getattr(optimizer, "chained_optimizers", [optimizer]):
        if wrapper.optimizer is not None:
            yield from getattr(wrapper.optimizer, "sub_optimizers", [wrapper.optimizer])


def state_of(job: Job) -> dict[str, Any]:
    """Return a copy of everything that the next steps depend on, on this rank."""
    import torch

    found: dict[str, Any] = {}
    for at, module in enumerate(job.modules):
        found |= {f"{at} {key}": value.detach().clone() for key, value in _tensors(module.state_dict()).items()}
    for number, optimizer in enumerate(_inner(job.optimizer)):
        for g, group in enumerate(optimizer.param_groups):
            found |= {f"{number} group {g} {k}": v for k, v in group.items() if isinstance(v, (int, float, tuple))}
            for p, stepped in enumerate(group["params"]):
                where = f"{number} group {g} parameter {p}"
                found[f"{where} stepped"] = stepped.detach().clone()
                for key, value in optimizer.state.get(stepped, {}).items():
                    found[f"{where} {key}"] = value.detach().clone() if isinstance(value, torch.Tensor) else value
    return found


def _tensors(state: Any) -> dict[str, torch.Tensor]:
    import torch

    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


def unequal(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return the names of the values that differ, bit for bit. A count of 0 steps is none."""
    import torch

    def same(x: Any, y: Any) -> bool:
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            return x.dtype == y.dtype and torch.equal(x, y)
        return bool(x == y)

    keys = [key for key in sorted(a.keys() | b.keys()) if not (key.endswith("step") and not a.get(key) and not b.get(key))]
    return [key for key in keys if key not in a or key not in b or not same(a[key], b[key])]


def _hold(job: Job) -> None:
    """Let the next step change nothing."""
    for group in job.optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0)


def _load(cell: Cell, job: Job, where: Path) -> None:
    import megatron_unickpt

    options: dict[str, Any] = {"missing_state": "fresh"} if cell.kind in ("frozen", "half") else {}
    if cell.kind == "half":
        options["strict"] = False
    megatron_unickpt.load(where, job.chunks, None if cell.kind == "alone" else job.optimizer, **options)
    job.step = STEPS


def _saved(cell: Cell, where: Path) -> None:
    import megatron_unickpt
    from megatron_unickpt.testing.jobs import Job

    job = Job(cell.source, seed=1, tied=False, frozen=_frozen if cell.kind == "frozen" else None)
    if cell.kind != "before":
        job.train(STEPS)
    megatron_unickpt.save(where, job.chunks, None if cell.kind == "weights" else job.optimizer, iteration=STEPS)


def run(cell: Cell, folder: Path) -> list[str]:
    """Run one cell on all ranks of its layouts. Returns the problems of this rank."""
    import torch

    from megatron_unickpt.testing.jobs import Job

    where = folder / cell.name.replace(" ", "_")
    _saved(cell, where)
    alone, job_of = cell.kind == "alone", partial(Job, cell.target, tied=False, predictions=int(cell.kind == "half"))
    new = job_of(seed=9)
    _load(cell, new, where)
    loaded = state_of(new)
    expected = new.train(STEPS)
    old = job_of(seed=5)
    old.train(STEPS + 1)
    kept = state_of(old)
    _load(cell, old, where)
    found = state_of(old)
    if cell.kind == "half":
        own = [key for key in kept if ".mtp" in key or " mtp" in key]
        problems = [f"{key} is not as before" for key in own if not torch.equal(kept[key], found[key])]
        rest = [{k: v for k, v in each.items() if k not in own and not _is_of_optimizer(k)} for each in (loaded, found)]
        problems += [f"{key} is not as in a new job" for key in unequal(*rest)]
        problems += [] if own else ["no layer is missing"]
    else:
        problems = [f"{key} is not as in a new job" for key in unequal(_comparable(loaded, alone), _comparable(found, alone))]
    if alone:
        problems += [f"{k} is not as before" for k in unequal(_moments(kept), _moments(found))]
    elif cell.kind != "half":
        losses = old.train(STEPS)
        problems += [] if losses == expected else [f"losses {losses}, in a new job {expected}"]
    for seed in (9, 5):
        job = job_of(seed=seed)
        if seed == 5:
            job.train(STEPS)
        _load(cell, job, where)
        _hold(job)
        before = state_of(job)
        job.train(1)
        after = state_of(job)
        changed = [key for key in unequal(before, after) if not _is_of_optimizer(key)]
        if cell.target.optimizer == "aware" != cell.source.optimizer:
            changed = [key for key in changed if not _is_rounded(before[key], after[key])]
        problems += [f"{key} is overwritten by the first step (seed {seed})" for key in changed]
    return problems


def _is_rounded(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether weights in bf16 differ by one unit in the last place: remainders round ties of a master up, a cast to even."""
    import torch

    apart = before.view(torch.int16).int() - after.view(torch.int16).int()
    return bool(apart.abs().max() <= 1)


def _is_of_optimizer(key: str) -> bool:
    return " group " in key


def _moments(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if _is_of_optimizer(key) and key.rsplit(" ", 1)[1].startswith("exp_avg")}


def _comparable(state: dict[str, Any], alone: bool) -> dict[str, Any]:
    """Return what a load must have set: without optimizer, the weights and what the optimizer steps on."""
    return {k: v for k, v in state.items() if not alone or not _is_of_optimizer(k) or k.endswith(" stepped")}


# ---------------------------------------------------------------- command


def run_all(names: list[str], folder: Path) -> None:
    """Run cells on the ranks of this job, and write the problems of all ranks to ``results.json``."""
    import traceback

    import torch.distributed as dist

    results: dict[str, list[str]] = {}
    for name in names:
        try:
            problems = run(Cell.parse(name), folder)
        except Exception:
            problems = [traceback.format_exc()]
        every: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(every, problems)
        results[name] = [problem for one in every for problem in one]
        if dist.get_rank() == 0:
            print(name, "OK" if not results[name] else results[name][:4], flush=True)
            (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()


CELLS_OF_A_PROCESS = 8


def work(folder: Path, names: list[str]) -> None:
    """Run cells under torchrun, each few in processes of their own."""
    import_module("megatron_unickpt.testing.jobs")  # before anything of megatron
    from tests.jobs.megatron.compared import in_a_group
    from tests.support.turns import in_turn
    from unickpt.testing.launch import leave

    names = names or [cell.name for cell in cells()]
    parts = [names[at : at + CELLS_OF_A_PROCESS] for at in range(0, len(names), CELLS_OF_A_PROCESS)]
    places = [folder / str(number) for number in range(len(parts))]
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
    limit = datetime.timedelta(seconds=60)
    jobs = [partial(run_all, part, place) for part, place in zip(parts, places, strict=True)]
    in_turn((2, partial(in_a_group, job, timeout=limit)) for job in jobs)
    leave()


if __name__ == "__main__":
    work(Path(sys.argv[1]), sys.argv[2:])
