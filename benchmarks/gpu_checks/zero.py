"""DeepSpeed: save, load as another stage and on another number of ranks, beside its own save and DCP, in one run."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_checks import faults
from benchmarks.gpu_checks.place import Place
from benchmarks.gpu_checks.rows import NotHereError, Rows
from benchmarks.measure import slowest, small_buckets

STEPS = 3
LATE_ROW = "ZeRO-1 bf16: a late rank"
STATES = ("master", "exp_avg", "exp_avg_sq")
# name -> stage, precision, stage that it is loaded as
KINDS: dict[str, tuple[int, str, int]] = {
    "ZeRO-1 bf16": (1, "bf16", 3),
    "ZeRO-2 bf16": (2, "bf16", 1),
    "ZeRO-3 bf16": (3, "bf16", 2),
    "ZeRO-1 fp16": (1, "fp16", 2),
    "ZeRO-2 bf16, offloaded": (2, "bf16", 3),
}


def save_row(kind: str) -> str:
    return f"{kind}: save"


def load_row(kind: str, world: int) -> str:
    return f"{kind}: load as ZeRO-{KINDS[kind][2]} on {world} ranks"


def build(place: Place, kind: str, *, loaded: bool, width: int = 0, timing: Mapping[str, Any] | None = None) -> Any:
    """Return an engine, as it saves or as it loads.

    Args:
        place: device and backend.
        kind: one of ``KINDS``.
        loaded: with the stage that the kind is loaded as, and other weights.
        width: of the layers; 0: as large as the place allows.
        timing: options of ``timing``.
    """
    import deepspeed

    stage, precision, other = KINDS[kind]
    if place.dry and precision == "fp16":
        raise NotHereError("DeepSpeed refuses fp16 on its CPU accelerator")
    if place.dry and "offloaded" in kind:
        raise NotHereError("nothing to offload from on the CPU accelerator")
    torch.manual_seed(2 if loaded else 1)
    width = width or (256 if place.dry else 2048)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8)))
    zero: dict[str, Any] = small_buckets(other if loaded else stage)
    if "offloaded" in kind:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True, "lr": 1e-3}},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # its own would be compiled, which takes minutes
        "unickpt": {"enabled": True, "async_save": True, "timing": dict(timing or {})},
        precision: {"enabled": True},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def train(place: Place, engine: Any, steps: int) -> None:
    first = next(iter(engine.module.parameters()))
    width = getattr(first, "ds_shape", first.shape)[1]
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.rand(2, width, generator=generator).to(place.device, first.dtype)
        engine.backward(engine(x).float().pow(2).mean())
        engine.step()


def consolidated(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Masters and optimizer states of an engine's model through DeepSpeed's own accessors, on the CPU. Collective."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        for state in STATES:
            value = (
                safe_get_full_fp32_param(parameter) if state == "master" else safe_get_full_optimizer_state(parameter, state)
            )
            found[f"{name} {state}"] = value.detach().cpu().clone()
    return found


@contextlib.contextmanager
def natively(engine: Any) -> Iterator[None]:
    """DeepSpeed's own saves on an engine that has ours."""
    ours = engine.checkpoint_engine
    engine.checkpoint_engine = ours.native
    try:
        yield
    finally:
        engine.checkpoint_engine = ours


def train_late(place: Place, fault: str, culprit: int, rings: str) -> None:
    """A rank of a job that trains for ever; one rank is late in each step."""
    del fault  # the only one
    begin(place)
    rank = dist.get_rank()
    # the ranks share a local rank where they share a device, and each first local rank would start an agent
    timing = {"enabled": True, "device": not place.dry, "watch": rank == 0, "folder": rings}
    engine = build(place, "ZeRO-1 bf16", loaded=False, width=256, timing=timing)
    for step in itertools.count():
        late = rank == culprit and step >= faults.AT_STEP
        if late and step == faults.AT_STEP:
            Path(rings, faults.BEGUN).touch()
        time.sleep(faults.LATE_S if late else faults.STEP_S)
        train(place, engine, 1)


def preload() -> None:
    """Import DeepSpeed in the parent of the ranks, once for all. On a device this would use CUDA before the forks."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # noqa: F401


def check_late(place: Place, path: Path, limit_s: float) -> None:
    """A late rank of a real job is named. Called in the parent of the ranks."""
    rows = Rows(path, "deepspeed", place.name if place.dry else f"{place.backend}, {place.ranks} ranks")
    with rows.row(LATE_ROW, f"rank {place.ranks - 1} is named") as row:
        if place.ranks < 3:
            raise NotHereError("needs three ranks that communicate")
        faults.make(place, faults.FAULTS["straggler"], row, limit_s, train_late)


def begin(place: Place) -> None:
    import deepspeed

    import ds_unickpt  # noqa: F401 - this checkout may not be installed, so nothing has armed the hooks

    warnings.filterwarnings("ignore")
    deepspeed.init_distributed(place.backend, verbose=False)


def check_saves(place: Place, path: Path, folder: Path, kinds: tuple[str, ...]) -> None:
    """Train and save every kind. All ranks call it."""
    begin(place)
    rank = dist.get_rank()
    rows = Rows(path if rank == 0 else None, "deepspeed", place.name)
    cpu = dist.new_group(backend="gloo")
    for kind in kinds:
        with rows.row(save_row(kind), "committed") as row:
            engine = build(place, kind, loaded=False)
            train(place, engine, STEPS)
            where = folder / kind
            truth = consolidated(engine.module)
            mine = sum(value.numel() * value.element_size() for value in truth.values())
            for tag in ("first", "t"):
                place.synchronize()
                begun = time.perf_counter()
                stall = slowest_here(place, lambda e=engine, w=where, t=tag: e.save_checkpoint(str(w), tag=t))
                engine.checkpoint_engine.saver.finish()
                dist.barrier()
                written = time.perf_counter() - begun
            row.values |= {"MB": mine / 1e6, "stall ms": stall * 1e3, "committed ms": written * 1e3}
            row.require(bool(engine.checkpoint_engine.last_save.committed), "not committed")
            with natively(engine):
                row.values["DeepSpeed's own ms"] = 1e3 * slowest_here(
                    place, lambda e=engine, w=where: e.save_checkpoint(f"{w} own", tag="t")
                )
            row.values["DCP async_save stall ms"] = 1e3 * dcp_stall(place, cpu, where, truth)
            if rank == 0:
                torch.save(truth, f"{where}.truth")
            dist.barrier()
            engine.destroy()
    dist.barrier()


def dcp_stall(place: Place, group: Any, where: Path, truth: dict[str, torch.Tensor]) -> float:
    """Seconds for which DCP's async_save of this rank's share of the state holds the caller, the second time."""
    import torch.distributed.checkpoint as dcp

    rank, world = dist.get_rank(), dist.get_world_size()
    share = {name: value.to(place.device) for name, value in list(truth.items())[rank::world]}
    seconds = 0.0
    for turn in range(2):
        pending: list[Any] = []
        seconds = slowest_here(
            place,
            lambda to=pending, at=f"{where} dcp{turn}": to.append(
                dcp.async_save(dict(share), checkpoint_id=at, process_group=group)
            ),
        )
        pending[0].result()
    return seconds


def slowest_here(place: Place, action: Any) -> float:
    """Seconds of an action on the slowest rank. The device is idle before it."""
    place.synchronize()
    if place.backend == "gloo":
        return slowest(action)
    dist.barrier()
    place.synchronize()
    begun = time.perf_counter()
    action()
    taken = torch.tensor([time.perf_counter() - begun], device=place.device)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken.item())


def check_loads(place: Place, path: Path, folder: Path, kinds: tuple[str, ...]) -> None:
    """Load every kind into an engine of another stage and seed. All ranks call it."""
    begin(place)
    rows = Rows(path if dist.get_rank() == 0 else None, "deepspeed", place.name)
    for kind in kinds:
        with rows.row(load_row(kind, dist.get_world_size()), "every bit") as row:
            engine = build(place, kind, loaded=True)
            if not Path(f"{folder / kind}.truth").is_file():
                raise NotHereError("the save of this kind has failed")
            train(place, engine, 1)  # other states than those of the file
            seconds = slowest_here(place, lambda e=engine, w=folder / kind: e.load_checkpoint(str(w), tag="t"))
            truth, found = torch.load(f"{folder / kind}.truth", weights_only=True), consolidated(engine.module)
            row.values |= {"ms": seconds * 1e3, "tensors": len(found)}
            wrong = [name for name, value in truth.items() if name not in found or not torch.equal(value, found[name])]
            row.require(not wrong, f"{len(wrong)} of {len(truth)} tensors differ, such as {wrong[:3]}")
            train(place, engine, 1)
            engine.destroy()
    dist.barrier()
