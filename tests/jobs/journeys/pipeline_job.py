"""A GPT-2 as a user writes it for DeepSpeed's 3D parallelism: layers of Megatron's kind in a ``PipelineModule``.

Its mathematics is that of megatron-core's GPT with learned positions. ``pipeline.toml`` is the dialect between both.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as functional
from deepspeed import comm as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from tests.jobs.deepspeed.megatron_model import Columns, Mpu, Rows, logits_of, looked_up, mpu_of, part_of
from tests.jobs.deepspeed.parallel_jobs import seed_layer
from tests.jobs.journeys.families import BATCH, HEADS, LAYERS, LENGTH, VOCABULARY, WIDTH, family_of, rows

FAMILY = "gpt2-pipeline"
STD = 0.02
INFO: dict[str, Any] = {
    "original_vocab_size": VOCABULARY,
    "vocabulary_parameter_patterns": [r"tied_modules.words.weight"],
    "tp_replicated_parameter_patterns": [r"1.weight", r"\d+.(first|second).(weight|bias)", rf"{LAYERS + 2}.(weight|bias)"],
    "parameter_with_sub_params": [
        {"patterns": [r"\d+.qkv.weight"], "shape": ((WIDTH,) * 3, WIDTH), "partition_dim": 0},
        {"patterns": [r"\d+.qkv.bias"], "shape": ((WIDTH,) * 3,), "partition_dim": 0},
    ],
}


class Words(nn.Module):
    """The embedding, which the head uses again."""

    def __init__(self, mpu: Mpu) -> None:
        super().__init__()
        self.mpu = mpu
        self.weight = nn.Parameter(part_of(torch.randn(VOCABULARY, WIDTH) * STD, 0, [VOCABULARY], mpu))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return looked_up(self.weight, tokens, self.mpu)


def head(module: Words, x: torch.Tensor) -> torch.Tensor:
    """Return the logits of the whole vocabulary, float32."""
    return logits_of(module.weight, x, module.mpu).float()


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(LENGTH, WIDTH) * STD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight[: x.shape[1]]


class Block(nn.Module):
    """A block of GPT-2 whose queries, keys and values are one projection."""

    def __init__(self, mpu: Mpu) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = Columns(mpu, WIDTH, [WIDTH] * 3)
        self.out = Rows(mpu, WIDTH, WIDTH)
        self.up = Columns(mpu, WIDTH, [4 * WIDTH])
        self.down = Rows(mpu, 4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, dim=-1))
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.out(attended)
        return x + self.down(functional.gelu(self.up(self.second(x)), approximate="tanh"))


class Pipeline(PipelineModule):
    universal_checkpoint_info = INFO


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def engine_of(shape: str, *, seed: int, rate: float, schedule: Any, bf16: bool) -> Any:
    """Return the engine of a shape such as ``tp2pp2dp2``, with ZeRO-1 and AdamW."""
    tensor, stages, data = (int(re.findall(rf"{axis}(\d+)", shape)[0]) for axis in ("tp", "pp", "dp"))
    mpu = mpu_of(tensor, dist.get_world_size())
    layers = [
        TiedLayerSpec("words", Words, mpu), LayerSpec(Positions), *(LayerSpec(Block, mpu) for _ in range(LAYERS)),
        LayerSpec(nn.LayerNorm, WIDTH), TiedLayerSpec("words", Words, mpu, forward_fn=head),
    ]  # fmt: skip
    topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor, num_dp=data)
    model = Pipeline(layers, topology=topology, loss_fn=loss_of, seed_layers=True, base_seed=seed, seed_fn=seed_layer)
    config = {
        "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "weight_decay": 0.0, "torch_adam": True}},
        "bf16": {"enabled": bf16}, "zero_optimization": {"stage": 1},
        "unickpt": {"enabled": True, "load_dialect": family_of(FAMILY).dialect},
    }  # fmt: skip
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, lr_scheduler=schedule)[0]


def train(engine: Any, steps: int, first: int) -> list[float]:
    """Train, and return the mean loss of the global batch of every step."""
    at, ranks = dist.get_rank(group=engine.seq_data_parallel_group), dist.get_world_size(group=engine.seq_data_parallel_group)
    losses = []
    for step in range(first, first + steps):
        own = rows(step)[at * BATCH // ranks : (at + 1) * BATCH // ranks]
        losses.append(float(engine.train_batch((row[:, :-1], row[:, 1:]) for row in own.split(1))))
    return losses


def station(shape: str, source: str, out: Path, steps: int, first: int, **job: Any) -> dict[str, Any]:
    """Run a station of a journey: see ``station.py``. ``job``: arguments of ``engine_of``."""
    deepspeed.init_distributed("gloo", verbose=False)
    engine = engine_of(shape, **job)
    if source != "-":
        path, _ = engine.load_checkpoint(str(Path(source).parent), tag=Path(source).name)
        assert path is not None
    counters = {"steps": engine.global_steps, "samples": engine.global_samples}
    assert engine.save_checkpoint(str(out), tag="loaded") is True
    losses = train(engine, steps, first)
    assert engine.save_checkpoint(str(out), tag="trained") is True
    assert engine.checkpoint_engine.last_save is not None, "DeepSpeed has saved by itself"
    return {"counters": counters, "rate": engine.get_lr()[0], "losses": losses, "logits": [] if dist.get_rank() == 0 else None}
