"""Flips of bits that the witness of a DeepSpeed engine must name, and sound steps that it must not.

torchrun --nproc-per-node 3 -m evidence.deepspeed.witness flips [--count 300] [--seed 1]
torchrun --nproc-per-node 3 -m evidence.deepspeed.witness nan [--count 25] [--seed 1]
torchrun --nproc-per-node 3 -m evidence.deepspeed.witness outlier [--count 25] [--seed 1]
torchrun --nproc-per-node 3 -m evidence.deepspeed.witness compute [--count 100] [--seed 1]
torchrun --nproc-per-node 3 -m evidence.deepspeed.witness twice [--count 100] [--seed 1]
torchrun --nproc-per-node 3 -m evidence.deepspeed.witness update [--count 100] [--seed 1]
torchrun --nproc-per-node 3 -m evidence.deepspeed.witness sound [--count 1000]

Each prints the rows of a table of ``docs/evidence/witness.md`` on rank 0.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.utils.checkpoint import checkpoint

from ds_unickpt.edge import RUNTIME
from ds_unickpt.witnessing.watch import EngineWitness
from evidence import computed, nans, steps, twice
from evidence.flips import Places, arguments, equal, flips, row
from unickpt.testing.launch import leave
from unickpt.training.witness.watching import Watching

WIDTH, MICRO_BATCH = 24, 2
# ZeRO stage, and precision: bf16o is DeepSpeed's BF16_Optimizer
FP16 = [(1, "fp16"), (0, "fp16")]
LAYOUTS = [(stage, precision) for stage in range(4) for precision in ("fp32", "bf16")] + [(1, "bf16o")]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.drop = torch.nn.LayerNorm(WIDTH), torch.nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Model(torch.nn.Module):
    """Blocks with dropout, of which the second computes its activations again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.second, self.first(x), use_reentrant=False)
        return self.head(x).float().square().mean()


class Job:
    """An engine. Its weights, masters and moments are read from DeepSpeed itself, not from the adapter."""

    def __init__(
        self,
        stage: int,
        precision: str,
        witness: dict[str, Any] | None,
        accumulation: int = 1,
        model: Callable[[], torch.nn.Module] = Model,
    ) -> None:
        torch.manual_seed(0)
        ranks = dist.get_world_size()
        config: dict[str, Any] = {
            "train_batch_size": MICRO_BATCH * accumulation * ranks,
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "steps_per_print": 10**9,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 30},
            "unickpt": {"enabled": False, **({} if witness is None else {"witness": witness})},
        }
        if precision.startswith("bf16"):
            config["bf16"] = {"enabled": True}
        if precision == "fp16":
            config["fp16"] = {"enabled": True, "initial_scale_power": 32, "hysteresis": 1}
        if precision == "bf16o":
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        self.engine, *_ = deepspeed.initialize(model=model(), config=config)
        self.accumulation = accumulation
        self.dtype = {"f": torch.float32, "b": torch.bfloat16}[precision[0]] if precision != "fp16" else torch.float16
        torch.manual_seed(1 + dist.get_rank())

    @property
    def watching(self) -> Watching:
        own = RUNTIME.witnesses[self.engine]
        assert isinstance(own, EngineWitness)
        return own.watching

    def step(self) -> None:
        for _ in range(self.accumulation):
            self.engine.backward(self.engine(torch.randn(MICRO_BATCH, WIDTH).to(self.dtype)))
            self.engine.step()

    def places(self) -> Places:
        found: dict[tuple[str, str], torch.Tensor] = {}
        optimizer = self.engine.optimizer
        for name, parameter in self.engine.module.named_parameters():
            whole = getattr(parameter, "ds_tensor", None)
            fragment = getattr(parameter, "_hp_mapping", None)
            if whole is not None:
                size, rank = whole.numel(), dist.get_rank()
                own = max(min(size, parameter.ds_numel - rank * size), 0)  # the rest is padding
                found["weight", name] = whole.detach().view(-1)[:own]
                group, offset, number = optimizer.grad_position[optimizer.get_param_id(parameter)]
                master = optimizer.fp32_partitioned_groups_flat[group]
                for key, state in {"master": master, **_moments(optimizer.optimizer, master)}.items():
                    found[key, name] = state.detach().narrow(0, offset, min(number, own))
                if master.data_ptr() == optimizer.fp16_partitioned_groups_flat[group].data_ptr():
                    del found["master", name]  # the model computes with it
                continue
            found["weight", name] = parameter.detach()
            if fragment is not None:
                for key, state in {"master": fragment.hp_fragment, **(fragment.optim_fragment or {})}.items():
                    found[key, name] = state.detach()
            elif isinstance(optimizer, torch.optim.Optimizer):
                found |= {(key, name): state for key, state in _moments(optimizer, parameter).items()}
            elif type(optimizer).__name__ == "FP16_UnfusedOptimizer":
                found |= {(key, name): state for key, state in _of_fp16_optimizer(optimizer, parameter).items()}
        return found


class NanJob(Job):
    """An engine whose micro-batches may have NaN."""

    def __init__(self, stage: int, precision: str, folder: str, check: str = "nonfinite") -> None:
        witness = {"every": 1, "checks": [check], "batches": folder}
        self.wraps = stage == 3
        super().__init__(stage, precision, witness, accumulation=nans.ACCUMULATION, model=nans.Model)

    @property
    def module(self) -> nans.Model:
        found = self.engine.module
        assert isinstance(found, nans.Model)
        return found

    def whole(self) -> nans.Model:
        """Return a model with all weights."""
        if not self.engine.zero_optimization_partition_weights():
            return self.module
        found = nans.Model().to(self.dtype)
        with deepspeed.zero.GatheredParameters(list(self.module.parameters())):
            found.load_state_dict({name: each.detach().clone() for name, each in self.module.named_parameters()})
        return found

    def steps(self, micro_batches: Sequence[nans.Inputs]) -> None:
        for inputs in micro_batches:
            self.engine.backward(nans.loss_of(self.engine(**inputs)))
            self.engine.step()


class ComputeJob(Job):
    """An engine whose model may compute something wrongly."""

    def __init__(self, stage: int, precision: str) -> None:
        def model() -> torch.nn.Module:
            layers = [
                part for _ in range(3) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Dropout(0.1))
            ]
            found = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, WIDTH))
            self.fault = computed.Fault(found)
            return found

        super().__init__(stage, precision, {"every": 1, "checks": ["buddy"]}, model=model)

    def step(self) -> None:
        x = self.fault.batch(torch.randn(MICRO_BATCH, WIDTH).to(self.dtype))
        self.engine.backward(self.engine(x).float().square().mean())
        self.fault.ends()
        self.engine.step()

    def unit(self) -> tuple[int, ...]:
        """Return the ranks that compute parts of the same layers as this one."""
        return (dist.get_rank(),)

    def tensors(self) -> Places:
        """Return what a step begins with. Under ZeRO-3 small parameters may stay gathered."""
        named = [each for each in self.engine.module.named_parameters() if getattr(each[1], "ds_persist", False)]
        whole = {("gathered", name): each.detach() for name, each in named if each.numel() == each.ds_numel}
        return {**self.places(), **whole}


class TwiceJob(Job):
    """An engine whose backward pass computes blocks again, by DeepSpeed's own function or by torch's."""

    def __init__(self, stage: int, precision: str, own: bool) -> None:
        if own:
            deepspeed.checkpointing.configure(None, num_checkpoints=twice.BLOCKS)
        function = deepspeed.checkpointing.checkpoint if own else partial(checkpoint, use_reentrant=False)

        def model() -> twice.Model:
            found = twice.Model(function)
            self.fault = twice.Fault(found.layers())
            return found

        super().__init__(stage, precision, {"every": 1, "checks": ["self"]}, model=model)

    @property
    def module(self) -> twice.Model:
        found = self.engine.module
        assert isinstance(found, twice.Model)
        return found

    def step(self, between: Callable[[], None] = lambda: None) -> None:
        x = torch.randn(MICRO_BATCH, WIDTH, dtype=self.dtype, requires_grad=True)
        loss = self.engine(x).float().square().mean()
        between()
        self.engine.backward(loss)
        self.engine.step()


def _of_fp16_optimizer(optimizer: Any, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return master and moments of a parameter, of DeepSpeed's ``FP16_UnfusedOptimizer``, which bf16 without ZeRO has too."""
    for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for weight, master in zip(weights, masters, strict=True):
            if weight is parameter:
                return {"master": master.detach(), **_moments(optimizer.optimizer, master)}
    return {}


def _moments(optimizer: Any, stepped: torch.Tensor) -> dict[str, torch.Tensor]:
    state = optimizer.state.get(stepped, {})
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.shape == stepped.shape}


def sound(stage: int, precision: str, count: int) -> str:
    """Train with and without a witness. Return what it found, and whether memory is equal."""
    ends, verdicts, skipped = [], 0, 0
    checks = ["rest", "replicas", "nonfinite", "outlier", "self", "buddy", *["update"] * (stage > 0)]
    for witness in (None, {"every": 1, "checks": checks}):
        job = Job(stage, precision, witness, accumulation=2)
        for _ in range(count):
            job.step()
        verdicts += 0 if witness is None else len(job.watching.verdicts)
        skipped = int(job.engine.skipped_steps)
        passed = "" if witness is None else str(job.watching.passed()[0])
        ends.append({key: tensor.clone() for key, tensor in job.places().items()})
    return (
        f"{count} steps, of which {skipped} left out; verdicts {verdicts}; passed until {passed}; "
        f"memory equal: {equal(ends[1], ends[0])}"
    )


def main() -> None:
    given = arguments("flips and sound steps of DeepSpeed", "compute", "nan", "outlier", "twice", "update")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    deepspeed.init_distributed("gloo", verbose=False)
    logging.getLogger("unickpt").setLevel(logging.CRITICAL)
    for stage, precision in [*LAYOUTS, *(FP16 if given.what == "sound" and get_accelerator().is_fp16_supported() else [])]:
        name = f"ZeRO-{stage}, {precision}"
        left_out = {
            "nan": precision != "fp32",
            "outlier": precision != "fp32",
            "update": stage == 0,
        }.get(given.what, False)
        if given.only in name and not left_out:
            row(name, _found(stage, precision, given))
    leave()


def _found(stage: int, precision: str, given: argparse.Namespace) -> Any:
    if given.what == "sound":
        return sound(stage, precision, given.count)
    if given.what == "compute":
        found = computed.compute(ComputeJob(stage, precision), given.count, given.seed)
        if stage == 3:
            found += computed.compute(ComputeJob(stage, precision), given.count // 5, given.seed, [computed.GATHERED])
        return found
    if given.what == "twice":
        both = (TwiceJob(stage, precision, own) for own in (False, True))
        return sum((twice.twice(job, given.count, given.seed) for job in both), Counter())
    if given.what == "update":
        job = Job(stage, precision, {"every": 1, "checks": ["update"]})
        return steps.steps(job, [job.engine.optimizer.optimizer], given.count, given.seed)
    if given.what == "outlier":
        with tempfile.TemporaryDirectory() as folder:
            return nans.outliers(NanJob(stage, precision, folder, "outlier"), given.count, given.seed)
    if given.what == "nan":
        with tempfile.TemporaryDirectory() as folder:
            return nans.nans(NanJob(stage, precision, folder), given.count, given.seed)
    return _flips(stage, precision, given)


def _flips(stage: int, precision: str, given: argparse.Namespace) -> Counter[str]:
    return flips(Job(stage, precision, {"every": 1, "checks": ["rest", "replicas"]}), given.count, given.seed)


if __name__ == "__main__":
    main()
