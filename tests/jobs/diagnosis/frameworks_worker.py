"""Under torchrun: steps of real jobs of both frameworks, with collectives recorded by unickpt and torch's flight recorder.

frameworks_worker DIR deepspeed|megatron JOB ...        DIR/<job>-<rank>.ring and .json
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.framework_imports import import_framework

STEPS = 2


def deepspeed_job(name: str) -> Callable[[], Any]:
    """``zero0`` to ``zero3``, ``pipeline``, ``moe``: two steps of it."""
    import deepspeed
    import torch

    base: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}
    if name == "pipeline":
        layers = [torch.nn.Linear(16, 16) for _ in range(4)]
        module = deepspeed.pipe.PipelineModule(layers, num_stages=2, loss_fn=lambda out, target: (out - target).square().mean())
        engine, *_ = deepspeed.initialize(model=module, config={**base, "gradient_accumulation_steps": 2})
        data = iter([(torch.ones(2, 16), torch.zeros(2, 16))] * 100)
        return lambda: engine.train_batch(data)
    if name == "moe":
        expert = torch.nn.Linear(16, 16)
        model: torch.nn.Module = Mixture(deepspeed.moe.layer.MoE(16, expert, num_experts=2, ep_size=2, k=1, min_capacity=0))
    else:
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    stage = int(name.removeprefix("zero")) if name.startswith("zero") else 1
    config = {**base, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    parameters: Any = model.parameters()
    if name == "moe":
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

        parameters = split({"params": list(model.parameters()), "name": "all"})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)

    def step() -> None:
        engine.backward(engine(torch.ones(2, 16)).float().mean())
        engine.step()

    return step


def Mixture(layer: Any) -> Any:  # noqa: N802 - a class that can only be made where torch is
    import torch

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.experts = torch.nn.Linear(16, 16), layer

        def forward(self, x: Any) -> Any:
            return self.experts(self.before(x))[0]

    return Module()


def megatron_job(name: str) -> Callable[[], Any]:
    """A layout of the matrix: two steps of it."""
    from megatron_unickpt.testing.jobs import Job
    from megatron_unickpt.testing.layouts import Layout

    job = Job(Layout.parse(name))
    return lambda: job.train(1)


def before_forks(arguments: list[str]) -> None:
    import_framework(arguments[1])


def main() -> None:
    warnings.filterwarnings("ignore")
    folder, kind, names = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if kind == "megatron":
        import megatron_unickpt.testing.jobs  # noqa: F401 - before anything of megatron, and of torch.distributed
    import torch.distributed as dist

    from tests.jobs.diagnosis.counting import CallCounter
    from unickpt.testing.launch import leave

    if kind == "deepspeed":
        import deepspeed

        deepspeed.init_distributed("gloo", verbose=False)
    else:
        dist.init_process_group("gloo")
    for name in names:
        step = (deepspeed_job if kind == "deepspeed" else megatron_job)(name)
        step()  # what happens once only
        dist.barrier()
        with CallCounter(folder, name):
            for _ in range(STEPS):
                step()
            dist.barrier()
    leave()


if __name__ == "__main__":
    main()
