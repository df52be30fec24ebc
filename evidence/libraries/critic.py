"""A model that gives one value for each token, in place of logits, as critics of PPO."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_unickpt.testing.jobs import Job  # before anything of Megatron

import torch


class ValueHead(torch.nn.Linear):
    """An output layer that gives one value for each token."""

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(hidden).float(), None


class Critic(Job):
    """A job whose model is a critic. Its loss is the distance of the values from numbers that depend on the tokens."""

    def _chunk(self, at: int, tied: bool) -> Any:
        chunk = super()._chunk(at, tied)
        model = chunk.module if hasattr(chunk, "module") else chunk
        if model.post_process:
            model.output_layer = ValueHead(self.config.hidden_size, 1, bias=False).to(self.config.params_dtype)
        return chunk

    def _forward(self, batches: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
        batch = next(batches)
        values = model(batch["tokens"], batch["positions"], batch["mask"])
        wanted = batch["labels"].float() / self.vocabulary

        def loss(out: torch.Tensor) -> Any:
            total = (out.float().squeeze(-1) - wanted).square().sum()
            count = torch.tensor(wanted.numel(), dtype=torch.int)
            return total, count, {"loss": torch.stack([total.detach(), count.float()])}

        return values, loss
