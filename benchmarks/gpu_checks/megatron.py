"""Megatron: save, load under another parallel shape, save again, and compare the two checkpoints. The model is a small GPT.

On the CPU through ``megatron_unickpt.testing``, which redirects torch's CUDA functions. On a device nothing is redirected, and
the layers are Megatron's local ones, with torch's Adam unless TransformerEngine or Apex is installed.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_checks.place import Place
from benchmarks.gpu_checks.rows import Rows

LENGTH, BATCH = 16, 4


def save_row(world: int) -> str:
    return f"data parallel on {world} ranks: save"


def load_row(world: int) -> str:
    return f"load on {world} ranks"


class Trainer:
    """A GPT in bf16 with the distributed optimizer, data parallel over all ranks."""

    def __init__(self, place: Place, seed: int) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.module import Float16Module
        from megatron.core.transformer.transformer_config import TransformerConfig

        self.place, self.step = place, 0
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)
        width, layers = (64, 4) if place.dry else (512, 8)
        config = TransformerConfig(
            num_layers=layers, hidden_size=width, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0, bf16=True,
            params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, gradient_accumulation_fusion=False,
            masked_softmax_fusion=False, persist_layer_norm=False, bias_dropout_fusion=False, apply_rope_fusion=False,
        )  # fmt: skip
        model = GPTModel(
            config, get_gpt_layer_local_spec(), vocab_size=96, max_sequence_length=LENGTH, position_embedding_type="rope"
        )
        model = model if place.dry else model.cuda()
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self.model = DistributedDataParallel(config, ddp, Float16Module(config, model))
        options = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            weight_decay=0.1,
            clip_grad=1.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        )
        self.optimizer = get_megatron_optimizer(options, [self.model])
        self.model.broadcast_params()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.step)
            rows = torch.randint(0, 96, (BATCH, LENGTH + 1), generator=generator).to(self.place.device)
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            positions = torch.arange(LENGTH, device=self.place.device)[None].expand(BATCH, LENGTH)
            mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=self.place.device), 1)[None, None]
            self.model(rows[:, :-1].contiguous(), positions, mask, labels=rows[:, 1:].contiguous()).float().mean().backward()
            self.model.finish_grad_sync()
            self.optimizer.step()
            self.step += 1


def preload() -> None:
    """Import Megatron for the CPU in the parent of the ranks, once for all."""
    from megatron_unickpt.testing import cpu  # before anything of megatron

    cpu.adapt_megatron()
    import megatron_unickpt  # noqa: F401


def begin(place: Place) -> None:
    warnings.filterwarnings("ignore")
    dist.init_process_group(place.backend)


def check_save(place: Place, path: Path, folder: Path) -> None:
    """Train and save. All ranks call it."""
    begin(place)
    rows = Rows(path if dist.get_rank() == 0 else None, "megatron", place.name)
    with rows.row(save_row(dist.get_world_size()), "committed") as row:
        trainer = Trainer(place, seed=1)
        trainer.train(3)
        _save(trainer, folder / "first", row)
    dist.barrier()


def check_load(place: Place, path: Path, folder: Path) -> None:
    """Load into a model of another seed, save again, and compare. All ranks call it."""
    from unickpt.checkpoint.load.checkpoint import Checkpoint
    from unickpt.checkpoint.load.diff import differences

    begin(place)
    rows = Rows(path if dist.get_rank() == 0 else None, "megatron", place.name)
    with rows.row(load_row(dist.get_world_size()), "every bit, also in what is saved again") as row:
        trainer = Trainer(place, seed=2)
        trainer.train(1)
        import megatron_unickpt

        begun = time.perf_counter()
        megatron_unickpt.load(folder / "first", trainer.model, trainer.optimizer)
        place.synchronize()
        row.values["ms"] = (time.perf_counter() - begun) * 1e3
        first = Checkpoint.open(folder / "first")
        _save(trainer, folder / "again", row)
        found = list(differences(first, Checkpoint.open(folder / "again")))
        row.values["tensors"] = len(found)
        row.require(bool(found), "nothing to compare")
        row.require(all(each.equal for each in found), f"differ: {[each.name for each in found if not each.equal][:3]}")
    dist.barrier()


def _save(trainer: Trainer, where: Path, row: Any) -> None:
    import megatron_unickpt

    trainer.place.synchronize()
    begun = time.perf_counter()
    megatron_unickpt.save(where, trainer.model, trainer.optimizer, iteration=trainer.step)
    row.values["saved ms"] = (time.perf_counter() - begun) * 1e3
