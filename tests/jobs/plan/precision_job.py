"""Under torchrun: a data parallel job in which some ranks are slow, and a plan may lower the precision of their layers.

precision_job JSON

The JSON has ``kind`` (``deepspeed`` or ``megatron``), ``rings``, ``steps``, ``layers`` (seconds that each layer sleeps forward,
twice as long backward), ``slow`` (ranks whose layers sleep ``SLOW`` times as long, and half of that in bf16), ``layout`` of
Megatron, and ``plan``, a file of ``unickpt plan precision`` or ''. With ``save``, the job saves there at the end. With
``load``, it resumes from there. The last rank prints its losses, its step times, and what its layers were to sleep in a step.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tests.jobs.replay.timed_job import SleepingLayers
from tests.support.framework_imports import import_framework
from tests.support.result_lines import print_result

WIDTH, EVERY, SLOW, SPEEDUP = 64, 3, 1.6, 2.0
Step = Callable[[], float]


class Net(torch.nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x - target).square().mean()


def deepspeed_job(asked: dict[str, Any], slow: bool) -> tuple[Step, Callable[[], None], SleepingLayers]:
    """Return a step, a save at the end, and the layers."""
    import deepspeed

    torch.manual_seed(1)
    net = Net(len(asked["layers"]))
    sleeping = _sleeping(list(net.layers), asked["layers"], slow)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": asked["stage"], "stage3_param_persistence_threshold": 0},
        "unickpt": {
            "enabled": True, "precision": asked["plan"],
            "timing": {"enabled": True, "watch": False, "folder": asked["rings"], "layers_every": EVERY},
        },
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    if asked["load"]:
        assert engine.load_checkpoint(asked["load"])[0] is not None

    def step() -> float:
        made = torch.Generator().manual_seed(engine.global_steps)
        loss = engine(torch.randn(4, WIDTH, generator=made), torch.randn(4, WIDTH, generator=made) / 2)
        engine.backward(loss)
        engine.step()
        return float(loss)

    def save() -> None:
        assert engine.save_checkpoint(asked["save"])

    return step, save, sleeping


def megatron_job(asked: dict[str, Any], slow: bool) -> tuple[Step, Callable[[], None], SleepingLayers]:
    """Return a step, a save at the end, and the layers."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    import megatron_unickpt
    from megatron_unickpt.testing import jobs
    from megatron_unickpt.testing.layouts import Layout
    from unickpt.base.options.job import TimingOptions

    job = jobs.Job(Layout.parse(asked["layout"]), width=WIDTH, layers=len(asked["layers"]))
    megatron_unickpt.time_collectives(TimingOptions(enabled=True, watch=False, folder=asked["rings"], layers_every=EVERY))
    layers = [each for chunk in job.chunks for each in chunk.modules() if isinstance(each, TransformerLayer)]
    sleeping = _sleeping(layers, [asked["layers"][each.layer_number - 1] for each in layers], slow)
    if asked["plan"]:
        megatron_unickpt.apply_precision(job.chunks, asked["plan"])
    if asked["load"]:
        megatron_unickpt.load(asked["load"], job.chunks, job.optimizer)
    return lambda: job.train(1)[0], lambda: megatron_unickpt.save(asked["save"], job.chunks, job.optimizer), sleeping


def _sleeping(layers: list[torch.nn.Module], seconds: list[float], slow: bool) -> SleepingLayers:
    sleeping = SleepingLayers(layers, [each * (SLOW if slow else 1.0) for each in seconds])
    sleeping.low = 1 / SPEEDUP
    return sleeping


def before_forks(arguments: list[str]) -> None:
    import_framework(json.loads(arguments[0])["kind"])


def main() -> None:
    warnings.filterwarnings("ignore")
    asked = {"plan": "", "save": "", "load": "", "stage": 1, **json.loads(sys.argv[1])}
    if asked["kind"] == "megatron":
        import megatron_unickpt.testing.jobs  # noqa: F401 - before anything of megatron, and of torch.distributed
    import torch.distributed as dist

    from unickpt.diagnosis import session
    from unickpt.testing.launch import leave

    if asked["kind"] == "deepspeed":
        import deepspeed

        deepspeed.init_distributed("gloo", verbose=False)
    else:
        dist.init_process_group("gloo")
    made = deepspeed_job if asked["kind"] == "deepspeed" else megatron_job
    step, save, sleeping = made(asked, dist.get_rank() in asked["slow"])
    gc.collect()
    gc.freeze()
    losses, took = [], []
    for _ in range(asked["steps"]):
        began = time.monotonic()
        losses.append(step())
        took.append(time.monotonic() - began)
    if asked["save"]:
        save()
    if dist.get_rank() == dist.get_world_size() - 1:
        print_result("RUN", json.dumps({"losses": losses, "steps_s": took, "asked_s": sleeping.asked_s / asked["steps"]}))
    dist.barrier()
    session.stop()
    leave()


if __name__ == "__main__":
    main()
