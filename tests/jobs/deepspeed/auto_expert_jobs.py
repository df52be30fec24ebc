"""Engines with AutoEP of every layout, built as by a user, and their state by layer and expert.

DeepSpeed 0.19.8 cannot convert the models of transformers 5.24 (``_CanRecordRegistry.get() takes 2 positional arguments but 3
were given``), so the model has the names and shapes of Mixtral, and blocks of its own.
"""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as functional
from deepspeed.module_inject.layers import TensorParallel_Layer
from deepspeed.utils import groups

from tests.jobs.deepspeed import jobs
from tests.jobs.deepspeed.auto_expert_names import EXPERTS, HAS_AUTO_EP, AutoExpertLayout
from tests.jobs.deepspeed.jobs import Layout, config
from tests.jobs.deepspeed.megatron_model import mpu_of
from tests.jobs.deepspeed.model import VOCABULARY, WIDTH
from tests.jobs.deepspeed.parallel_jobs import forget_expert_groups, forget_groups, merged, of_all_ranks
from tests.jobs.deepspeed.tensor_jobs import PARALLEL_GROUPS, gather
from tests.jobs.deepspeed.truth import Truth, consolidated, optimizer_of

STATES = ("exp_avg", "exp_avg_sq")
LAYOUT = AutoExpertLayout
HIDDEN = 12
train = jobs.train
scramble = jobs.scramble


class Config:
    """What AutoEP reads of a model's configuration."""

    model_type = "mixtral"
    num_local_experts = EXPERTS
    num_experts_per_tok = 2
    hidden_size = WIDTH
    intermediate_size = HIDDEN


class Experts(nn.Module):
    """Parameters of all experts, as in transformers 5."""

    def __init__(self, frozen: bool, experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * HIDDEN, WIDTH) * 0.2)
        self.down_proj = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN) * 0.2, requires_grad=not frozen)


class SparseBlock(nn.Module):
    """Mixtral's block of experts, which AutoEP replaces."""

    def __init__(self, frozen: bool, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.experts = Experts(frozen, experts)
        self.top_k = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        scores, chosen = self.gate(flat).float().softmax(-1).topk(self.top_k, dim=-1)
        scores = (scores / scores.sum(-1, keepdim=True)).to(x.dtype)
        gates, ups = (flat @ self.experts.gate_up_proj.mT).chunk(2, dim=-1)  # of every expert for every token
        found = (functional.silu(gates) * ups) @ self.experts.down_proj.mT
        rows = torch.arange(len(flat))
        return sum(scores[:, k, None] * found[chosen[:, k], rows] for k in range(self.top_k)).reshape(x.shape)


class Layer(nn.Module):
    def __init__(self, frozen: bool, experts: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.mlp = SparseBlock(frozen, experts)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """Two layers of Mixtral's names."""

    def __init__(self, frozen: bool = False, experts: int = EXPERTS) -> None:
        super().__init__()
        self.config = Config()
        self.config.num_local_experts = experts
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Layer(frozen, experts) for _ in range(2))
        self.register_buffer("scale", torch.rand(3, 5))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.model.layers:
            x = layer(x)
        logits = x @ self.embed.weight.t() * self.scale.mean()
        return functional.cross_entropy(logits.float().reshape(-1, VOCABULARY), targets.reshape(-1))


def build(
    layout: AutoExpertLayout, *, seed: int, frozen: bool = False, experts: int = EXPERTS, model: Model | None = None,
    client_optimizer: Any = None, **more: Any,
) -> Any:  # fmt: skip
    """Return an engine whose parameters start from ``seed`` in every layout.

    Args:
        layout: layout on all ranks of this job.
        seed: seed of the first values.
        frozen: do not train one of the parameters of the experts.
        experts: number of experts of each layer.
        model: the model. Default: a new one.
        client_optimizer: optimizer of the user.
        more: keys of the DeepSpeed JSON.
    """
    if not HAS_AUTO_EP:
        raise unittest.SkipTest("this DeepSpeed has no AutoEP")
    forget_groups()
    forget_expert_groups()
    for name in PARALLEL_GROUPS:
        setattr(groups, name, None)
    torch.manual_seed(seed)
    parallel = {
        "enabled": layout.expert > 0, "autoep_size": max(layout.expert, 1), "preset_model": "mixtral", "use_grouped_mm": False,
    }  # fmt: skip
    cfg = config(
        Layout(layout.stage, layout.world, layout.precision), **{"gradient_clipping": 0.0, "expert_parallel": parallel, **more}
    )
    if layout.tensor > 1:
        cfg["tensor_parallel"] = {
            "autotp_size": layout.tensor,
            "partition_config": {"use_default_specs": False, "layer_specs": [
                {"patterns": [r".*\.up\.weight$"], "partition_type": "column"},
                {"patterns": [r".*\.down\.weight$"], "partition_type": "row"},
            ]},
        }  # fmt: skip
    if client_optimizer is not None:
        del cfg["optimizer"]
    model = model or Model(frozen, experts)
    trained = None if client_optimizer is not None else [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(
        model=model,
        model_parameters=trained,
        optimizer=client_optimizer,
        config=cfg,
        mpu=None if layout.sequence == 1 else mpu_of(1, layout.world, layout.sequence),
    )[0]


def mark(_engine: Any) -> None:
    """Nothing but tensors is of one rank."""


def truth_of(engine: Any) -> Truth:
    """Return the state of all experts, each apart, and of the dense parameters. Collective. Checks that copies are equal."""
    _link_all_states(engine.optimizer)
    own: Truth = {}
    every = consolidated(engine, STATES)
    for name, layer in engine.module.named_modules():
        if isinstance(layer, TensorParallel_Layer):
            for state in ("weight", "master", *STATES):
                gather(every, f"{state}/{name}", layer)
    for key, value in every.items():
        if key in ("groups", "step") or "tokens_per_expert" in key:
            continue
        own |= _by_expert(key, value, engine)
    for name, settings in _settings(engine).items():
        own |= {f"settings/{each}": settings for each in _names(name, engine)}
    return merged(of_all_ranks(own))


def _by_expert(key: str, value: Any, engine: Any) -> Truth:
    """Return a tensor of experts as one entry per expert. Written out here, as a reader of the guide would."""
    kind, _, name = key.partition("/")
    layer, found, _ = name.partition(".experts.")
    names = [f"{kind}/{each}" for each in _names(name, engine)] if name else [key]
    if not found:
        return {names[0]: value}
    module = engine.module.get_submodule(layer)
    first = getattr(module, "ep_rank", 0) * getattr(module, "num_local_experts", 0)
    assert value.shape[0] == getattr(module, "num_local_experts", EXPERTS)
    parts = value.chunk(2, dim=1) if len(names) == 2 else (value,)
    return {f"{own}[{first + at}]": each for own, part in zip(names, parts, strict=True) for at, each in enumerate(part)}


def _names(name: str, engine: Any) -> list[str]:
    """Return the names of AutoEP for the parameter of a plain model: two for a fused one."""
    for plain, own in (("gate_up_proj", ["w1", "w3"]), ("down_proj", ["w2"]), (".mlp.gate.", [".mlp.router.gate."])):
        if plain in name:
            return [name.replace(plain, each) for each in own]
    return [name]


def _link_all_states(optimizer: Any) -> None:
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def _settings(engine: Any) -> dict[str, Any]:
    """Return settings and step of each trained parameter, by name."""
    base, names = optimizer_of(engine), {p: name for name, p in engine.module.named_parameters()}
    found = {}
    for group, master, parameters in _stepped(engine.optimizer, base):
        settings = {k: v for k, v in group.items() if k not in ("params", "name", "moe") and not k.startswith("_ds")}
        for parameter in parameters:
            found[names[parameter]] = {**settings, "step": float(base.state[master]["step"])}
    return found


def _stepped(optimizer: Any, base: Any) -> Iterator[tuple[dict[str, Any], Any, list[Any]]]:
    """Yield group, tensor and parameters of each tensor that the optimizer steps on."""
    if hasattr(optimizer, "sub_group_to_group_id"):
        for at, master in enumerate(optimizer.fp32_partitioned_groups_flat):
            yield base.param_groups[optimizer.sub_group_to_group_id[at]], master, list(optimizer.fp16_groups[at])
        return
    keys = [key for key in ("bit16_groups", "fp16_groups") if hasattr(optimizer, key)]
    for at, group in enumerate(base.param_groups):
        for master in group["params"]:
            yield group, master, list(getattr(optimizer, keys[0])[at]) if keys else [master]


def common(truth: Truth, found: Truth) -> tuple[Truth, Truth]:
    """Return what a source and a target have in common: everything."""
    return dict(truth), found
