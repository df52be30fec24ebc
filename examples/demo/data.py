"""English text that comes with every Python, in an order that depends only on the global step."""

from __future__ import annotations

from pydoc_data import topics

import torch
from torch import Tensor


def corpus() -> Tensor:
    """Return Python's language reference (the text of ``help("for")``), some hundred KB, as a 1-D uint8 tensor."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def batch(text: Tensor, step: int, size: int, length: int, *, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Return this rank's part of the global batch of a step: inputs, and targets one byte ahead.

    The global batch depends only on ``step``, and the ranks divide it in order. Any number of ranks thus sees the same bytes
    at the same step.

    Args:
        text: 1-D uint8 tensor.
        step: step of the whole training, not of this process.
        size: sequences in the global batch, a multiple of ``ranks``.
        length: bytes per sequence.

    Returns:
        Two int64 tensors of shape ``(size // ranks, length)``.
    """
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length, (size,), generator=generator)
    own = starts.view(ranks, size // ranks)[rank]
    windows = text[own[:, None] + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]
