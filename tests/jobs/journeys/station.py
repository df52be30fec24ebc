"""Under torchrun: one station of a journey between frameworks. It loads, saves the loaded state, trains, and saves again.

station deepspeed|pipeline|megatron|torch LAYOUT FAMILY PRECISION SOURCE OUT STEPS FIRST_STEP

``SOURCE`` is a checkpoint (``-``: begin with random weights). ``OUT/loaded`` and ``OUT/trained`` are checkpoints,
``OUT/station.json`` has counters (of the schedule: its samples), the learning rate, losses, the logits of fixed tokens before
and after training, and the load's report.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.jobs.journeys.families import BATCH, DECAY, huggingface_model, rows
from tests.support.framework_imports import import_framework
from unickpt.checkpoint.load.checkpoint import Checkpoint

LR, SEED = 1e-3, 7


def linear(optimizer: Any) -> Any:
    """Return Trainer's default schedule, which equals Megatron's ``linear``."""
    from torch.optim.lr_scheduler import LambdaLR

    return LambdaLR(optimizer, lambda step: 1 - step / DECAY)


def deepspeed_station(
    layout: str, family: str, precision: str, source: str, out: Path, steps: int, first: int
) -> dict[str, Any]:
    import deepspeed
    import torch
    import torch.distributed as dist

    deepspeed.init_distributed("gloo", verbose=False)
    rank, world = dist.get_rank(), dist.get_world_size()
    config: dict[str, Any] = {
        "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH // world,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0, "torch_adam": True}},
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {"stage": int(layout.removeprefix("zero")), "stage3_param_persistence_threshold": 0},
        "unickpt": {"enabled": True},
    }  # fmt: skip
    model = huggingface_model(family, SEED + (source != "-"))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, lr_scheduler=linear)
    if source != "-":
        trained = Checkpoint.open(source).manifest.optimizer is not None  # otherwise it is a transformers model
        path, _ = engine.load_checkpoint(
            str(Path(source).parent), tag=Path(source).name, load_optimizer_states=trained, load_lr_scheduler_states=trained
        )
        assert path is not None
    schedule = engine.lr_scheduler.state_dict()["last_epoch"] * BATCH
    found = {"counters": {"steps": engine.global_steps, "samples": engine.global_samples, "schedule": schedule}}
    found |= {"rate": engine.get_lr()[0]}

    def logits() -> Any:
        engine.eval()
        with torch.no_grad():
            made = engine(rows(0)[:, :-1]).logits.float()
        engine.train()
        return made.tolist()

    found["logits"] = logits()
    engine.save_checkpoint(str(out), tag="loaded")
    losses = []
    for step in range(first, first + steps):
        batch = rows(step)[rank * BATCH // world : (rank + 1) * BATCH // world]
        scores = engine(batch[:, :-1]).logits.float()
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / world)
    engine.save_checkpoint(str(out), tag="trained")
    report = engine.checkpoint_engine.last_report if source != "-" else None
    return {**found, "losses": losses, "logits_after": logits(), "report": report.lines() if report else []}


def megatron_station(
    layout: str, family: str, precision: str, source: str, out: Path, steps: int, first: int
) -> dict[str, Any]:
    from megatron_unickpt.testing import jobs  # before anything of megatron
    from tests.jobs.journeys.megatron_job import FamilyJob
    import torch.distributed as dist

    from megatron_unickpt.edge import RUNTIME

    dist.init_process_group("gloo")
    job = FamilyJob(layout, family, seed=SEED + (source != "-"))
    del jobs, precision  # from the layout
    report: list[str] = []
    if source != "-":
        job.load(source)
        assert RUNTIME.last_report is not None
        report = RUNTIME.last_report.lines()
    found: dict[str, Any] = {"logits": job.logits(rows(0)[:, :-1]), "report": report}
    found |= {"counters": {"steps": job.step, "schedule": job.scheduler.num_steps}, "rate": job.optimizer.param_groups[0]["lr"]}
    job.save(out / "loaded")
    job.step = first
    found["losses"] = job.train(steps)
    job.save(out / "trained")
    return {**found, "logits_after": job.logits(rows(0)[:, :-1])}


def pipeline_station(
    layout: str, family: str, precision: str, source: str, out: Path, steps: int, first: int
) -> dict[str, Any]:
    from tests.jobs.journeys import pipeline_job

    assert family == pipeline_job.FAMILY
    seed, bf16 = SEED + (source != "-"), precision == "bf16"
    return pipeline_job.station(layout, source, out, steps, first, seed=seed, rate=LR, schedule=linear, bf16=bf16)


def torch_station(layout: str, family: str, precision: str, source: str, out: Path, steps: int, first: int) -> dict[str, Any]:
    """``layout``: the sizes of a mesh of replicas and shards, such as ``1x2``."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    import unickpt

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = huggingface_model(family, SEED + (source != "-"))
    if precision == "bf16":
        model = model.to(torch.bfloat16)
    mesh = init_device_mesh("cpu", tuple(map(int, layout.split("x"))), mesh_dim_names=("replica", "shard"))
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    schedule = linear(optimizer)
    found: dict[str, Any] = {"report": [], "counters": {"steps": 0, "samples": 0, "schedule": 0}}
    if source != "-":
        trained = Checkpoint.open(source).manifest.optimizer is not None  # otherwise it is a transformers model
        with_it = (optimizer, schedule) if trained else (None, None)
        start = unickpt.load_training(model, with_it[0], source, scheduler=with_it[1], dialect=family)
        counters = {"steps": start.step, "samples": start.samples, "schedule": schedule.last_epoch * BATCH}
        found = {"report": start.report.lines(), "counters": counters}
    found["rate"] = optimizer.param_groups[0]["lr"]

    def logits() -> Any:
        model.eval()
        with torch.no_grad():
            made = model(rows(0)[:, :-1]).logits.float()
        model.train()
        return made.tolist()

    def save(name: str, done: int) -> None:
        unickpt.save_training(model, optimizer, out / name, step=done, samples=done * BATCH, scheduler=schedule)

    found["logits"] = logits()
    save("loaded", first)
    losses = []
    for step in range(first, first + steps):
        batch = rows(step)[rank * BATCH // world : (rank + 1) * BATCH // world]
        scores = model(batch[:, :-1]).logits.float()
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # as DeepSpeed and Megatron do by default
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / world)
    save("trained", first + steps)
    return {**found, "losses": losses, "logits_after": logits()}


def before_forks(arguments: list[str]) -> None:
    if arguments[0] == "torch":
        import transformers.models.auto.modeling_auto
        import torch_unickpt.loading.load_training
        import torch_unickpt.saving.save_training  # noqa: F401

        return
    import_framework(arguments[0].replace("pipeline", "deepspeed"))
    if arguments[0] == "pipeline":
        from tests.jobs.journeys import pipeline_job  # noqa: F401
    elif arguments[0] == "deepspeed":
        import transformers.models.auto.modeling_auto  # noqa: F401
    else:
        from tests.jobs.journeys import megatron_job  # noqa: F401


def main() -> None:
    kind, layout, family, precision, source, out, steps, first = sys.argv[1:9]
    import torch

    torch.set_num_threads(1)
    stations = {
        "deepspeed": deepspeed_station, "pipeline": pipeline_station, "megatron": megatron_station, "torch": torch_station,
    }  # fmt: skip
    run = stations[kind]
    found = run(layout, family, precision, source, Path(out), int(steps), int(first))
    import torch.distributed as dist

    from unickpt.testing.launch import leave

    has_logits: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(has_logits, found["logits"] is not None)
    if has_logits.index(True) == dist.get_rank():
        (Path(out) / "station.json").write_text(json.dumps(found))
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
