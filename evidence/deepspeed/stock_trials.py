"""Whether DeepSpeed itself trains and resumes some combinations of parallelism, without unickpt.

``UNICKPT_AUTOLOAD=0 torchrun --nproc-per-node 4 -m evidence.deepspeed.stock_trials KIND [STAGE]`` trains three steps,
saves, trains two more, loads into an engine of another seed, and trains two steps again. It prints both losses of each rank.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn as nn
from deepspeed import comm as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule

from tests.jobs.deepspeed.megatron_model import mpu_of
from tests.jobs.deepspeed.parallel_jobs import forget_groups, of_all_ranks

KINDS = ("experts", "experts-mpu", "experts-mesh", "nested", "autotp-mesh", "autotp-pipeline", "zenflow", "experts-tensor")
WIDTH, LENGTH, ROWS = 8, 8, 4
DIVISION = [
    {"partition_type": "column", "patterns": [r".*\b0\.weight$"]},
    {"partition_type": "row", "patterns": [r".*\b2\.weight$"]},
]


class Expert(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 11), nn.Tanh(), nn.Linear(11, WIDTH))


class Experts(nn.Module):
    """Experts beside the activations. No token is dropped."""

    def __init__(self, expert: nn.Module, number: int, degree: int) -> None:
        super().__init__()
        self.moe = MoE(WIDTH, expert, number, degree, drop_tokens=False, use_rts=False, min_capacity=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.moe(x)[0]
        return found


def build(kind: str, stage: int, seed: int) -> Any:
    """Return an engine whose parameters start from ``seed``."""
    forget_groups()
    torch.manual_seed(seed)
    adam = {"lr": 1e-2} if kind == "zenflow" else {"lr": 1e-2, "torch_adam": True}
    cfg: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    middle: nn.Module = nn.Tanh()
    if kind.startswith("experts"):
        middle = Experts(Expert(), 4, 2)
    if kind == "nested":
        middle = Experts(Experts(Expert(), 2, 1), 4, 2)
    if kind == "zenflow":
        cfg["zero_optimization"] |= {
            "offload_optimizer": {"device": "cpu"},
            "zenflow": {"topk_ratio": 0.2, "update_interval": 2, "full_warm_up_rounds": 0, "overlap_step": False},
        }
    if kind.startswith("autotp"):
        cfg["tensor_parallel"] = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": DIVISION}}
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), middle, nn.Linear(WIDTH, WIDTH))
    if kind == "autotp-pipeline":
        layers = [LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(nn.Tanh), LayerSpec(nn.Linear, WIDTH, WIDTH)]
        model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    parameters: Any = list(model.parameters())
    if isinstance(middle, Experts):
        parameters = split_params_into_different_moe_groups_for_optimizer({"params": parameters, "name": "all"})
    more: dict[str, Any] = {"mesh_param": (dist.get_world_size() // 2, 2)} if kind.endswith("mesh") else {}
    if kind in ("experts-mpu", "experts-tensor"):
        more["mpu"] = mpu_of(2) if kind == "experts-tensor" else mpu_of(1, 0, 2)
    return deepspeed.initialize(model=model, model_parameters=parameters, config=cfg, **more)[0]


def train(engine: Any, kind: str, steps: int) -> list[float]:
    """Train further, and return the losses of this rank. Tensor-parallel ranks of an ``mpu`` have the same data."""
    losses = []
    own = dist.get_rank() // (2 if kind == "experts-tensor" else 1)
    for _ in range(steps):
        generator = torch.Generator().manual_seed(100 * int(engine.global_steps) + own)
        x, y = (torch.randn(ROWS, LENGTH, WIDTH, generator=generator) for _ in range(2))
        if engine.pipeline_parallelism:
            losses.append(float(engine.train_batch(iter([(x, y)]))))
            continue
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    kind, stage = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
    if kind not in KINDS:
        raise SystemExit(f"KIND is one of {', '.join(KINDS)}, not {kind}")
    deepspeed.init_distributed("gloo", verbose=False)
    folder = of_all_ranks(tempfile.mkdtemp() if dist.get_rank() == 0 else "")[0]
    engine = build(kind, stage, 1)
    train(engine, kind, 3)
    engine.save_checkpoint(str(Path(folder)))
    uninterrupted = train(engine, kind, 2)
    resumed = build(kind, stage, 2)
    resumed.load_checkpoint(str(Path(folder)))
    found = of_all_ranks((uninterrupted, train(resumed, kind, 2)))
    if dist.get_rank() == 0:
        for rank, (one, other) in enumerate(found):
            print(f"rank {rank}: {'equal' if one == other else 'DIFFERENT'}", one, other, flush=True)


if __name__ == "__main__":
    main()
