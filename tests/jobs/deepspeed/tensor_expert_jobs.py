"""Engines with experts in tensor-parallel jobs of every layout, as pipelines and as plain modules, and their whole state."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as functional
from deepspeed import comm as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from tests.jobs.deepspeed import megatron_jobs, parallel_jobs
from tests.jobs.deepspeed.expert_jobs import OF_EXPERTS, link_all_states, settings_of
from tests.jobs.deepspeed.jobs import BATCH, Layout, config
from tests.jobs.deepspeed.megatron_model import (
    CUTS,
    INFO,
    Classic,
    Columns,
    Embedding,
    Gated,
    Mpu,
    Rows,
    head,
    joined,
    mpu_of,
    part_of,
)
from tests.jobs.deepspeed.parallel_jobs import MICRO, STATES, loss_of, merged, of_all_ranks, seed_layer
from tests.jobs.deepspeed.tensor_expert_names import TensorExpertLayout
from tests.jobs.deepspeed.tensor_model import WIDTH
from tests.jobs.deepspeed.truth import Truth, consolidated

LAYOUT = TensorExpertLayout
EXPERTS, INNER = 4, 8
LAST = 5  # number of the head
ROUTING: dict[str, Any] = {"capacity_factor": EXPERTS, "use_rts": False, "top2_2nd_expert_sampling": False}
train, mark = parallel_jobs.train, megatron_jobs.mark
PATTERNS = {
    **INFO,
    "tp_replicated_parameter_patterns": [*INFO["tp_replicated_parameter_patterns"], r".+\.deepspeed_experts\.\d+\.down\.bias"],
    "parameter_with_row_parallelism_patterns": [
        *INFO["parameter_with_row_parallelism_patterns"], r".+\.deepspeed_experts\.\d+\.down\.weight",
    ],
}  # fmt: skip


class Expert(nn.Module):
    """An expert that the tensor-parallel ranks divide, with a frozen parameter and a buffer."""

    def __init__(self, mpu: Mpu) -> None:
        super().__init__()
        self.up: nn.Linear = Columns(mpu, WIDTH, [INNER])
        self.down: nn.Linear = Rows(mpu, INNER, WIDTH)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(functional.gelu(self.up(x))) * self.scale.mean().to(x.dtype)
        return found


class WholeExpert(Expert):
    """The same expert, whole. Its layers have no attributes of Megatron's."""

    def __init__(self, _mpu: Mpu) -> None:
        nn.Module.__init__(self)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.register_buffer("scale", torch.ones(2))


class Mixture(nn.Module):
    """Experts beside the activations. No token is dropped, and none is routed at random. ``number`` tells the layers apart."""

    def __init__(self, mpu: Mpu, layout: TensorExpertLayout, seed: int, number: int) -> None:
        super().__init__()
        expert = Expert(mpu) if layout.sliced else WholeExpert(mpu)
        degree, residual = layout.degrees[number], number == 1
        self.moe = MoE(
            WIDTH, expert, EXPERTS, degree, k=1 + number, use_residual=residual,
            enable_expert_tensor_parallelism=layout.sliced, **ROUTING,
        )  # fmt: skip
        if residual and not layout.sliced:
            for parameter in self.moe.mlp.parameters():
                vars(parameter).update(tensor_model_parallel=False)
        place = dist.get_rank() // layout.tensor if layout.sliced else dist.get_rank()
        local = list(self.moe.deepspeed_moe.experts.deepspeed_experts)
        for at, each in enumerate(local, start=place % degree * len(local)):
            generator = torch.Generator().manual_seed(1000 * seed + 100 * number + at)
            for name, tensor in (*each.named_parameters(), ("scale", each.scale)):
                dim = cut_of(f".{name}") if layout.sliced else None
                shape = list(tensor.shape)
                if dim is not None:
                    shape[dim] *= layout.tensor
                more = torch.randn(shape, generator=generator) * 0.2
                tensor.data.add_(more if dim is None else part_of(more, dim, [shape[dim]], mpu))
            if layout.sliced:  # deepcopy, by which DeepSpeed multiplies an expert, loses the attributes of its parameters
                for parameter in each.up.parameters():
                    vars(parameter).update(tensor_model_parallel=True, partition_dim=0, partition_stride=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.moe(x)[0]
        return found


class Pipe(PipelineModule):
    """The model as a pipeline."""

    universal_checkpoint_info = PATTERNS


class Plain(nn.Module):
    """The same model without a pipeline, with the same names."""

    universal_checkpoint_info = PATTERNS

    def __init__(self, mpu: Mpu, layout: TensorExpertLayout, seed: int) -> None:
        super().__init__()
        seed_layer(seed)
        self.tied_modules = nn.ModuleDict({"embed": Embedding(mpu)})
        for number, layer in ((1, Gated), (2, 0), (3, Classic), (4, 1)):
            seed_layer(seed + number)
            self.add_module(str(number), Mixture(mpu, layout, seed, layer) if isinstance(layer, int) else layer(mpu))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        embed = self.tied_modules["embed"]
        x = embed(tokens)
        for number in range(1, 5):
            x = self.get_submodule(str(number))(x)
        return loss_of(head(embed, x), targets)


def build(layout: TensorExpertLayout, *, seed: int, **more: Any) -> Any:
    """Return an engine whose layers start from ``seed`` in every layout. ``more``: keys of the DeepSpeed JSON."""
    parallel_jobs.forget_groups()
    parallel_jobs.forget_expert_groups()
    groups = deepspeed.utils.groups
    groups.expert_tensor_parallel_world_size = 1  # DeepSpeed keeps it from an earlier engine of this process
    extra: dict[str, Any] = {
        "train_batch_size": BATCH // layout.sequence, "train_micro_batch_size_per_gpu": MICRO, "gradient_clipping": 0.0, **more,
    }  # fmt: skip
    cfg = config(Layout(layout.stage, layout.world, layout.precision), **extra)
    mpu = mpu_of(layout.tensor, layout.world, layout.sequence)
    model: nn.Module
    if layout.stages:
        layers = [
            TiedLayerSpec("embed", Embedding, mpu, tied_weight_attr="words"), LayerSpec(Gated, mpu),
            LayerSpec(Mixture, mpu, layout, seed, 0), LayerSpec(Classic, mpu), LayerSpec(Mixture, mpu, layout, seed, 1),
            TiedLayerSpec("embed", Embedding, mpu, forward_fn=head, tied_weight_attr="words"),
        ]  # fmt: skip
        topology = PipeModelDataParallelTopology(num_pp=layout.stages, num_mp=layout.tensor, num_dp=layout.data)
        model = Pipe(layers, topology=topology, loss_fn=loss_of, seed_layers=True, base_seed=seed, seed_fn=seed_layer)
    else:
        model = Plain(mpu, layout, seed)
    trained = {"params": [p for p in model.parameters() if p.requires_grad], "name": "all"}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=split_params_into_different_moe_groups_for_optimizer(trained), config=cfg,
        **({} if layout.stages else {"mpu": mpu}),
    )  # fmt: skip
    return engine


def scramble(engine: Any) -> None:
    """Overwrite state that training does not change, so that a load that does not restore it is detected."""
    megatron_jobs.scramble(engine)


def cut_of(key: str) -> int | None:
    """Return the dimension along which a parameter of an expert is divided; None for a replica."""
    return next((dim for end, dim in ((".up.weight", 0), (".up.bias", 0), (".down.weight", 1)) if key.endswith(end)), None)


def _cut(key: str, *, sliced: bool) -> tuple[int, tuple[int, ...]] | None:
    """Return how a tensor is divided: dimension, and sizes of sub-parameters. None for a replica."""
    if ".moe." in key:
        dim = cut_of(key) if sliced else None
        return None if dim is None or key.startswith(("settings/", "buffer/")) else (dim, ())
    found = next((cut for name, cut in CUTS.items() if key.endswith(f".{name}")), None)
    return None if key.startswith("settings/") else found


def truth_of(engine: Any) -> Truth:
    """Return the whole state of all experts and of the dense parameters by global names. Checks that copies are equal."""
    link_all_states(engine.optimizer)
    own: Truth = {k: v for k, v in consolidated(engine, STATES).items() if k != "groups"}
    own |= {f"settings/{name}": settings for name, settings in settings_of(engine).items()}
    own = {_global(key, engine): value for key, value in own.items()}
    if engine.pipeline_parallelism and engine.grid.stage_id:
        for key in [key for key in own if "tied_modules.embed." in key and not key.endswith(".words")]:
            own[key.replace("tied_modules.embed.", f"tied_modules.embed@{LAST}.")] = own.pop(key)
    sliced = any(getattr(each, "enable_expert_tensor_parallelism", False) for each in engine.module.modules())
    everyone = of_all_ranks((int(engine.mpu.get_model_parallel_rank() if not engine.pipeline_parallelism
                                 else engine.grid.get_slice_parallel_rank()), own))  # fmt: skip
    ranks = [merged([state for at, state in everyone if at == rank]) for rank in sorted({at for at, _ in everyone})]
    whole = merged([{key: value for key, value in state.items() if _cut(key, sliced=sliced) is None} for state in ranks])
    for key in ranks[0]:
        cut = _cut(key, sliced=sliced)
        if cut is not None:
            parts = [state[key] for state in ranks]
            dim, sizes = cut
            whole[key] = joined(parts, dim, list(sizes) or [sum(part.shape[dim] for part in parts)])
    return whole


def _global(key: str, engine: Any) -> str:
    """Return a key with the name in a checkpoint. Written out here, as a reader of the guide would."""
    kind, slash, name = key.partition("/")
    layer, is_expert, rest = name.partition(OF_EXPERTS)
    if not is_expert:
        return key
    moe = engine.module.get_submodule(layer)
    local, dot, inner = rest.partition(".")
    first = dist.get_rank(group=moe.deepspeed_moe.ep_group) * moe.num_local_experts
    return f"{kind}{slash}{layer}{OF_EXPERTS}{first + int(local)}{dot}{inner}"


def common(truth: Truth, found: Truth) -> tuple[Truth, Truth]:
    """Return what a source and a target have in common. See ``megatron_jobs.common``."""
    expected, found_tensors = megatron_jobs.common(_without_settings(truth), _without_settings(found))
    settings = {key: value for key, value in truth.items() if key.startswith("settings/")}
    own = {key: value for key, value in found.items() if key.startswith("settings/")}
    for key in own.keys() - settings.keys():
        settings[key] = settings[key.replace(f"@{LAST}", "")]
    return {**expected, **{k: v for k, v in settings.items() if k in own or "@" not in k}}, {**found_tensors, **own}


def _without_settings(truth: Truth) -> Truth:
    return {key: value for key, value in truth.items() if not key.startswith("settings/")}
