"""Under torchrun: a job whose layers sleep for known times, in a layout that a plan has chosen.

planned_job JSON

The JSON has ``kind`` (``deepspeed`` or ``megatron``), ``rings``, ``steps``, ``layers`` (seconds that each layer sleeps forward
for one row, twice as long backward), ``microbatches`` and ``rows`` of a microbatch. ``every`` is the option
``timing.layers_every``. A DeepSpeed pipeline has ``parts``, or ``stages`` for even ones, and ``config`` with further keys.
Megatron has ``layout``, such as
``gpt-pp2dp2-dist``, ``batch``, and ``pipeline``, the value of ``--pipeline-model-parallel-layout``. With ``save``, a DeepSpeed
job resumes from the newest checkpoint there, and saves at the end. The last rank prints its losses.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tests.jobs.replay.timed_job import SleepingLayers
from tests.support.framework_imports import import_framework
from tests.support.result_lines import print_result

WIDTH = 64


def deepspeed_job(asked: dict[str, Any]) -> tuple[Callable[[], float], Any]:
    """Return a step of a pipeline, and its engine."""
    import deepspeed

    import ds_unickpt

    torch.manual_seed(1)
    rows = asked["rows"]
    layers: list[Any] = [torch.nn.Linear(WIDTH, WIDTH) for _ in asked["layers"]]
    SleepingLayers(layers, [seconds * rows for seconds in asked["layers"]])
    if asked["parts"]:
        stages = len(asked["parts"]) - 1
        layers, method = ds_unickpt.stage_layers(layers, asked["parts"])
    else:
        stages, method = asked["stages"], "uniform"
    module = deepspeed.pipe.PipelineModule(
        layers, num_stages=stages, loss_fn=lambda out, target: (out - target).square().mean(), partition_method=method
    )
    if asked["parts"]:
        assert list(module.parts) == asked["parts"]
    config = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": asked["microbatches"],
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "unickpt": {
            "enabled": True,
            "timing": {"enabled": True, "watch": False, "folder": asked["rings"], "layers_every": asked["every"]},
        },
    }
    config |= asked["config"]
    engine, *_ = deepspeed.initialize(model=module, config=config)
    data = iter([(torch.ones(rows, WIDTH), torch.zeros(rows, WIDTH))] * 100_000)
    return lambda: float(engine.train_batch(data)), engine


def megatron_job(asked: dict[str, Any]) -> Callable[[], float]:
    """Return a step of a Megatron job."""
    import megatron_unickpt
    from megatron_unickpt.testing import jobs
    from megatron_unickpt.testing.layouts import Layout
    from unickpt.base.options.job import TimingOptions

    rows = asked["rows"]

    class PlannedJob(jobs.Job):
        def _config(self, width: int) -> Any:
            config = super()._config(width)
            if not asked["pipeline"]:
                return config
            return dataclasses.replace(config, pipeline_model_parallel_layout=asked["pipeline"])

    layout = Layout.parse(asked["layout"])
    job = PlannedJob(layout, batch=asked["batch"], micro_batch=rows, layers=len(asked["layers"]))
    options = TimingOptions(enabled=True, watch=False, folder=asked["rings"], layers_every=asked["every"])
    megatron_unickpt.time_collectives(options)
    from megatron.core.transformer.transformer_layer import TransformerLayer

    found = [each for chunk in job.chunks for each in chunk.modules() if isinstance(each, TransformerLayer)]
    SleepingLayers(found, [asked["layers"][each.layer_number - 1] * rows / layout.tp for each in found])
    return lambda: job.train(1)[0]


def before_forks(arguments: list[str]) -> None:
    import_framework(json.loads(arguments[0])["kind"])


def main() -> None:
    warnings.filterwarnings("ignore")
    asked = {"every": 0, "rows": 1, "parts": None, "pipeline": None, "save": "", "config": {}, **json.loads(sys.argv[1])}
    if asked["kind"] == "megatron":
        import megatron_unickpt.testing.jobs  # noqa: F401 - before anything of megatron, and of torch.distributed
    import torch.distributed as dist

    from unickpt.diagnosis import session
    from unickpt.testing.launch import leave

    engine = None
    if asked["kind"] == "deepspeed":
        import deepspeed

        deepspeed.init_distributed("gloo", verbose=False)
        step, engine = deepspeed_job(asked)
    else:
        dist.init_process_group("gloo")
        step = megatron_job(asked)
    if asked["save"] and engine is not None:
        engine.load_checkpoint(asked["save"])
        if dist.get_rank() == dist.get_world_size() - 1:
            print_result("RESUMED", engine.global_steps)
    gc.collect()
    gc.freeze()
    losses = [step() for _ in range(asked["steps"])]
    if dist.get_rank() == dist.get_world_size() - 1:
        print_result("LOSSES", json.dumps(losses))
    if asked["save"] and engine is not None:
        engine.save_checkpoint(asked["save"])
    dist.barrier()
    session.stop()
    leave()


if __name__ == "__main__":
    main()
