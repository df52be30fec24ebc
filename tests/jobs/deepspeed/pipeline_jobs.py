"""Pipelines of every layout, and the same model as a plain module: built as by a user, trained on the same data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as functional
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

from tests.jobs.deepspeed import parallel_jobs
from tests.jobs.deepspeed.jobs import Layout, config
from tests.jobs.deepspeed.model import LENGTH, VOCABULARY, WIDTH, Block
from tests.jobs.deepspeed.parallel_jobs import MICRO, STATES, engine_of, loss_of, merged, of_all_ranks, same, seed_layer
from tests.jobs.deepspeed.pipeline_names import PipelineLayout
from tests.jobs.deepspeed.truth import Truth, consolidated

LAYOUT = PipelineLayout
train = parallel_jobs.train


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


def specs() -> list[Any]:
    """Return the layers of the pipeline."""
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
    parallel_jobs.forget_groups()
    extra: dict[str, Any] = {"train_micro_batch_size_per_gpu": MICRO, **more}
    cfg = config(Layout(layout.stage, layout.world, layout.precision), **extra)
    model: Any = Plain(seed)
    if layout.stages:
        model = PipelineModule(
            layers or specs(), num_stages=layout.stages, loss_fn=loss_of, partition_method=layout.partition,
            seed_layers=True, base_seed=seed, seed_fn=seed_layer,
        )  # fmt: skip
    return engine_of(model, cfg)


def scramble(engine: Any) -> None:
    """Overwrite state that training does not change, so that a load that does not restore it is detected."""
    parallel_jobs.scramble_frozen(engine)
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
    return merged(of_all_ranks(own))


def common(truth: Truth, found: Truth) -> tuple[Truth, Truth]:
    """Return what a source and a target should have in common.

    A stage's own copy of a tied parameter exists only with several stages: without one in the checkpoint it has the original's
    value.
    """
    expected = {key: value for key, value in truth.items() if "@" not in key or key in found}
    if "micro-batches" not in expected or "micro-batches" not in found:  # a plain module has none
        expected.pop("micro-batches", None)
        found.pop("micro-batches", None)
    for key in found.keys() - expected.keys():
        if "@" in key:
            expected[key] = truth[key.replace("@6", "")]
    return expected, found
