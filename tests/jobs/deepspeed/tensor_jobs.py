"""Engines with tensor parallelism (AutoTP) of every layout, built as by a user, and their gathered state."""

from __future__ import annotations

import copy
from typing import Any

import deepspeed
import torch
import torch.nn as nn
from deepspeed import comm as dist
from deepspeed.module_inject.layers import TensorParallel_Layer
from deepspeed.utils import groups

from tests.jobs.deepspeed import parallel_jobs
from tests.jobs.deepspeed.jobs import BATCH, Layout, config
from tests.jobs.deepspeed.model import batch
from tests.jobs.deepspeed.parallel_jobs import STATES, engine_of, merged, of_all_ranks
from tests.jobs.deepspeed.tensor_model import Model, division
from tests.jobs.deepspeed.tensor_names import TensorLayout
from tests.jobs.deepspeed.truth import Truth, consolidated

LAYOUT = TensorLayout
PARALLEL_GROUPS = ("_TENSOR_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP")


def build(layout: TensorLayout, *, seed: int, model: nn.Module | None = None, make: Any = None, **more: Any) -> Any:
    """Return an engine whose parameters start from ``seed`` in every layout. Odd seeds use ``zero.Init`` under ZeRO-3.

    Not in bf16: DeepSpeed 0.19.8 then makes the sliced embedding in fp32, and fails.

    Args:
        layout: layout on all ranks of this job.
        seed: seed of the first values.
        model: another model. Default: ``Model``.
        make: returns the optimizer of the user for a list of parameters. Default: the one of the JSON.
        more: keys of the DeepSpeed JSON.
    """
    parallel_jobs.forget_groups()
    for name in PARALLEL_GROUPS:
        setattr(groups, name, None)
    cfg = config(Layout(layout.stage, layout.world, layout.precision), **{"gradient_clipping": 0.0, **more})
    if layout.tensor > 1:
        vocabulary = {"vocab_parallel_lm_head": True} if layout.vocabulary == "rows" else {}
        cfg.setdefault("tensor_parallel", {
            "autotp_size": layout.tensor,
            "partition_config": {"use_default_specs": False, "layer_specs": division(layout.vocabulary)},
            **vocabulary,
        })  # fmt: skip
    if layout.tensor > 1 and layout.stage == 3:  # or the ranks may have different numbers of sub-groups: see the guide
        cfg["zero_optimization"] = {**cfg["zero_optimization"], "sub_group_size": 10**9}
    torch.manual_seed(seed)
    if model is None:
        early = layout.stage == 3 and layout.precision == "fp32" and seed % 2 == 1
        with deepspeed.zero.Init(config_dict_or_path=copy.deepcopy(cfg), enabled=early):
            model = Model()
    if make is None:
        return engine_of(model, cfg)
    del cfg["optimizer"]
    return engine_of(model, cfg, optimizer=make([p for p in model.parameters() if p.requires_grad]))


def train(engine: Any, steps: int) -> list[float]:
    """Train further, and return the global losses. The data depend only on the global step."""
    data = engine.seq_data_parallel_group
    losses = []
    for _ in range(steps):
        tokens = batch(engine.global_steps, BATCH, dist.get_rank(group=data), dist.get_world_size(group=data))[0]
        loss = engine(tokens) if isinstance(engine.module, Model) else engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().double().reshape(1).clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def scramble(engine: Any) -> None:
    """Overwrite state that training does not change, so that a load that does not restore it is detected."""
    parallel_jobs.scramble_frozen(engine)
    engine.module.scale.fill_(9)


def mark(engine: Any) -> None:
    """Give modules a state outside of tensors: this model has none."""


def truth_of(engine: Any) -> Truth:
    """Return the whole state, gathered by DeepSpeed's own layers. Collective. Checks that all ranks get the same."""
    own = {key: value for key, value in consolidated(engine, STATES).items() if "volatile" not in key}
    _add_empty(own, engine)
    for name, layer in engine.module.named_modules():
        if isinstance(layer, TensorParallel_Layer):
            for state in ("weight", "master", *STATES):
                gather(own, f"{state}/{name}", layer)
    if engine.autotp_size() > 1:  # not one of DeepSpeed's layers
        for key in [key for key in own if key.endswith("/places.weight")]:
            parts = [torch.empty(0)] * dist.get_world_size(group=groups.get_tensor_model_parallel_group())
            torch.distributed.all_gather_object(parts, own[key], group=groups.get_tensor_model_parallel_group())
            own[key] = torch.cat(parts, dim=1)
    everyone = of_all_ranks(own)
    assert all(found.keys() == own.keys() for found in everyone)
    return merged(everyone)


def _add_empty(own: Truth, engine: Any) -> None:
    """Add the states of parameters of which this rank has no element."""
    for name, p in engine.module.named_parameters():
        if p.requires_grad and f"master/{name}" not in own:
            own |= {f"{state}/{name}": p.detach().float().clone() for state in ("master", *STATES)}


def gather(own: Truth, prefix: str, layer: Any) -> None:
    """Replace a state of a layer's parameters by the whole state. The layer's own method gathers it."""
    kept = dict(layer._parameters)
    for name in kept:
        value = own.get(f"{prefix}.{name}")
        layer._parameters[name] = None if value is None else nn.Parameter(value.clone(), requires_grad=False)
    try:
        layer.gather_params([layer._parameters["weight"], *([layer.bias] if layer.bias is not None else [])])
        own |= {f"{prefix}.{name}": value.detach().clone() for name, value in layer._parameters.items() if value is not None}
    finally:
        layer._parameters.update(kept)


def common(truth: Truth, found: Truth) -> tuple[Truth, Truth]:
    """Return what a source and a target have in common: everything."""
    return dict(truth), found
