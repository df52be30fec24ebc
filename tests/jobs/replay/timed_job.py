"""Under torchrun: a job of a framework whose layers sleep, so that its compute times are known.

timed_job deepspeed|megatron LAYOUT RINGS STEPS LAYER_S SLOW_RANK EXTRA

Every layer sleeps ``LAYER_S`` seconds in its forward pass and twice as long in its backward pass. In the second half of the
steps, the layers of ``SLOW_RANK`` sleep longer by the fraction ``EXTRA``; -1 for no rank.
"""

from __future__ import annotations

import gc
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tests.support.framework_imports import import_framework

WARM_UP = 3  # steps before the first half


class SleepingLayers:
    """Adds sleep to layers, all for the same time or each for its own.

    Attributes:
        factor: multiplies it.
        low: multiplies it for a layer whose output is in bf16.
        asked_s: sum of what the layers were to sleep, which does not depend on the machine.
    """

    def __init__(self, layers: Iterable[torch.nn.Module], seconds: float | Sequence[float]) -> None:
        self.factor, self.low, self.asked_s = 1.0, 1.0, 0.0
        sleeping = self

        class Sleep(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor, own_s: float) -> torch.Tensor:
                ctx.own_s = own_s
                sleeping.sleep(own_s)
                return x.view_as(x)

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
                sleeping.sleep(2 * ctx.own_s)
                return grad, None

        def after(own_s: float) -> Callable[[Any, Any, Any], Any]:
            def hook(_module: Any, _inputs: Any, outputs: Any) -> Any:
                first = outputs[0] if isinstance(outputs, tuple) else outputs
                slept = Sleep.apply(first, own_s * (sleeping.low if first.dtype is torch.bfloat16 else 1.0))
                return (slept, *outputs[1:]) if isinstance(outputs, tuple) else slept

            return hook

        for at, layer in enumerate(layers):
            layer.register_forward_hook(after(seconds if isinstance(seconds, float) else seconds[at]))

    def sleep(self, seconds: float) -> None:
        self.asked_s += seconds * self.factor
        time.sleep(seconds * self.factor)


def deepspeed_job(layout: str, rings: str, seconds: float, **timing: Any) -> tuple[Callable[[], Any], SleepingLayers]:
    """Return a step of a layout, and its layers.

    Args:
        layout: ``zero1``, ``zero3``, ``pipeline``, ``pipeline8`` (microbatches, default 4), ``pipeline8x4`` (stages).
        rings: folder of the rings.
        seconds: that a layer sleeps.
        timing: further options of timing.
    """
    import deepspeed

    torch.manual_seed(1)
    width = 64
    microbatches, _, stages = layout.removeprefix("pipeline").partition("x") if layout.startswith("pipeline") else ("1", "", "")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": int(microbatches or 4),
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "unickpt": {"timing": {"enabled": True, "watch": False, "folder": rings, **timing}},
    }
    layers = [torch.nn.Linear(width, width) for _ in range(8)]
    sleeping = SleepingLayers(layers, seconds)
    if layout.startswith("pipeline"):
        module = deepspeed.pipe.PipelineModule(
            layers, num_stages=int(stages or 2), loss_fn=lambda out, target: (out - target).square().mean(),
            partition_method="uniform",
        )  # fmt: skip
        engine, *_ = deepspeed.initialize(model=module, config=config)
        data = iter([(torch.ones(4, width), torch.zeros(4, width))] * 100_000)
        return lambda: engine.train_batch(data), sleeping
    model = torch.nn.Sequential(*layers)
    config["zero_optimization"] = {"stage": int(layout.removeprefix("zero")), "stage3_param_persistence_threshold": 0}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step() -> None:
        engine.backward(engine(torch.ones(4, width)).mean())
        engine.step()

    return step, sleeping


def megatron_job(layout: str, rings: str, seconds: float, **timing: Any) -> tuple[Callable[[], Any], SleepingLayers]:
    """Return a step of a layout of the matrix, such as ``tp2pp2dp2``, and its layers."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    import megatron_unickpt
    from megatron_unickpt.testing.jobs import Job
    from megatron_unickpt.testing.layouts import Layout
    from unickpt.base.options.job import TimingOptions

    job = Job(Layout.parse(layout))
    megatron_unickpt.time_collectives(TimingOptions(**{"enabled": True, "watch": False, "folder": rings, **timing}))
    layers = [each for chunk in job.chunks for each in chunk.modules() if isinstance(each, TransformerLayer)]
    return lambda: job.train(1), SleepingLayers(layers, seconds)


def before_forks(arguments: list[str]) -> None:
    import_framework(arguments[0])


def main() -> None:
    warnings.filterwarnings("ignore")
    kind, layout, rings, steps, seconds = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5])
    slow, extra = int(sys.argv[6]), float(sys.argv[7])
    if kind == "megatron":
        import megatron_unickpt.testing.jobs  # noqa: F401 - before anything of megatron, and of torch.distributed
    import torch.distributed as dist

    from unickpt.diagnosis import session
    from unickpt.testing.launch import leave

    if kind == "deepspeed":
        import deepspeed

        deepspeed.init_distributed("gloo", verbose=False)
    else:
        dist.init_process_group("gloo")
    step, layers = (deepspeed_job if kind == "deepspeed" else megatron_job)(layout, rings, seconds)
    gc.collect()
    gc.freeze()
    for at in range(WARM_UP + steps):
        if at == WARM_UP + steps // 2 and dist.get_rank() == slow:
            layers.factor = 1.0 + extra
        step()
    dist.barrier()
    session.stop()
    leave()


if __name__ == "__main__":
    main()
