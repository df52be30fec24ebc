"""Loads from checkpoints without a part of the state, into engines of every optimizer wrapper.

``rolled_back`` compares an engine that has trained and then loads a checkpoint with a new engine that loads it.
``partly_loaded`` loads, checks that the next step begins from what was loaded, and trains on.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule

from tests.jobs.deepspeed import parallel_jobs, pipeline_jobs
from tests.jobs.deepspeed.jobs import build, config, train
from tests.jobs.deepspeed.model import WIDTH, Block, Model
from tests.jobs.deepspeed.pipeline_names import PipelineLayout
from tests.jobs.deepspeed.resumes import here
from tests.jobs.deepspeed.truth import optimizer_of
from unickpt.base.errors import MismatchError

CPU_ADAM = {"type": "AdamW", "params": {"lr": 1e-2}}
NO_WARMUP: dict[str, Any] = {"scheduler": {}}
Build = Callable[..., Any]


def _plain(stage: int, precision: str = "fp32", **more: Any) -> Build:
    return lambda seed, **extra: build(here(stage, precision), seed=seed, **more, **extra)


def _zero(stage: int, precision: str = "fp32", **zero: Any) -> Build:
    settings = {"stage": stage, "sub_group_size": 1500, "stage3_param_persistence_threshold": 40, **zero}
    more = {"optimizer": CPU_ADAM} if "offload_optimizer" in zero else {}
    return _plain(stage, precision, zero_optimization=settings, **more)


def _in_part(seed: int, **extra: Any) -> Any:
    """Build an engine that offloads half of its sub-groups. See ``scenarios_offload``."""
    engine = _zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5})(seed, **extra)
    places = engine.optimizer.subgroup_to_device
    places.update(dict.fromkeys(list(places)[: len(places) // 2], "cpu:0"))
    return engine


def _fp16(stage: int) -> Build:
    def make(seed: int, **extra: Any) -> Any:
        get_accelerator().is_fp16_supported = lambda: True
        scaling = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
        return build(here(stage, "fp16"), seed=seed, fp16=scaling, **extra)

    return make


def _pipeline(stage: int, precision: str = "fp32") -> Build:
    def make(seed: int, **extra: Any) -> Any:
        layout = PipelineLayout(here(0).world, 1, stage, precision)
        return pipeline_jobs.build(layout, seed=seed, layers=extra.pop("layers", None), **extra)

    return make


WRAPPERS: dict[str, Build] = {
    "ZeRO-0": _plain(0),
    "FP16_UnfusedOptimizer": _plain(0, "bf16"),
    "FP16_Optimizer": _plain(0, "bf16", optimizer=CPU_ADAM),
    "BF16_Optimizer": _plain(1, "bf16o"),
    "ZeRO-1": _plain(1),
    "ZeRO-2": _plain(2, "bf16"),
    "ZeRO-2 round robin": _zero(2, round_robin_gradients=True),
    "ZeRO-3": _plain(3, "bf16"),
    "ZeRO-1 offload": _zero(1, offload_optimizer={"device": "cpu"}),
    "ZeRO-2 offload": _zero(2, offload_optimizer={"device": "cpu"}),
    "ZeRO-3 offload": _zero(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}),
    "ZeRO-3 ratio": _in_part,
    "ZeRO-0 fp16": _fp16(0),
    "ZeRO-2 fp16": _fp16(2),
    "ZeRO-3 fp16": _fp16(3),
    "pipeline ZeRO-0": _pipeline(0),
    "pipeline ZeRO-1": _pipeline(1, "bf16"),
}
SOURCES = ("before the first step", "in mid-run", "of another layout before the first step", "of another layout")
KINDS = ("weights only", "no optimizer", "module only", "another optimizer", "part of the parameters")


def train_on(engine: Any, steps: int) -> list[float]:
    return (parallel_jobs.train if engine.pipeline_parallelism else train)(engine, steps)


def start_fresh(engine: Any) -> Any:
    """Set ``missing_state`` of an engine to ``fresh``."""
    ours = engine.checkpoint_engine
    ours.options = dataclasses.replace(ours.options, missing_state="fresh")
    return engine


# ---------------------------------------------------------------- state of an engine


def state_of(engine: Any) -> dict[str, Any]:
    """Return the state of this rank from which training goes on, without unickpt."""
    wrapper, base = engine.optimizer, optimizer_of(engine)
    masters = getattr(wrapper, "fp32_partitioned_groups_flat", None) or [p for g in base.param_groups for p in g["params"]]
    found: dict[str, Any] = {"steps": [engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps]}
    for number, master in enumerate(masters):
        real = _real_elements(wrapper, number)
        found[f"master {number}"] = _copied(master.detach()[real])
        for kind, optimizer in (("state", base), ("second state", getattr(wrapper, "backup_optimizer", None))):
            state = {} if optimizer is None else optimizer.state.get(master, {})
            same = {key for key, value in state.items() if isinstance(value, torch.Tensor) and value.shape == master.shape}
            found[f"{kind} {number}"] = _copied({key: v[real] if key in same and v.dim() else v for key, v in state.items()})
    found["groups"] = [_copied({k: v for k, v in group.items() if k != "params"}) for group in base.param_groups]
    for name, parameter in engine.module.named_parameters():
        found[f"weight {name}"] = _copied(parameter.ds_tensor[: _real(parameter)] if hasattr(parameter, "ds_id") else parameter)
    found |= {f"buffer {name}": _copied(b) for name, b in engine.module.named_buffers() if "volatile" not in name}
    scheduler = engine.lr_scheduler
    found["scheduler"] = None if scheduler is None else [_copied(scheduler.state_dict()), scheduler.get_last_lr()]
    for name in ("loss_scaler", "loss_scale_config"):
        if engine.fp16_enabled() and getattr(wrapper, name, None) is not None:
            found["scaler"] = _copied(vars(getattr(wrapper, name)))
    found["generators"] = [torch.get_rng_state(), random.getstate()[1]]
    if engine.pipeline_parallelism:
        found["micro-batches"] = engine.module.micro_offset
    return found


def _real(parameter: Any) -> int:
    """Return the number of elements in this rank's part of a ZeRO-3 parameter. DeepSpeed does not initialise its padding."""
    size, rank = int(parameter.partition_numel()), torch.distributed.get_rank(parameter.ds_process_group)
    return max(min(size, int(parameter.ds_numel) - rank * size), 0)


def _real_elements(wrapper: Any, number: int) -> Any:
    """Return the index of the elements of a master that are no padding of ZeRO-3."""
    if not hasattr(wrapper, "fp32_partitioned_groups_flat"):
        return ...
    parameters = wrapper.fp16_groups[number]
    return torch.cat([torch.arange(int(p.partition_numel())) < _real(p) for p in parameters])


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(item) for item in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def unequal(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return the keys of two states whose values differ, bit for bit, in type, dtype or shape."""
    return sorted(key for key in expected.keys() | found.keys() if not _equal(expected.get(key), found.get(key)))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b)]
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and bool(a == b)


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """Return all weights and buffers of this rank's modules. Collective."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            found[name] = parameter.detach().clone()
    return found | {name: b.detach().clone() for name, b in engine.module.named_buffers() if "volatile" not in name}


# ---------------------------------------------------------------- sources


def source_of(folder: Path, wrapper: str, source: str) -> Path:
    """Save a checkpoint of a kind of ``SOURCES`` for a wrapper, and return its directory."""
    place = folder / source.replace(" ", "-")
    make = WRAPPERS[wrapper]
    if source.startswith("of another layout"):
        make = _pipeline(1) if wrapper == "pipeline ZeRO-0" else _pipeline(0) if "pipeline" in wrapper else _plain(1)
    engine = make(31)
    train_on(engine, 0 if source.endswith("before the first step") else 2)
    assert engine.save_checkpoint(str(place)) is True
    return place


def rolled_back(folder: Path, wrapper: str, source: str) -> list[str]:
    """Return what differs between a new engine and one that has trained, after both have loaded a checkpoint."""
    place = source_of(folder, wrapper, source)
    states, losses = [], []
    for seed, steps in ((32, 0), (33, 3)):
        engine = WRAPPERS[wrapper](seed, gradient_clipping=0.0)
        train_on(engine, steps)
        engine.load_checkpoint(str(place))
        states.append(state_of(engine))
        losses.append(train_on(engine, 3))
    return [*unequal(*states), *(["losses of later steps"] if losses[0] != losses[1] else [])]


def _without_optimizer(pipeline: bool, seed: int) -> Any:
    cfg = config(here(0), **({"train_micro_batch_size_per_gpu": parallel_jobs.MICRO} if pipeline else {}))
    del cfg["optimizer"], cfg["scheduler"]
    parallel_jobs.forget_groups()
    torch.manual_seed(seed)
    model: Any = Model()
    if pipeline:
        model = PipelineModule(pipeline_jobs.specs(), num_stages=here(0).world, loss_fn=parallel_jobs.loss_of)
    return deepspeed.initialize(model=model, config=cfg)[0]


class _FrozenBlock(Block):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.requires_grad_(False)


def _with_frozen(pipeline: bool, seed: int) -> Any:
    if pipeline:
        layers = pipeline_jobs.specs()
        layers[2] = LayerSpec(_FrozenBlock, WIDTH)
        return _pipeline(0)(seed, layers=layers)
    torch.manual_seed(seed)
    model = Model()
    model.embed.weight.requires_grad_(False)
    return _plain(0)(seed, model=model)


def _partial_source(folder: Path, wrapper: str, kind: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """Save the checkpoint for a kind of ``KINDS``. Returns its folder and its weights."""
    pipeline = "pipeline" in wrapper
    make = _pipeline(0) if pipeline else _plain(0)
    if kind == "weights only":
        engine = _without_optimizer(pipeline, 41)
    elif kind == "another optimizer":
        engine = make(41, optimizer={"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}, **NO_WARMUP)
    elif kind == "part of the parameters":
        engine = _with_frozen(pipeline, 41)
    else:
        engine = make(41)
    if engine.optimizer is not None:
        train_on(engine, 2)
    assert engine.save_checkpoint(str(folder)) is True
    return folder, weights(engine)


def partly_loaded(folder: Path, wrapper: str, kind: str) -> list[str]:
    """Return the problems of loads of one kind into an engine of one wrapper, which first is new and then has trained."""
    place, expected = _partial_source(folder, wrapper, kind)
    engine, problems = WRAPPERS[wrapper](42, **NO_WARMUP), []
    refused = kind in ("weights only", "part of the parameters", "another optimizer")
    load = {"module only": {"load_module_only": True}, "no optimizer": {"load_optimizer_states": False}}.get(kind, {})
    for age in ("new", "trained"):
        if refused:
            before = state_of(engine)
            with pytest.raises(MismatchError, match='"missing_state": "fresh"'):
                engine.load_checkpoint(str(place))
            problems += [f"{age}: a refused load changed {key}" for key in unequal(before, state_of(engine))]
            engine.load_checkpoint(str(place), load_optimizer_states=False)
            problems += [f"{age}, without optimizer: {text}" for text in _next_steps(engine, expected)]
            start_fresh(engine)
        engine.load_checkpoint(str(place), **load)
        problems += [f"{age}: {text}" for text in _next_steps(engine, expected)]
        engine.checkpoint_engine.options = dataclasses.replace(engine.checkpoint_engine.options, missing_state="error")
    return problems


def _next_steps(engine: Any, expected: dict[str, torch.Tensor]) -> list[str]:
    """Make a step that changes nothing, and one that trains. Returns the problems."""
    loaded = weights(engine)
    wrong = [
        f"{name} is not loaded"
        for name in sorted(expected.keys() & loaded.keys())
        if not torch.equal(expected[name].to(loaded[name].dtype), loaded[name])
    ]
    groups = [group for each in (optimizer_of(engine), getattr(engine.optimizer, "backup_optimizer", None)) if each is not None
              for group in each.param_groups]  # fmt: skip
    before = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = 0.0
    train_on(engine, 1)
    wrong += [f"the first step changed {name}" for name, value in weights(engine).items()
              if name != "seen" and not torch.equal(value, loaded[name])]  # fmt: skip
    for group, lr in zip(groups, before, strict=True):
        group["lr"] = lr
    train_on(engine, 1)
    changed = weights(engine)
    wrong += ["the second step changed nothing"] * all(
        torch.equal(changed[name], loaded[name]) for name in loaded if name != "seen"
    )
    return wrong
