"""A small GPT or MoE under any parallel shape, trained by megatron-core's own schedules, DDP and optimizers on CPU."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from megatron_unickpt.testing import cpu
from megatron_unickpt.testing.layouts import Layout

cpu.adapt_megatron()

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

LENGTH, BATCH, LAYERS = 16, 4, 4
EMERGING = {"muon": "muon", "normuon": "adaptive_muon", "soap": "soap"}  # of a layout -> Megatron's name
OFFLOADED: dict[str, Any] = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 0.5,
    "overlap_cpu_optimizer_d2h_h2d": True,
}


def accepted(function: Any, **values: Any) -> dict[str, Any]:
    """Return the arguments that the function has in this version."""
    known = inspect.signature(function).parameters
    return {key: value for key, value in values.items() if key in known}


def leave_groups() -> None:
    """Destroy the last job's process groups. Megatron only drops its references, and their threads would accumulate."""
    parallel_state.destroy_model_parallel()
    for name in ("_EMBEDDING_GLOBAL_RANKS", "_POSITION_EMBEDDING_GLOBAL_RANKS"):  # 0.12 does not drop these
        if hasattr(parallel_state, name):
            setattr(parallel_state, name, None)
    gc.collect()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


class Job:
    """One running model: ``chunks`` (a rank's pipeline chunks), ``optimizer``, and the next ``step``.

    ``groups``: make the process groups. False: the model is in those of an earlier job, beside its model.
    ``bucket_size``: reduce gradients in buckets of about so many elements, while the backward pass goes on.
    ``gathered_late``: the next forward pass gathers the parameters after a step. It needs ``bucket_size``.
    ``recompute``: the backward pass computes each layer again.
    ``torch_adam``: the optimizer is torch's AdamW.
    """

    def __init__(
        self, layout: Layout, *, seed: int = 1, tied: bool = True, vocabulary: int = 96, width: int = 32, length: int = LENGTH,
        batch: int = BATCH, micro_batch: int = 1, lr: float = 1e-2, predictions: int = 0,
        frozen: Callable[[str], bool] | None = None, groups: bool = True, layers: int = LAYERS,
        bucket_size: int | None = None, gathered_late: bool = False, recompute: bool = False, torch_adam: bool = False,
    ) -> None:  # fmt: skip
        self.layout, self.layers, self.step = layout, layers, 0
        self.vocabulary, self.length, self.batch, self.predictions = vocabulary, length, batch, predictions
        self.micro_batch = micro_batch
        cpu.compile_nothing()
        if groups:
            leave_groups()
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
            )
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)
        self.recompute = recompute
        self.config = self._config(width)
        self.chunks = [self._chunk(at, tied) for at in range(layout.vpp)]
        for name, parameter in (each for chunk in self.chunks for each in chunk.named_parameters()):
            parameter.requires_grad = frozen is None or not frozen(name)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=layout.distributed,
            overlap_grad_reduce=bucket_size is not None,
            bucket_size=bucket_size,
            overlap_param_gather=gathered_late,
        )
        self.chunks = [DistributedDataParallel(self.config, ddp, chunk) for chunk in self.chunks]
        low = layout.low
        if layout.optimizer == "aware":
            sys.modules["transformer_engine.pytorch.optimizers"] = sys.modules["apex.optimizers"]  # the check looks there
        options = OptimizerConfig(
            optimizer="adam",
            lr=lr,
            weight_decay=0.1,
            clip_grad=1.0,
            bf16=low and layout.optimizer != "layers",
            params_dtype=torch.bfloat16 if low else torch.float32,
            use_distributed_optimizer=layout.distributed,
            overlap_param_gather=gathered_late,
            **(OFFLOADED if layout.offloads else {}),
            use_precision_aware_optimizer=layout.optimizer in ("offload", "aware"),
        )
        sys.modules.pop("transformer_engine.pytorch.optimizers", None)
        if layout.optimizer in EMERGING:
            self.optimizer = self._emerging(options)
        else:
            with cpu.torch_adam() if torch_adam else nullcontext():
                self.optimizer = get_megatron_optimizer(options, self.chunks)
        if layout.optimizer == "layers":
            self.optimizer = self._layer_wise(options)
        for chunk in self.chunks:
            chunk.broadcast_params()

    def _emerging(self, options: OptimizerConfig) -> Any:
        """Return Muon with the layer-wise distribution, or another optimizer of NVIDIA's ``emerging_optimizers``."""
        if self.layout.optimizer == "muon" and not hasattr(options, "use_layer_wise_distributed_optimizer"):  # up to 0.17
            from megatron.core.optimizer.muon import get_megatron_muon_optimizer

            return get_megatron_muon_optimizer(options, self.chunks, layer_wise_distributed_optimizer=True)
        options.optimizer = EMERGING[self.layout.optimizer]
        options.adaptive_muon_moment2_method = "normuon"  # not elementwise; its other method is
        options.use_layer_wise_distributed_optimizer = self.layout.dp > 1
        return get_megatron_optimizer(options, self.chunks)

    def _layer_wise(self, options: OptimizerConfig) -> Any:
        """Distribute whole parameters over the data parallel ranks, as for Muon."""
        from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
        from megatron.core.process_groups_config import ProcessGroupCollection

        options.bf16 = True
        groups = ProcessGroupCollection.use_mpu_process_groups()
        chained = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        if "model_chunks" in inspect.signature(LayerWiseDistributedOptimizer).parameters:  # since 0.17 it wraps
            chained = [each.optimizer for each in chained]
        return LayerWiseDistributedOptimizer(list(chained), options, groups)

    def _config(self, width: int) -> TransformerConfig:
        layout = self.layout
        again: dict[str, Any] = {}
        if self.recompute:
            again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        low = layout.low
        moe: dict[str, Any] = {}
        if layout.moe:
            moe = {
                "num_moe_experts": 4,
                "moe_router_topk": 2,
                "moe_token_dispatcher_type": "alltoall",
                "moe_ffn_hidden_size": 32,
                "moe_router_load_balancing_type": "none",
                "moe_aux_loss_coeff": 0.0,
                "add_bias_linear": False,
            }
        if layout.grouped:
            cpu.offer_grouped_gemm()
            moe |= {"moe_grouped_gemm": True, "moe_use_legacy_grouped_gemm": True}
        ahead = {"mtp_num_layers": self.predictions, "mtp_loss_scaling_factor": 0.1} if self.predictions else {}
        return TransformerConfig(
            num_layers=self.layers, hidden_size=width, num_attention_heads=4, num_query_groups=4, ffn_hidden_size=2 * width,
            gated_linear_unit=True, activation_func=torch.nn.functional.silu, hidden_dropout=0.0, attention_dropout=0.0,
            tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp, expert_model_parallel_size=layout.ep,
            sequence_parallel=layout.moe and layout.tp > 1, pipeline_dtype=torch.bfloat16 if low else torch.float32,
            params_dtype=torch.bfloat16 if low else torch.float32, bf16=low, gradient_accumulation_fusion=False,
            masked_softmax_fusion=False, persist_layer_norm=False, bias_dropout_fusion=False, apply_rope_fusion=False,
            finalize_model_grads_func=finalize_model_grads, attention_softmax_in_fp32=True,
            # with two stages the interleaved schedule needs its transfers one by one
            overlap_p2p_comm=layout.vpp > 1, batch_p2p_comm=layout.vpp == 1,
            **({"add_bias_linear": True} | moe | ahead | again),
        )  # fmt: skip

    def _chunk(self, at: int, tied: bool) -> Any:
        many = self.layout.vpp > 1
        stage = {"vp_stage": at} if many else {}
        parallel_state.set_virtual_pipeline_model_parallel_rank(at if many else None)
        options = {"ignore_virtual": False, **stage}
        first = parallel_state.is_pipeline_first_stage(**accepted(parallel_state.is_pipeline_first_stage, **options))
        last = parallel_state.is_pipeline_last_stage(**accepted(parallel_state.is_pipeline_last_stage, **options))
        experts = 4 if self.layout.moe else None
        grouped = {"moe_grouped_gemm": self.layout.grouped, "moe_use_legacy_grouped_gemm": self.layout.grouped}
        spec = get_gpt_layer_local_spec(**accepted(get_gpt_layer_local_spec, num_experts=experts, **grouped))
        if self.predictions:
            stage["mtp_block_spec"] = get_gpt_mtp_block_spec(self.config, spec, use_transformer_engine=False) if last else None
        model = GPTModel(
            self.config,
            spec,
            vocab_size=self.vocabulary,
            max_sequence_length=self.length,
            pre_process=first,
            post_process=last,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=tied,
            **accepted(GPTModel.__init__, **stage),
        )
        return Float16Module(self.config, model) if self.layout.low else model

    # ---------------------------------------------------------------- training

    def rows(self) -> torch.Tensor:
        """Return the global batch of this step, int64 ``[batch, length + 1]``. It depends only on the step."""
        generator = torch.Generator().manual_seed(1000 + self.step)
        return torch.randint(0, 96, (self.batch, self.length + 1), generator=generator)

    def _batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """Return this rank's micro batches."""
        rows, n = self.rows(), self.length
        dp, rank = self.layout.dp, parallel_state.get_data_parallel_rank()
        for part in rows[rank * self.batch // dp : (rank + 1) * self.batch // dp].split(self.micro_batch):
            tokens, labels = part[:, :-1], part[:, 1:]
            positions = torch.arange(n).expand(len(part), n)
            mask = torch.triu(torch.ones(n, n, dtype=torch.bool), 1)[None, None]
            yield {
                "tokens": self._part(tokens, 1),
                "labels": self._part(labels, 1),
                "positions": self._part(positions, 1),
                "mask": self._part(mask, 2),
            }

    def _part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return a context parallel rank's two chunks of the sequence: one from the front, one from the back."""
        cp, rank = self.layout.cp, parallel_state.get_context_parallel_rank()
        if cp == 1:
            return tensor
        chunks = tensor.chunk(2 * cp, dim=dim)
        return torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]], dim=dim)

    def _forward(self, batches: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
        batch = next(batches)
        output = model(batch["tokens"], batch["positions"], batch["mask"], labels=batch["labels"])

        def loss(out: torch.Tensor) -> Any:
            total, count = out.float().sum(), torch.tensor(out.numel(), dtype=torch.int)
            return total, count, {"loss": torch.stack([total.detach(), count.float()])}

        return output, functools.partial(loss)

    def train(self, steps: int, before_step: Callable[[int], None] | None = None) -> list[float]:
        """Train, and return the mean loss of the global batch of every step, on every rank.

        ``before_step`` is called with the number of the step.
        """
        losses = []
        for _ in range(steps):
            if before_step is not None:
                before_step(self.step)
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            found = get_forward_backward_func()(
                forward_step_func=self._forward,
                data_iterator=[self._batches() for _ in self.chunks] if len(self.chunks) > 1 else self._batches(),
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=self.batch // self.layout.dp // self.micro_batch,
                seq_length=self.length,
                micro_batch_size=self.micro_batch,
                forward_only=False,
            )
            self.optimizer.step()
            self.step += 1
            total = sum((entry["loss"] for entry in found), torch.zeros(2))
            dist.all_reduce(total)
            losses.append(float(total[0] / total[1]))
        return losses

    @property
    def modules(self) -> list[Any]:
        """Return the chunks without their wrappers."""
        found = []
        for chunk in self.chunks:
            while hasattr(chunk, "module"):
                chunk = chunk.module
            found.append(chunk)
        return found

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Return a value of every parameter group on this rank."""
        return [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
