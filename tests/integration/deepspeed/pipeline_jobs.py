"""Pipelines of every layout, and the same model as a plain module: built as by a user, trained on the same data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as functional
from deepspeed import comm as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import groups

from tests.integration.deepspeed.jobs import BATCH, Layout, config
from tests.integration.deepspeed.model import LENGTH, VOCABULARY, WIDTH, Block, batch
from tests.integration.deepspeed.pipeline_names import PipelineLayout
from tests.integration.deepspeed.truth import Truth, consolidated

MICRO = 2  # rows of a micro-batch
STATES = ("exp_avg", "exp_avg_sq")


class Embedding(nn.Module):
    """The tied module. The head uses its weight alone, as in GPT models: later stages never train the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.1)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.frozen = nn.Parameter(torch.tensor([0.1, -0.2, 0.3]), requires_grad=False)  # not synchronized, but equal

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens, self.weight) + self.positions + self.frozen.sum()


def head(module: Embedding, x: torch.Tensor) -> torch.Tensor:
    return x @ module.weight.t()


class Scale(nn.Module):
    """A layer with buffers, a one-element parameter, and a state outside ``state_dict``'s tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("scale", torch.rand(3, 5))
        self.register_buffer("volatile", torch.rand(4), persistent=False)
        self.extra = 0

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain * self.scale.mean().to(x.dtype)


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def _seed(value: Any) -> None:
    torch.manual_seed(int(value))  # DeepSpeed passes its own type of number


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float().reshape(-1, VOCABULARY), targets.reshape(-1))


def _specs() -> list[Any]:
    return [
        TiedLayerSpec("embed", Embedding),
        LayerSpec(Scale),
        LayerSpec(Block, WIDTH),
        same,
        LayerSpec(Block, WIDTH),
        LayerSpec(Scale),
        TiedLayerSpec("embed", Embedding, forward_fn=head),
    ]


class Plain(nn.Module):
    """The same model without a pipeline. ``unickpt_pipeline_layers`` gives its names in one."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embed = self._seeded(seed, Embedding)
        self.begin = self._seeded(seed + 1, Scale)
        self.blocks = nn.ModuleList([self._seeded(seed + at, Block, WIDTH) for at in (2, 4)])
        self.end = self._seeded(seed + 5, Scale)

    @staticmethod
    def _seeded(seed: int, kind: Callable[..., Any], *arguments: Any) -> Any:
        torch.manual_seed(seed)
        return kind(*arguments)

    def unickpt_pipeline_layers(self) -> list[Any]:
        return [("embed", self.embed), self.begin, self.blocks[0], same, self.blocks[1], self.end, ("embed", self.embed)]

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.begin(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return loss_of(head(self.embed, self.end(x)), targets)


def build(layout: PipelineLayout, *, seed: int, layers: list[Any] | None = None, **more: Any) -> Any:
    """Return an engine whose layers start from ``seed``.

    Args:
        layout: layout on all ranks of this job.
        seed: the first layer starts from it, and layer ``n`` from ``seed + n``.
        layers: layers of another pipeline.
        more: keys of the DeepSpeed JSON.
    """
    groups.mpu = groups.mesh_device = None  # DeepSpeed keeps those of an earlier engine
    extra: dict[str, Any] = {"train_micro_batch_size_per_gpu": MICRO, **more}
    cfg = config(Layout(layout.stage, layout.world, layout.precision), **extra)
    model: Any = Plain(seed)
    if layout.stages:
        model = PipelineModule(
            layers or _specs(), num_stages=layout.stages, loss_fn=loss_of, partition_method=layout.partition,
            seed_layers=True, base_seed=seed, seed_fn=_seed,
        )  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=cfg
    )
    return engine


def _micro_batches(step: int, rank: int, world: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    tokens, targets = batch(step, BATCH, rank, world)
    yield from zip(tokens.split(MICRO), targets.split(MICRO), strict=True)


def train(engine: Any, steps: int) -> list[float]:
    """Train further, and return the global losses. The data depend only on the global step."""
    losses = []
    for _ in range(steps):
        if engine.pipeline_parallelism:
            data = _micro_batches(engine.global_steps, engine.grid.data_parallel_id, engine.grid.data_parallel_size)
            losses.append(float(engine.train_batch(data)))
            continue
        total = torch.zeros(1, dtype=torch.float64)
        for tokens, targets in _micro_batches(engine.global_steps, dist.get_rank(), dist.get_world_size()):
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() * MICRO / BATCH)
    return losses


def scramble(engine: Any) -> None:
    """Overwrite state that training does not change, so that a load that does not restore it is detected."""
    for p in engine.module.parameters():
        if not p.requires_grad:
            (p.ds_tensor if hasattr(p, "ds_tensor") else p).data.fill_(-7.0)
    for name, buffer in engine.module.named_buffers():
        if "volatile" not in name:
            buffer.fill_(9)
    for module in engine.module.modules():
        if isinstance(module, Scale):
            module.extra = -1
    engine.module.micro_offset = -1


def mark(engine: Any) -> None:
    """Give every module a state of its own, which depends on its position in the model."""
    for name, module in engine.module.named_modules():
        if isinstance(module, Scale):
            module.extra = pipeline_name(name, engine)


def pipeline_name(name: str, engine: Any) -> str:
    """Return the name in a checkpoint of a pipeline. Written out here, as a reader of the guide would."""
    if not engine.pipeline_parallelism:
        for own, layer in (("embed", "tied_modules.embed"), ("begin", "1"), ("blocks.0", "2"), ("blocks.1", "4"), ("end", "5")):
            if name == own or name.startswith(f"{own}."):
                return f"{layer}{name.removeprefix(own)}"
    first_stage = not engine.pipeline_parallelism or engine.grid.stage_id == 0
    if first_stage or not name.startswith("tied_modules.embed.") or name.endswith(".weight"):
        return name
    return name.replace("tied_modules.embed.", "tied_modules.embed@6.")


def truth_of(engine: Any) -> Truth:
    """Return the state of all stages by its names in a pipeline. Collective. Checks that copies are equal."""
    own: Truth = {}
    for key, value in consolidated(engine, STATES).items():
        kind, _, name = key.partition("/")
        if "volatile" not in name:
            own[f"{kind}/{pipeline_name(name, engine)}" if name else kind] = value
    own |= {f"extra/{pipeline_name(n, engine)}": m.extra for n, m in engine.module.named_modules() if isinstance(m, Scale)}
    if engine.pipeline_parallelism:
        own["micro-batches"] = engine.module.micro_offset
    everyone: list[Any] = [None] * dist.get_world_size()
    torch.distributed.all_gather_object(everyone, own)
    merged: Truth = {}
    for rank, found in enumerate(everyone):
        for key, value in found.items():
            before = merged.setdefault(key, value)
            equal = torch.equal(before, value) if isinstance(value, torch.Tensor) else before == value
            assert equal, f"rank {rank} has another {key}"
    return merged
