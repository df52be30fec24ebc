"""Flips of bits that ``torch_unickpt.witness`` must name, sound steps that it must not, and what its checks cost.

torchrun --nproc-per-node 3 -m evidence.torch.witness flips [--count 300] [--seed 1]
torchrun --nproc-per-node 3 -m evidence.torch.witness compute [--count 300] [--seed 1]
torchrun --nproc-per-node 3 -m evidence.torch.witness nan [--count 100] [--seed 1]
torchrun --nproc-per-node 3 -m evidence.torch.witness outlier [--count 100] [--seed 1]
torchrun --nproc-per-node 3 -m evidence.torch.witness twice [--count 100] [--seed 1]
torchrun --nproc-per-node 3 -m evidence.torch.witness update [--count 100] [--seed 1]
torchrun --nproc-per-node 3 -m evidence.torch.witness sound [--count 5000]
torchrun --nproc-per-node 2 -m evidence.torch.witness cost [--count 6]

Each prints the rows of a table of ``docs/guides/witness.md`` on rank 0.
"""

from __future__ import annotations

import argparse
import logging
import pickle
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torch_unickpt
from evidence import computed, nans, steps, twice
from evidence.flips import Places
from unickpt.training.witness.agreeing import Ranks
from unickpt.training.witness.held import local
from unickpt.training.witness.vote import Kind, Verdict
from unickpt.training.witness.watching import Watching

PLACES = ("weight", "exp_avg", "exp_avg_sq")
BITS = computed.BITS


class Again(torch.nn.Sequential):
    """Layers that the backward pass computes again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return found


class Job:
    """A training: ``ddp`` or ``fsdp``, in one dtype, with dropout."""

    def __init__(
        self,
        kind: str,
        dtype: torch.dtype,
        *,
        width: int = 24,
        layers: int = 3,
        batch: int = 6,
        again: bool = False,
        each: bool = False,
    ) -> None:
        torch.manual_seed(0)
        parts = [
            part for _ in range(layers) for part in (torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Dropout(0.1))
        ]
        if again:
            parts = [Again(*parts[at : at + 3]) for at in range(0, len(parts), 3)]
        self.module = torch.nn.Sequential(*parts, torch.nn.Linear(width, width)).to(dtype)
        for layer in self.module if each and kind == "fsdp" else ():
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer)
        self.model: Any = DistributedDataParallel(self.module) if kind == "ddp" else fully_shard(self.module)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.dtype, self.width, self.batch, self.kind = dtype, width, batch, kind
        torch.manual_seed(1 + dist.get_rank())

    def step(self, accumulation: int = 1) -> None:
        for at in range(accumulation):
            apart = self.kind == "ddp" and at < accumulation - 1
            with self.model.no_sync() if apart else nullcontext():
                self.model(torch.randn(self.batch, self.width).to(self.dtype)).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[tuple[str, str], torch.Tensor]:
        """Return the parts of this rank by place and name. Writes to them are seen by no counter."""
        found = {}
        for name, parameter in self.module.named_parameters():
            for place in PLACES:
                held: Any = parameter if place == "weight" else self.optimizer.state[parameter][place]
                held = held.detach()
                found[place, name] = (held.to_local() if self.kind == "fsdp" else held).data
        return found


def flips(kind: str, dtype: torch.dtype, count: int, seed: int) -> Counter[str]:
    """Return how many flips were made and named, by place and check."""
    job, chance, found = Job(kind, dtype), random.Random(seed), Counter[str]()
    job.step()
    sound = {key: tensor.clone() for key, tensor in job.tensors().items()}
    for _ in range(count):
        watching = torch_unickpt.witness(job.model, job.optimizer, {"every": 1, "checks": ["rest", "replicas"]})
        job.step()
        tensors = job.tensors()
        place, name = chance.choice(sorted(tensors))
        rank, bit, where = chance.randrange(dist.get_world_size()), chance.randrange(BITS[dtype]), chance.random()
        if rank == dist.get_rank():
            bits = tensors[place, name].view({4: torch.int32, 2: torch.int16}[dtype.itemsize]).view(-1)
            bits[int(where * bits.numel())] ^= torch.tensor(1 << bit).to(bits.dtype)
        job.step()
        what = name if place == "weight" else f"{place} of {name}"
        found[place] += 1
        for each in watching.verdicts:
            assert isinstance(each, Verdict)
            right = each.ranks == (rank,)
            if Kind.SDC_AT_REST in (each.kind, each.check):
                found[f"{place} rest" if right and each.subject.what == what else f"{place} wrong"] += 1
            elif each.subject.what.endswith(name):
                found[f"{place} {each.kind.value if right else 'wrong'}"] += 1
            else:
                found[f"{place} others"] += 1
        watching.close()
        for key, tensor in job.tensors().items():
            tensor.copy_(sound[key])
    return found


class ComputeJob(Job):
    """A training that may compute something wrongly."""

    def __init__(self, kind: str, dtype: torch.dtype, checks: Sequence[str]) -> None:
        super().__init__(kind, dtype, each=True)
        self.fault = computed.Fault(self.module)
        self.optimizer.register_step_pre_hook(self.fault.ends)
        self.witness = torch_unickpt.witness(self.model, self.optimizer, {"every": 1, "checks": [*checks]})

    @property
    def watching(self) -> Watching:
        assert self.witness._watching is not None
        return self.witness._watching

    def unit(self) -> tuple[int, ...]:
        """Return the ranks that compute parts of the same layers as this one."""
        return (dist.get_rank(),)

    def step(self, accumulation: int = 1) -> None:
        assert accumulation == 1
        x = self.fault.batch(torch.randn(self.batch, self.width).to(self.dtype))
        self.model(x).float().square().mean().backward()
        self.fault.reduced([each.grad for each in self.module.parameters() if each.grad is not None])
        self.optimizer.step()
        self.optimizer.zero_grad()


def sound(kind: str, dtype: torch.dtype, count: int) -> tuple[int, bool]:
    """Return how many verdicts sound steps have, and whether the weights are those of a training without a witness."""
    ends, verdicts = [], 0
    for options in (
        None,
        {"every": 1, "checks": ["rest", "replicas", "nonfinite", "outlier", "buddy", *["update"] * (kind == "fsdp")]},
    ):
        job = Job(kind, dtype)
        watching = torch_unickpt.witness(job.model, job.optimizer, options)
        for at in range(count):
            job.batch = 4 + (at + dist.get_rank()) % 3  # uneven
            job.step(accumulation=1 + at % 3)
        verdicts += len(watching.verdicts)
        ends.append(job.tensors())
        watching.close()
    return verdicts, all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


class Messages:
    """Counts what the witnesses of this process send."""

    def __init__(self) -> None:
        self.number, self.bytes = 0, 0
        for name in ("gather", "gather_objects", "pass_on"):
            setattr(Ranks, name, self._counted(getattr(Ranks, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(ranks: Ranks, value: Any, **more: Any) -> Any:
            self.number += 1
            self.bytes += value.nbytes if isinstance(value, torch.Tensor) else len(pickle.dumps(value))
            return function(ranks, value, **more)

        return call


def cost(count: int) -> Iterator[str]:
    """Yield rows: what a check adds to a step in which it runs, and what that is of all steps if it runs in every 50th."""
    messages = Messages()
    kinds = {"DDP": "ddp", "FSDP2": "fsdp"}
    jobs = {name: Job(kind, torch.float32, width=1024, layers=8, batch=256) for name, kind in kinds.items()}
    jobs["DDP, recomputing"] = Job("ddp", torch.float32, width=1024, layers=8, batch=256, again=True)
    checks = [
        ("nonfinite", "DDP"),
        ("rest", "DDP"),
        ("replicas", "DDP"),
        ("buddy", "DDP"),
        ("buddy", "FSDP2"),
        ("self", "DDP, recomputing"),
        ("update", "FSDP2"),
    ]
    for accumulation in (1, 4, 16):
        for check, name in checks:
            job = jobs[name]
            times: dict[bool, list[float]] = {False: [], True: []}
            sent: list[tuple[int, int]] = []
            for at in range(count):  # by turns
                for on in (False, True) if at % 2 else (True, False):
                    every = 10**6 if check == "nonfinite" else 1  # it counts in each step
                    options = {"every": every, "checks": [check]} if on else None
                    watching = torch_unickpt.witness(job.model, job.optimizer, options)
                    for again in range(4):  # the first two prepare
                        dist.barrier()
                        before, began = (messages.number, messages.bytes), time.perf_counter()
                        job.step(accumulation)
                        if again > 1:
                            times[on].append(1000 * (time.perf_counter() - began))
                            sent += [(messages.number - before[0], messages.bytes - before[1])] * on
                    watching.close()
            step, checked = (statistics.median(times[on]) for on in (False, True))
            extra = checked - step
            often = 1 if check == "nonfinite" else 50
            number, size = (statistics.median(each) for each in zip(*sent, strict=True))
            yield (
                f"| {name} | {accumulation} | {step:.0f} | `{check}` | {extra:.1f} | {100 * extra / often / step:.2f}% | "
                f"{number:.0f} | {size:,.0f} |"
            )


class NanJob:
    """A training whose micro-batches may have NaN. The witness writes those into a folder."""

    wraps = False

    def __init__(self, kind: str, folder: str, check: str = "nonfinite") -> None:
        torch.manual_seed(0)
        self.module = nans.Model()
        for layer in (self.module.first, self.module.middle, self.module.head) if kind == "fsdp" else ():
            fully_shard(layer)
        self.model: Any = DistributedDataParallel(self.module) if kind == "ddp" else fully_shard(self.module)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        options = {"every": 1, "checks": [check], "batches": folder}
        self.witness = torch_unickpt.witness(self.model, self.optimizer, options)

    @property
    def watching(self) -> Watching:
        assert self.witness._watching is not None
        return self.witness._watching

    def steps(self, micro_batches: Sequence[nans.Inputs]) -> None:
        ddp = isinstance(self.model, DistributedDataParallel)
        for at, inputs in enumerate(micro_batches):
            with self.model.no_sync() if ddp and at < len(micro_batches) - 1 else nullcontext():
                nans.loss_of(self.model(**inputs)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def places(self) -> Places:
        found = {("weight", name): local(each) for name, each in self.module.named_parameters()}
        for name, each in self.module.named_parameters():
            found |= {(place, name): local(self.optimizer.state[each][place]) for place in PLACES[1:]}
        return found

    def whole(self) -> nans.Model:
        """Return a model with all weights."""
        weights = {name: each.full_tensor() for name, each in self.module.named_parameters() if isinstance(each, DTensor)}
        if not weights:
            return self.module
        found = nans.Model()
        found.load_state_dict(weights)
        return found


class TwiceJob:
    """A training with DDP or FSDP2, whose backward pass computes blocks again."""

    def __init__(self, kind: str, dtype: torch.dtype, reentrant: bool) -> None:
        torch.manual_seed(0)
        self.module = twice.Model(partial(checkpoint, use_reentrant=reentrant)).to(dtype)
        self.fault = twice.Fault(self.module.layers())
        if kind == "fsdp":
            for block in self.module.blocks:
                fully_shard(block)
        self.model: Any = DistributedDataParallel(self.module) if kind == "ddp" else fully_shard(self.module)
        self.optimizer, self.dtype = torch.optim.AdamW(self.model.parameters(), lr=1e-3), dtype
        self.witness = torch_unickpt.witness(self.model, self.optimizer, {"every": 1, "checks": ["self"]})

    @property
    def watching(self) -> Watching:
        assert self.witness._watching is not None
        return self.witness._watching

    def step(self, between: Callable[[], None]) -> None:
        x = torch.randn(twice.MICRO_BATCH, twice.WIDTH, dtype=self.dtype, requires_grad=True)
        loss = self.model(x).float().square().mean()
        between()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class StepJob(Job):
    """A training with FSDP2 whose optimizer may step wrongly."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__("fsdp", dtype)
        self.witness = torch_unickpt.witness(self.model, self.optimizer, {"every": 1, "checks": ["update"]})

    @property
    def watching(self) -> Watching:
        assert self.witness._watching is not None
        return self.witness._watching

    def places(self) -> Places:
        return self.tensors()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("flips", "compute", "nan", "outlier", "twice", "update", "sound", "cost"))
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("unickpt").setLevel(logging.CRITICAL)
    dist.init_process_group("gloo")
    for kind in ("ddp", "fsdp") if given.what in ("nan", "outlier") else ():
        with tempfile.TemporaryDirectory() as folder:
            if given.what == "nan":
                counts = nans.nans(NanJob(kind, folder), given.count, given.seed)
            else:
                counts = nans.outliers(NanJob(kind, folder, "outlier"), given.count, given.seed)
        if dist.get_rank() == 0:
            print(f"{kind}: {sorted(counts.items())}", flush=True)
    for kind, dtype in [(kind, dtype) for kind in ("ddp", "fsdp") for dtype in BITS]:
        row = ""
        if given.what == "flips":
            row = str(sorted(flips(kind, dtype, given.count, given.seed).items()))
        elif given.what == "compute":
            counts = computed.compute(ComputeJob(kind, dtype, ["buddy"]), given.count, given.seed)
            if kind == "ddp":
                job = ComputeJob(kind, dtype, ["replicas"])
                counts += computed.compute(job, given.count // 5, given.seed, [computed.REDUCED])
            else:
                job = ComputeJob(kind, dtype, ["buddy"])
                counts += computed.compute(job, given.count // 5, given.seed, [computed.GATHERED])
            row = str(sorted(counts.items()))
        elif given.what == "update" and kind == "fsdp":
            stepped = StepJob(dtype)
            row = str(sorted(steps.steps(stepped, [stepped.optimizer], given.count, given.seed).items()))
        elif given.what == "twice":
            counts = sum(
                (twice.twice(TwiceJob(kind, dtype, each), given.count, given.seed) for each in (False, True)), Counter()
            )
            row = str(sorted(counts.items()))
        elif given.what == "sound":
            row = str(sound(kind, dtype, given.count))
        if row and dist.get_rank() == 0:
            print(f"{kind}, {dtype}: {row}", flush=True)
    for line in cost(given.count) if given.what == "cost" else ():
        if dist.get_rank() == 0:
            print(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
