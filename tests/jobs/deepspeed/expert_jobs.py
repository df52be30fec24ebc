"""Engines with experts (``deepspeed.moe``) of every layout, built as by a user, and their state by global names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as functional
from deepspeed import comm as dist
from deepspeed.module_inject.layers import TensorParallel_Layer
from deepspeed.moe import mappings
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups

from tests.jobs.deepspeed import jobs
from tests.jobs.deepspeed.expert_names import EXPERTS, ExpertLayout
from tests.jobs.deepspeed.jobs import Layout, config
from tests.jobs.deepspeed.megatron_model import mpu_of
from tests.jobs.deepspeed.model import LENGTH, VOCABULARY, WIDTH, Block
from tests.jobs.deepspeed.parallel_jobs import forget_expert_groups, forget_groups, merged, of_all_ranks
from tests.jobs.deepspeed.tensor_jobs import PARALLEL_GROUPS, gather
from tests.jobs.deepspeed.truth import Truth, consolidated, optimizer_of

STATES = ("exp_avg", "exp_avg_sq")
LAYOUT = ExpertLayout
train = jobs.train
DIVISION = (
    {"partition_type": "column", "patterns": [r".*block\.mlp\.0\.weight$"]},
    {"partition_type": "row", "patterns": [r".*block\.mlp\.2\.weight$"]},
)
OF_EXPERT_LAYERS = (
    {"partition_type": "column", "patterns": [r".*deepspeed_experts\.\d+\.up\.weight$"]},
    {"partition_type": "row", "patterns": [r".*deepspeed_experts\.\d+\.down\.weight$"]},
)
OF_EXPERTS = ".deepspeed_moe.experts.deepspeed_experts."


def _gathered(part: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Return the tokens of all tensor-parallel ranks, as ``_gather_tokens`` of moe/mappings.py.

    DeepSpeed gathers into a flat tensor. NCCL allows that. gloo of torch 2.13 refuses it ("invalid tensor size at index 0").
    """
    group = deepspeed.utils.bwc.bwc_tensor_model_parallel_group(deepspeed.utils.groups.mpu)
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group=group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim=dim)


mappings._gather_tokens = _gathered


class Expert(nn.Module):
    """An expert with a frozen parameter, a one-element parameter, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 11)
        self.down = nn.Linear(11, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("volatile", torch.rand(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x))) * self.gain * self.scale.mean() + self.shift


class StatefulExpert(Expert):
    """An expert with a state outside ``state_dict``'s tensors. DeepSpeed itself cannot save one."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = ""

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]


class Model(nn.Module):
    """Two expert layers between dense ones. The first has a residual branch, the second sends a token to two experts.

    No token is dropped, and none is routed at random, so that the losses do not depend on the layout.
    """

    def __init__(self, degrees: tuple[int, int], experts: tuple[int, int], kind: type[Expert], *, divisible: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.positions.weight.requires_grad_(False)
        self.block = Block(WIDTH)
        routing: dict[str, Any] = {
            "use_rts": False, "top2_2nd_expert_sampling": False, "enable_expert_tensor_parallelism": divisible,
        }  # fmt: skip
        self.moes = nn.ModuleList(
            # DeepSpeed divides the tokens of an expert among the ranks; without a capacity their number may be odd
            MoE(
                WIDTH,
                kind(),
                number,
                degree,
                k=k,
                use_residual=k == 1,
                drop_tokens=divisible,
                capacity_factor=number,
                **routing,
            )
            for k, (number, degree) in enumerate(zip(experts, degrees, strict=True), start=1)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("scale", torch.rand(3, 5))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.block(self.embed(tokens) + self.positions(torch.arange(tokens.shape[1])))
        for moe in self.moes:
            x = x + moe(x)[0]
        logits = self.norm(x) @ self.embed.weight.t() * self.scale.mean()
        return functional.cross_entropy(logits.float().reshape(-1, VOCABULARY), targets.reshape(-1))


def build(
    layout: ExpertLayout,
    *,
    seed: int,
    experts: tuple[int, int] = EXPERTS,
    kind: type[Expert] = StatefulExpert,
    frozen_gate: bool = False,
    group_size: int | None = None,
    division: Sequence[dict[str, Any]] = DIVISION,
    **more: Any,
) -> Any:
    """Return an engine whose parameters start from ``seed`` in every layout.

    Args:
        layout: layout on all ranks of this job.
        seed: seed of the first values.
        experts: number of experts of each layer.
        kind: class of an expert.
        frozen_gate: do not train the gate of the first layer.
        group_size: maximum number of elements of an optimizer group of experts. Default: depends on the layout.
        division: ``layer_specs`` of AutoTP.
        more: keys of the DeepSpeed JSON.
    """
    forget_groups()
    forget_expert_groups()
    for group in PARALLEL_GROUPS:
        setattr(groups, group, None)
    groups.expert_tensor_parallel_world_size = 1  # DeepSpeed keeps it from an earlier engine of this process
    if layout.tensor > 1:
        division = (*division, *(OF_EXPERT_LAYERS if layout.experts == "divided" else ()))
        more["tensor_parallel"] = {
            "autotp_size": layout.tensor, "partition_config": {"use_default_specs": False, "layer_specs": list(division)},
        }  # fmt: skip
    torch.manual_seed(seed)
    model = Model(layout.degrees, experts, kind, divisible=layout.experts != "spread")
    for at, moe in enumerate(model.moes):
        place = dist.get_rank() if layout.experts == "spread" else dist.get_rank() // layout.tensor
        set_own_values(moe, seed, 100 * at, place)
    model.moes[0].deepspeed_moe.gate.wg.weight.requires_grad_(not frozen_gate)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = {"params": [p for p in trained.values() if p.dim() > 1], "name": "decayed", "weight_decay": 0.1}
    others = {"params": [p for p in trained.values() if p.dim() < 2], "name": "others", "weight_decay": 0.0, "lr": 5e-3}
    size = group_size or (400 if layout.expert == 1 else 10**6)
    cfg = config(Layout(layout.stage, layout.world, layout.precision), **{"gradient_clipping": 0.0, **more})
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=split_params_into_different_moe_groups_for_optimizer([decayed, others], max_group_size=size),
        config=cfg,
        mpu=None if layout.sequence == 1 else mpu_of(1, layout.world, layout.sequence),
    )
    return engine


def set_own_values(layer: MoE, seed: int, first: int, place: int | None = None) -> None:
    """Give the experts of a layer values of their own. DeepSpeed copies one expert.

    Args:
        layer: the layer.
        seed, first: of the values; the second tells the layers apart.
        place: number of this rank among those with other experts and their copies. Default: the rank.
    """
    place = dist.get_rank() if place is None else place
    local = list(layer.deepspeed_moe.experts.deepspeed_experts)
    for number, expert in enumerate(local, start=place % layer.ep_size * len(local)):
        generator = torch.Generator().manual_seed(1000 * seed + first + number)
        for tensor in (*expert.parameters(), expert.get_buffer("scale")):
            tensor.data.add_(torch.randn(tensor.shape, generator=generator) * 0.2)


def scramble(engine: Any) -> None:
    """Overwrite state that training does not change, so that a load that does not restore it is detected."""
    for p in engine.module.parameters():
        if not p.requires_grad:
            p.data.fill_(-7.0)
    for name, buffer in engine.module.named_buffers():
        if "volatile" not in name:
            buffer.fill_(9)
    for module in engine.module.modules():
        if isinstance(module, StatefulExpert):
            module.extra = "?"


def mark(engine: Any) -> None:
    """Give every expert, and the expert that is the residual branch, a state of its own."""
    for name, module in engine.module.named_modules():
        if isinstance(module, StatefulExpert):
            module.extra = global_name(name, engine)


def global_name(name: str, engine: Any) -> str:
    """Return the name in a checkpoint. Written out here, as a reader of the guide would."""
    layer, is_expert, rest = name.partition(OF_EXPERTS)
    if not is_expert:
        return name
    moe = engine.module.get_submodule(layer)
    local, dot, inner = rest.partition(".")
    first = dist.get_rank(group=moe.deepspeed_moe.ep_group) * moe.num_local_experts
    return f"{layer}{OF_EXPERTS}{first + int(local)}{dot}{inner}"


def truth_of(engine: Any) -> Truth:
    """Return the state of all experts and of the dense parameters by global names. Collective. Checks that copies are equal."""
    link_all_states(engine.optimizer)
    own: Truth = {}
    for key, value in consolidated(engine, STATES).items():
        kind, _, name = key.partition("/")
        if key != "groups" and "volatile" not in name:
            own[f"{kind}/{global_name(name, engine)}" if name else kind] = value
    for name, settings in settings_of(engine).items():
        own[f"settings/{global_name(name, engine)}"] = settings
    for name, layer in engine.module.named_modules():
        if isinstance(layer, TensorParallel_Layer):
            for state in ("weight", "master", *STATES):
                gather(own, f"{state}/{global_name(name, engine)}", layer)
    own |= {
        f"extra/{global_name(n, engine)}": m.extra for n, m in engine.module.named_modules() if isinstance(m, StatefulExpert)
    }
    return merged(of_all_ranks(own))


def link_all_states(optimizer: Any) -> None:
    """Repeat DeepSpeed's own link for its accessors. It runs after the step of the first group, and then lacks the others'."""
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def settings_of(engine: Any) -> dict[str, Any]:
    """Return settings and step of each trained parameter on this rank, by its own name."""
    optimizer, base = engine.optimizer, optimizer_of(engine)
    own = [group["params"] for group in base.param_groups]
    keys = [key for key in ("bit16_groups", "bf16_groups", "fp16_groups") if hasattr(optimizer, key)]
    groups_of = getattr(optimizer, keys[0]) if keys else own
    names = {p: name for name, p in engine.module.named_parameters()}
    found = {}
    for group, parameters in zip(base.param_groups, groups_of, strict=True):
        settings = {k: v for k, v in group.items() if k not in ("params", "name", "moe") and not k.startswith("_ds")}
        for at, parameter in enumerate(parameters):
            master = group["params"][at if len(group["params"]) > 1 else 0]
            found[names[parameter]] = {**settings, "step": float(base.state[master]["step"])}
    return found


def common(truth: Truth, found: Truth) -> tuple[Truth, Truth]:
    """Return what a source and a target have in common: everything."""
    return dict(truth), found
