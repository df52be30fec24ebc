"""Flips of bits that the witness of a Megatron model must name, and sound steps that it must not.

torchrun --nproc-per-node 3 -m evidence.megatron.witness flips [--count 300] [--seed 1]
torchrun --nproc-per-node 2 -m evidence.megatron.witness flips
torchrun --nproc-per-node 3 -m evidence.megatron.witness twice [--count 100]
torchrun --nproc-per-node 2 -m evidence.megatron.witness twice
torchrun --nproc-per-node 3 -m evidence.megatron.witness update [--count 40]
torchrun --nproc-per-node 4 -m evidence.megatron.witness update
torchrun --nproc-per-node 6 -m evidence.megatron.witness update
torchrun --nproc-per-node 2 -m evidence.megatron.witness sound [--count 1000]

Each prints the rows of a table of ``docs/evidence/witness.md`` on rank 0. On two ranks the layouts have model parallelism.
"""

from __future__ import annotations

import argparse
import datetime
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from megatron_unickpt.testing.jobs import Job as MegatronJob  # before anything of megatron

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

import megatron_unickpt
from evidence import computed, steps, twice
from evidence.flips import Places, arguments, equal, flips, row
from megatron_unickpt.edge import RUNTIME
from megatron_unickpt.framework.optimizer_internals import steppers
from megatron_unickpt.testing.layouts import Layout
from megatron_unickpt.witnessing.watch import OptimizerWitness
from unickpt.testing.launch import leave
from unickpt.training.witness.watching import Watching

LAYOUTS = {
    2: (
        Layout(dp=2), Layout(dp=2, optimizer="plain"), Layout(tp=2, optimizer="plain"), Layout(tp=2),
        Layout(pp=2, optimizer="fp32"), Layout(dp=2, moe=True, ep=2), Layout(dp=2, optimizer="layers"),
    ),
    3: (Layout(dp=3), Layout(dp=3, optimizer="plain"), Layout(dp=3, optimizer="fp32"), Layout(dp=3, optimizer="fp32dist")),
    4: (Layout(dp=4), Layout(tp=2, dp=2), Layout(dp=4, moe=True, ep=2)),
    6: (
        Layout(tp=2, dp=3), Layout(pp=2, dp=3, optimizer="fp32"), Layout(cp=2, dp=3), Layout(dp=6, moe=True, ep=2),
        Layout(pp=2, vpp=2, dp=3),
    ),
}  # fmt: skip

STEPPED = {  # where ranks hold something of an optimizer that no other rank has
    3: (Layout(dp=3), Layout(dp=3, optimizer="fp32dist")),
    4: (Layout(tp=2, pp=2, optimizer="fp32"), Layout(tp=2, pp=2, optimizer="plain")),
    6: (
        Layout(tp=2, dp=3), Layout(pp=2, dp=3, optimizer="fp32dist"), Layout(pp=2, vpp=2, dp=3), Layout(cp=2, dp=3),
        Layout(dp=6, moe=True, ep=2),
    ),
}  # fmt: skip
AGAIN = (False, True)  # whether the backward pass computes layers again


class Watched:
    """A Megatron job with a witness."""

    job: MegatronJob

    @property
    def watching(self) -> Watching:
        own = RUNTIME.witnesses[self.job.optimizer]
        assert isinstance(own, OptimizerWitness)
        return own.watching


class Job(Watched):
    """A model. Its weights, masters and moments are read from Megatron itself, not from the adapter."""

    def __init__(self, layout: Layout, checks: list[str] | None, *, torch_adam: bool = False) -> None:
        self.job = MegatronJob(layout, seed=1, batch=12, lr=1e-3, recompute=True, torch_adam=torch_adam)
        self.witness = None
        if checks is not None:
            self.witness = megatron_unickpt.witness(self.job.chunks, self.job.optimizer, {"every": 1, "checks": checks})

    def step(self) -> None:
        self.job.train(1)

    def places(self) -> Places:
        return _places(self.job)


class TwiceModel:
    """The layers of a model without pipeline, each of which is computed again, and what these began with."""

    def __init__(self, model: Any) -> None:
        self.blocks = model.decoder.layers
        self.inputs: list[torch.Tensor] = []
        for block in self.blocks:
            block.register_forward_pre_hook(self._begins, with_kwargs=True)

    def _begins(self, _module: Any, args: Any, kwargs: Any) -> None:
        if torch._C._current_graph_task_id() < 0:
            self.inputs.append(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

    def layers(self) -> dict[str, torch.nn.Module]:
        """Return layers without layers inside."""
        return {
            f"decoder.layers.{at}.{name}": module
            for at, block in enumerate(self.blocks)
            for name, module in block.named_modules()
            if not list(module.children()) and not isinstance(module, torch.nn.Identity)
        }


class TwiceJob(Watched):
    """A model whose layers are computed again, one micro-batch in a step."""

    def __init__(self, layout: Layout) -> None:
        self.job = MegatronJob(layout, seed=1, batch=layout.dp, lr=1e-3, recompute=True)
        self.module = TwiceModel(self.job.modules[0])
        self.fault = twice.Fault(self.module.layers())
        self._between: Callable[[], None] = lambda: None
        self._sound = False  # the first step makes the moments
        self.job.modules[0].register_forward_hook(lambda *_: self._between())
        megatron_unickpt.witness(self.job.chunks, self.job.optimizer, {"every": 1, "checks": ["self"]})

    def step(self, between: Callable[[], None]) -> None:
        self.module.inputs.clear()
        self._between = between
        sound = {key: tensor.detach().clone() for key, tensor in _places(self.job).items()}
        self.job.train(1)
        for key, tensor in _places(self.job).items() if self._sound else ():
            tensor.data.copy_(sound[key])  # a flip may have made all weights NaN
        self._sound = True


class ComputeJob(Watched):
    """A model whose layers may compute something wrongly, in each micro-batch. There are as many as stages of a pipeline."""

    def __init__(self, layout: Layout, *, again: bool) -> None:
        self.job = MegatronJob(layout, seed=1, batch=layout.dp * layout.pp, lr=1e-3, recompute=again)
        self.dtype = torch.bfloat16 if layout.low else torch.float32
        inner = self.job.modules[0]
        layers = [each for each in inner.modules() if isinstance(each, (ColumnParallelLinear, RowParallelLinear))]
        self.fault = computed.Fault(inner, [each for each in layers if each.weight is not None])
        megatron_unickpt.witness(self.job.chunks, self.job.optimizer, {"every": 1, "checks": ["buddy"]})
        step = self.job.optimizer.step
        self.job.optimizer.step = lambda: (self.fault.ends(), step())[1]

    def step(self) -> None:
        self.job.step = 1  # always the same batch
        self.job.train(1)

    def unit(self) -> list[int]:
        """Return the ranks that compute parts of the same layers as this one."""
        groups = [
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_context_parallel_group(),
            parallel_state.get_expert_model_parallel_group(),
        ]
        return sorted({rank for group in groups for rank in dist.get_process_group_ranks(group)})

    def tensors(self) -> Places:
        """Return weights, masters and moments."""
        return _places(self.job)


def _places(job: MegatronJob) -> Places:
    """Return weights, masters and moments of this rank."""
    found: dict[tuple[str, str], torch.Tensor] = {}
    names = {}
    for at, module in enumerate(job.modules):
        for name, parameter in module.named_parameters():
            names[id(parameter)] = f"chunk {at}: {name}" if len(job.modules) > 1 else name
            found["weight", names[id(parameter)]] = parameter.detach()
    for optimizer in getattr(job.optimizer, "chained_optimizers", [job.optimizer]):
        for parameter, stepped in _pairs(optimizer):
            if stepped.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
                found["master", names[id(parameter)]] = stepped.detach()
            for key, state in optimizer.optimizer.state.get(stepped, {}).items():
                if isinstance(state, torch.Tensor) and state.shape == stepped.shape and state.dim():
                    found[key, names[id(parameter)]] = state
    return found


def _pairs(optimizer: Any) -> Any:
    """Yield the parameters of an optimizer with what it steps on."""
    if isinstance(optimizer, DistributedOptimizer):
        groups = (
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        )
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        groups = (
            (optimizer.float16_groups, optimizer.fp32_from_float16_groups),
            (optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups),
        )
    else:
        own = [group["params"] for group in optimizer.optimizer.param_groups]
        groups = ((own, own),)
    for models, shards in groups:
        for some, held in zip(models, shards, strict=True):
            yield from zip(some, held, strict=True)


def sound(layout: Layout, count: int) -> str:
    """Train with and without a witness. Return what it found, and whether memory is equal."""
    ends, verdicts = [], 0
    for checks in (None, ["rest", "replicas", "nonfinite", "outlier", "self", "buddy"]):
        job = Job(layout, checks)
        for _ in range(count):
            job.step()
        verdicts += 0 if checks is None else len(job.watching.verdicts)
        passed = "" if checks is None else str(job.watching.passed()[0])
        ends.append({key: tensor.clone() for key, tensor in job.places().items()})
    return f"{count} steps; verdicts {verdicts}; passed until {passed}; memory equal: {equal(ends[1], ends[0])}"


def main() -> None:
    given = arguments("flips and sound steps of Megatron", "twice", "compute", "update")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    logging.getLogger("unickpt").setLevel(logging.CRITICAL)
    layouts = STEPPED if given.what == "update" else LAYOUTS
    for layout in layouts[dist.get_world_size()]:
        if given.only in layout.name and not (given.what == "twice" and layout.pp > 1):
            row(layout.name, _found(layout, given))
    leave()


def _found(layout: Layout, given: argparse.Namespace) -> Any:
    if given.what == "sound":
        return sound(layout, given.count)
    if given.what == "compute":
        jobs = (ComputeJob(layout, again=each) for each in AGAIN)
        return sum((computed.compute(job, given.count, given.seed, computed.REPEATED) for job in jobs), Counter())
    if given.what == "update":
        job = Job(layout, ["update"], torch_adam=True)
        return steps.steps(job, steppers(job.job.optimizer), given.count, given.seed)
    if given.what == "twice":
        return twice.twice(TwiceJob(layout), given.count, given.seed)
    return flips(Job(layout, ["rest", "replicas"]), given.count, given.seed)


if __name__ == "__main__":
    main()
