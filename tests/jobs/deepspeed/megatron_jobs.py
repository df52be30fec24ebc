"""Engines with Megatron-style tensor parallelism of every layout, as pipelines and as plain modules, and their whole state."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn as nn
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from tests.jobs.deepspeed import parallel_jobs
from tests.jobs.deepspeed.jobs import BATCH, Layout, config
from tests.jobs.deepspeed.megatron_model import CUTS, INFO, Classic, Embedding, Gated, head, joined, mpu_of
from tests.jobs.deepspeed.megatron_names import MegatronLayout
from tests.jobs.deepspeed.parallel_jobs import MICRO, STATES, engine_of, loss_of, merged, of_all_ranks, same, seed_layer
from tests.jobs.deepspeed.truth import Truth, consolidated

LAYOUT = MegatronLayout
AVERAGED, WHOLE = "parameter_to_average_patterns", "tp_replicated_parameter_patterns"
LAST = 5  # number of the head, which uses the tied module again
train = parallel_jobs.train


class Pipe(PipelineModule):
    """The model as a pipeline, which describes itself by a method, as in Megatron-DeepSpeed."""

    def universal_checkpoint_info(self) -> dict[str, Any]:
        return INFO


class Plain(nn.Module):
    """The same model without a pipeline, with the same names.

    DeepSpeed 0.19.8 writes ``universal_checkpoint_info`` into its own files, so it is a dict here.
    """

    def __init__(self, mpu: Any, seed: int) -> None:
        super().__init__()
        seed_layer(seed)
        self.tied_modules = nn.ModuleDict({"embed": Embedding(mpu)})
        for number, kind in ((1, Gated), (3, Classic), (4, Gated)):
            seed_layer(seed + number)
            self.add_module(str(number), kind(mpu))
        self.universal_checkpoint_info = INFO

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        embed = self.tied_modules["embed"]
        x = embed(tokens)
        for number in (1, 3, 4):
            x = self.get_submodule(str(number))(x)
        return loss_of(head(embed, x), targets)


def build(layout: MegatronLayout, *, seed: int, cut: int = 0, **more: Any) -> Any:
    """Return an engine whose layers start from ``seed``: layer ``n`` from ``seed + n``.

    Args:
        layout: layout on all ranks of this job.
        seed: seed of the first layer.
        cut: number of ranks among which the layers are cut, if the layout tells DeepSpeed another one.
        more: keys of the DeepSpeed JSON.
    """
    parallel_jobs.forget_groups()
    extra: dict[str, Any] = {"train_batch_size": BATCH // layout.sequence, "train_micro_batch_size_per_gpu": MICRO, **more}
    cfg = config(Layout(layout.stage, layout.world, layout.precision), **extra)
    mpu = mpu_of(cut or layout.tensor, layout.world, layout.sequence)
    if not layout.stages:
        return engine_of(Plain(mpu, seed), cfg, mpu=mpu if layout.tensor * layout.sequence > 1 else None)
    layers = [
        TiedLayerSpec("embed", Embedding, mpu, tied_weight_attr="words"),
        LayerSpec(Gated, mpu),
        same,
        LayerSpec(Classic, mpu),
        LayerSpec(Gated, mpu),
        TiedLayerSpec("embed", Embedding, mpu, forward_fn=head, tied_weight_attr="words"),
    ]
    topology = PipeModelDataParallelTopology(num_pp=layout.stages, num_mp=layout.tensor, num_dp=layout.data)
    return engine_of(
        Pipe(layers, topology=topology, loss_fn=loss_of, seed_layers=True, base_seed=seed, seed_fn=seed_layer), cfg
    )


def scramble(engine: Any) -> None:
    """Overwrite state that training does not change, so that a load that does not restore it is detected."""
    parallel_jobs.scramble_frozen(engine)
    for _, buffer in engine.module.named_buffers():
        buffer.fill_(9)


def mark(engine: Any) -> None:
    """Give modules a state outside of tensors: this model has none."""


def truth_of(engine: Any) -> Truth:
    """Return the whole state of all stages. Collective. Checks that copies are equal."""
    own = consolidated(engine, STATES)
    if engine.pipeline_parallelism and engine.grid.stage_id:
        for key in [key for key in own if "tied_modules.embed." in key and not key.endswith(".words")]:
            own[key.replace("tied_modules.embed.", f"tied_modules.embed@{LAST}.")] = own.pop(key)
    mpu = getattr(engine, "mpu", None)
    rank = 0 if mpu is None else int(mpu.get_tensor_model_parallel_rank())
    everyone = of_all_ranks((rank, own))
    ranks = [merged([state for at, state in everyone if at == rank]) for rank in sorted({at for at, _ in everyone})]
    for at, state in enumerate(ranks):
        for key in [key for key in state if _averaged(key) and at]:
            state[f"{key}@tp{at}"] = state.pop(key)
    whole = merged([{key: value for key, value in state.items() if not _cut(key)} for state in ranks])
    for key in ranks[0]:
        if _cut(key):
            parts = [state[key] for state in ranks]
            dim, sizes = _cut(key)
            whole[key] = joined(parts, dim, list(sizes) or [sum(part.shape[dim] for part in parts)])
    return whole


def _cut(key: str) -> Any:
    """Return how a tensor is divided; None for a replica."""
    return next((cut for name, cut in CUTS.items() if key.endswith(f".{name}")), None)


def _averaged(key: str) -> bool:
    """Whether the tensor-parallel ranks have values of their own of a tensor."""
    name = key.partition("/")[2]
    return any(re.fullmatch(pattern, name) for pattern in INFO.get(AVERAGED, ()))


def let_ranks_differ(engine: Any) -> Any:
    """Give the parameters to average another gradient on each tensor-parallel rank."""
    rank = int(engine.mpu.get_tensor_model_parallel_rank()) if getattr(engine, "mpu", None) is not None else 0
    for name, parameter in engine.module.named_parameters():
        if _averaged(f"weight/{name}"):
            parameter.register_hook(lambda gradient: gradient * (1 + rank) + rank * 0.01)
    return engine


def _means(truth: Truth, found: Truth) -> Truth:
    """Return the values to expect of parameters to average: the ranks' own, or with other ranks their mean."""
    expected = {key: value for key, value in truth.items() if "@tp" not in key}
    for key in [key for key in expected if _averaged(key)]:
        states = [f"{state}/{key.partition('/')[2]}" for state in (key.partition("/")[0], "master")]
        known = [[truth[k] for k in (f"{state}@tp{at}" if at else state for at in range(9)) if k in truth] for state in states]
        targets = [k for k in (f"{key}@tp{at}" if at else key for at in range(9)) if k in found]
        values = known[0]
        if len(targets) != len(values) and len(values) > 1:  # a weight is the cast of the mean master
            mean = sum(known[1 if key.startswith("weight/") else 0]) / len(values)
            values = [mean.to(truth[key].dtype)]
        expected |= dict(zip(targets, values if len(values) == len(targets) else values * len(targets), strict=True))
    return expected


def common(truth: Truth, found: Truth) -> tuple[Truth, Truth]:
    """Return what a source and a target have in common.

    A stage's own copy of a tied parameter exists only with several stages: without one in the checkpoint it has the original's
    value. Both may pad the vocabulary differently: rows that the source lacks are zeros.
    """
    truth = _means(truth, found)
    expected = {key: value for key, value in truth.items() if "@" not in key or key in found}
    for key in found.keys() - expected.keys():
        if "@" in key:
            expected[key] = truth[key.replace(f"@{LAST}", "")]
    for key in [key for key in expected if key.endswith(".words")]:
        rows = len(found[key])
        more = expected[key].new_zeros(max(rows - len(expected[key]), 0), expected[key].shape[1])
        expected[key] = torch.cat([expected[key][:rows], more])
    return expected, found
