"""A byte-level Transformer, small enough to train on two CPU cores, with the difficult cases of a checkpoint.

These are a parameter with two names (embedding and head are tied), tiny parameters next to large ones (ZeRO-3 keeps LayerNorms
whole and divides the others), a random buffer that the trained weights depend on, and a 0-dimensional integer buffer that
training changes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

CONTEXT = 128
VOCABULARY = 256


class Block(nn.Module):
    """Pre-norm causal self-attention and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        expanded: Tensor = self.down(functional.gelu(self.up(self.mlp_norm(x))))
        return x + expanded


class ByteTransformer(nn.Module):
    """Predicts the next byte. ``forward`` returns the mean cross-entropy in nats per byte.

    Positions are random Fourier features. The buffer ``frequencies`` comes from the seed and is not trained, so a model of
    another seed needs those of the checkpoint.
    """

    frequencies: Tensor
    updates: Tensor

    def __init__(self, width: int = 256, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.scale = width**0.5
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight
        self.register_buffer("frequencies", torch.exp(-5 * torch.rand(width // 2)))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """``inputs`` and ``targets`` are int64 bytes of shape (batch, length). Targets are one byte ahead."""
        if self.training:
            self.updates += 1
        angles = torch.arange(inputs.shape[1], device=inputs.device)[:, None] * self.frequencies
        x = self.scale * self.embedding(inputs) + self.position(torch.cat([angles.sin(), angles.cos()], dim=1))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
