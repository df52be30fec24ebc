"""A small Transformer with the difficult cases of a checkpoint.

Tied head, a frozen parameter, one-element and empty parameters, dimensions that nothing divides,
buffers that are and are not persistent.
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as functional

VOCABULARY, WIDTH, LENGTH = 31, 15, 12


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, *, tied: bool = True, frozen: bool = True, empty: bool = False, blocks: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(blocks))
        self.gain = nn.Parameter(torch.ones(1))
        if empty:  # off by default, because DeepSpeed's ZeRO-3 cannot gather one in a forward pass
            self.empty = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.positions.weight.requires_grad_(not frozen)
        self.register_buffer("scale", torch.rand(3, 5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("volatile", torch.rand(4), persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x * self.gain) * self.scale.mean()
        loss = functional.cross_entropy(logits.float().reshape(-1, VOCABULARY), targets.reshape(-1))
        return loss + self.empty.float().sum() if hasattr(self, "empty") else loss


def batch(step: int, size: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's rows of the global batch of a step. The batch does not depend on the world size."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCABULARY, (size, LENGTH + 1), generator=generator)
    rows = size // world
    mine = tokens[rank * rows : (rank + 1) * rows]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()
