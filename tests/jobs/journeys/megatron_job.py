"""A model of a family in megatron-core, trained as in ``megatron_unickpt.testing.jobs``."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from megatron_unickpt.testing.jobs import Job, accepted  # before anything of megatron

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from tests.jobs.journeys.families import (
    BATCH,
    DECAY,
    FFN,
    HEADS,
    LAYERS,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Family,
    family_of,
    rows,
)
from megatron_unickpt.testing.layouts import Layout

ACTIVATIONS = {"silu": torch.nn.functional.silu, "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh")}


class FamilyJob(Job):
    """Attributes: family; the others are those of ``Job``."""

    def __init__(self, layout: str, family: str, *, seed: int, lr: float = 1e-3) -> None:
        self.family: Family = family_of(family)
        super().__init__(
            Layout.parse(layout), seed=seed, tied=self.family.tied, vocabulary=VOCABULARY, width=WIDTH, length=LENGTH, lr=lr
        )
        for group in self.optimizer.param_groups:  # as the other framework's job has it
            group |= {"weight_decay": 0.0, "max_lr": lr, "min_lr": 0.0}
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, init_lr=0.0, max_lr=lr, min_lr=0.0, lr_warmup_steps=0, lr_decay_steps=DECAY * BATCH,
            lr_decay_style="linear", start_wd=0.0, end_wd=0.0, wd_incr_steps=1, wd_incr_style="constant",
        )  # fmt: skip

    def _config(self, width: int) -> TransformerConfig:
        layout, low = self.layout, self.layout.low
        dtype = torch.bfloat16 if low else torch.float32
        own = {**self.family.megatron, "activation_func": ACTIVATIONS[self.family.megatron["activation_func"]]}
        shape = {"num_layers": LAYERS, "hidden_size": width, "num_attention_heads": HEADS, "ffn_hidden_size": FFN}
        kind = MLATransformerConfig if own.get("multi_latent_attention") else TransformerConfig
        return kind(
            **{**shape, **own}, hidden_dropout=0.0, attention_dropout=0.0,
            tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp,
            expert_model_parallel_size=layout.ep, sequence_parallel=self.family.moe and layout.tp > 1,
            pipeline_dtype=dtype, params_dtype=dtype, bf16=low, gradient_accumulation_fusion=False,
            masked_softmax_fusion=False, persist_layer_norm=False, bias_dropout_fusion=False, apply_rope_fusion=False,
            finalize_model_grads_func=finalize_model_grads, attention_softmax_in_fp32=True,
        )  # fmt: skip

    def _chunk(self, _at: int, tied: bool) -> Any:
        first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        own = self.family.megatron
        if "moe_layer_freq" in own:  # layers of several kinds
            spec = get_gpt_decoder_block_spec(self.config, use_transformer_engine=False)
        else:
            spec = get_gpt_layer_local_spec(
                **accepted(
                    get_gpt_layer_local_spec, num_experts=own.get("num_moe_experts"), moe_grouped_gemm=False,
                    qk_layernorm=own.get("qk_layernorm", False), normalization=own["normalization"],
                )
            )  # fmt: skip
        model = GPTModel(
            self.config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH, pre_process=first, post_process=last,
            position_embedding_type=self.family.position, share_embeddings_and_output_weights=tied,
        )  # fmt: skip
        return Float16Module(self.config, model) if self.layout.low else model

    def rows(self) -> torch.Tensor:
        found: torch.Tensor = rows(self.step, self.batch)
        return found

    def load(self, source: str) -> None:
        """Load a checkpoint of any framework."""
        import megatron_unickpt  # imported here, because jobs without unickpt also use this class

        found = megatron_unickpt.load(
            source, self.chunks, self.optimizer, scheduler=self.scheduler, load_dialect=self.family.dialect
        )
        self.step = int(found["iteration"])

    def save(self, directory: Path) -> None:
        import megatron_unickpt

        megatron_unickpt.save(directory, self.chunks, self.optimizer, scheduler=self.scheduler, iteration=self.step)

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            losses += super().train(1)
            self.scheduler.step(self.batch)
        return losses

    def logits(self, tokens: torch.Tensor) -> list[Any] | None:
        """Return logits of the whole vocabulary, float32, on the last stage's first tensor parallel rank; None elsewhere."""
        (chunk,) = self.chunks
        chunk.eval()
        (model,) = self.modules
        mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
        positions = torch.arange(LENGTH)[None].expand(len(tokens), -1)
        width = self.config.hidden_size
        shape = (LENGTH, len(tokens), width)
        if self.config.sequence_parallel:
            shape = (LENGTH // self.layout.tp, len(tokens), width)
        with torch.no_grad():
            if not parallel_state.is_pipeline_first_stage():
                received = torch.empty(shape, dtype=self.config.params_dtype)
                dist.recv(received, parallel_state.get_pipeline_model_parallel_prev_rank())
                model.set_input_tensor(received)
            out = model(tokens, positions, mask)
            if not parallel_state.is_pipeline_last_stage():
                dist.send(out.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
                out = None
            else:
                out = gather_from_tensor_model_parallel_region(out)
        chunk.train()
        if out is None or parallel_state.get_tensor_model_parallel_rank() or parallel_state.get_data_parallel_rank():
            return None
        found: list[Any] = out.float().tolist()
        return found
