"""Pipelines with experts (``deepspeed.moe``) of every layout, and the same layers as a plain module, with their whole state."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.nn as nn
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule

from tests.jobs.deepspeed import expert_jobs, parallel_jobs
from tests.jobs.deepspeed.expert_jobs import StatefulExpert, set_own_values
from tests.jobs.deepspeed.expert_names import EXPERTS, PipedExpertLayout
from tests.jobs.deepspeed.jobs import Layout, config
from tests.jobs.deepspeed.model import LENGTH, VOCABULARY, WIDTH, Block
from tests.jobs.deepspeed.parallel_jobs import MICRO, loss_of, seed_layer

LAYOUT = PipedExpertLayout
train = parallel_jobs.train
mark, scramble, common, truth_of = expert_jobs.mark, expert_jobs.scramble, expert_jobs.common, expert_jobs.truth_of


class Enter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.positions.weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.words(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return found


class Mixture(nn.Module):
    """Experts beside the activations. No token is dropped, and none is routed at random."""

    def __init__(self, number: int, degree: int, k: int) -> None:
        super().__init__()
        routing: dict[str, Any] = {"drop_tokens": False, "use_rts": False, "top2_2nd_expert_sampling": False}
        self.moe = MoE(WIDTH, StatefulExpert(), number, degree, k=k, use_residual=k == 1, **routing)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.moe(x)[0]
        return found


class Leave(nn.Linear):
    """The head, with a buffer."""

    def __init__(self) -> None:
        super().__init__(WIDTH, VOCABULARY)
        self.register_buffer("scale", torch.rand(3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale.mean().to(x.dtype)


class Plain(nn.Sequential):
    """The same layers, with the same names."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss_of(super().forward(tokens), targets)


def build(layout: PipedExpertLayout, *, seed: int, **more: Any) -> Any:
    """Return an engine whose layers start from ``seed``: layer ``n`` from ``seed + n``.

    Args:
        layout: layout on all ranks of this job.
        seed: seed of the first layer.
        more: keys of the DeepSpeed JSON.
    """
    parallel_jobs.forget_groups()
    parallel_jobs.forget_expert_groups()
    mixtures = [(Mixture, number, layout.expert, k) for k, number in enumerate(EXPERTS, start=1)]
    kinds: list[Any] = [
        (Enter,), mixtures[0], (Block, WIDTH), mixtures[1], (Leave,),
    ]  # fmt: skip
    if layout.stages:
        specs = [LayerSpec(kind, *arguments) for kind, *arguments in kinds]
        model: nn.Module = PipelineModule(
            specs, num_stages=layout.stages, loss_fn=loss_of, seed_layers=True, base_seed=seed, seed_fn=seed_layer
        )
    else:
        layers = []
        for number, (kind, *arguments) in enumerate(kinds):
            seed_layer(seed + number)
            layers.append(kind(*arguments))
        model = Plain(*layers)
    for name, child in model.named_modules():
        if isinstance(child, MoE):
            set_own_values(child, seed, 100 * int(name.partition(".")[0]))
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": [p for p in model.parameters() if p.requires_grad], "name": "all"}, max_group_size=10**6
    )
    cfg = config(
        Layout(layout.stage, layout.world, layout.precision),
        **{"train_micro_batch_size_per_gpu": MICRO, "gradient_clipping": 0.0, **more},
    )
    return deepspeed.initialize(model=model, model_parameters=groups, config=cfg)[0]
