"""The 3D job of the benchmarks: a ``PipelineModule`` with tensor-parallel layers, Adam, one sample per data-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.deepspeed_engine import WIDTH, EngineJob
from benchmarks.measure import small_buckets


class _Summed(torch.autograd.Function):
    """Sums over the tensor-parallel ranks: activations in the forward pass, or gradients in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, activations: bool) -> torch.Tensor:
        ctx.group = None if activations else group
        return _sum(x, group) if activations else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (grad if ctx.group is None else _sum(grad, ctx.group)), None, None


def _sum(x: torch.Tensor, group: Any) -> torch.Tensor:
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


class Pair(torch.nn.Module):
    """A column-parallel and a row-parallel layer with ``WIDTH`` times ``WIDTH`` weights each on all tensor-parallel ranks."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, ranks = group, dist.get_world_size(group)
        self.up = torch.nn.Linear(WIDTH, WIDTH // ranks)
        self.down = torch.nn.Linear(WIDTH // ranks, WIDTH, bias=False)
        for parameter, dim in ((self.up.weight, 0), (self.up.bias, 0), (self.down.weight, 1)):
            vars(parameter).update(tensor_model_parallel=True, partition_dim=dim, partition_stride=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Summed.apply(self.down(self.up(_Summed.apply(x, self.group, False))), self.group, True)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class PipelineJob(EngineJob):
    """One rank of the 3D job.

    Attributes:
        tensor, stages: number of tensor-parallel ranks, and of pipeline stages.
    """

    tensor: int = 1
    stages: int = 1

    @staticmethod
    def begin(millions: int, tensor: int, stages: int) -> PipelineJob:
        """Join the process group; the model will have ``millions`` million weights."""
        job = EngineJob.start(millions)
        return PipelineJob(job.rank, job.world, max(2 * stages, job.layers), tensor, stages)

    def engine(self, stage: int, **unickpt: Any) -> Any:
        return self._engine(self.tensor, stage, **unickpt)

    def other(self, stage: int) -> Any:
        return self._engine(1, stage)

    def _engine(self, tensor: int, stage: int, **unickpt: Any) -> Any:
        import deepspeed
        from deepspeed.pipe import LayerSpec, PipelineModule
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

        torch.manual_seed(1)
        data = self.world // (tensor * self.stages)
        groups = [dist.new_group(list(range(first, first + tensor))) for first in range(0, self.world, tensor)]
        group = groups[self.rank // tensor]
        model = PipelineModule(
            [LayerSpec(Pair, group) for _ in range(self.layers // 2)],
            topology=PipeModelDataParallelTopology(num_pp=self.stages, num_mp=tensor, num_dp=data),
            loss_fn=torch.nn.functional.mse_loss,
        )
        model.universal_checkpoint_info = {  # for ds_to_universal, which else joins all parameters along dimension 0
            "universal_checkpoint_version": 0.2,
            "parameter_with_row_parallelism_patterns": [r"\d+.down.weight"],
        }
        config = {
            "train_batch_size": data,
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": 10**9,
            "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
            "zero_optimization": small_buckets(stage),
            "unickpt": {"enabled": True, "async_save": True, **unickpt},
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self.step(engine)
        return engine

    def share_bytes(self, engine: Any) -> int:
        ranks = dist.get_world_size(engine.seq_data_parallel_group)
        return int(sum(p.numel() for p in engine.module.parameters()) * 12 // ranks)

    @staticmethod
    def step(engine: Any) -> None:
        engine.train_batch(iter([(torch.rand(1, WIDTH), torch.zeros(1, WIDTH))]))
