"""What a module returns: its tensors, and how they were computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def floats(output: Any) -> Iterator[torch.Tensor]:
    """Yield the dense tensors of floating point numbers in the output of a module: not sparse, nested or meta ones."""
    if isinstance(output, torch.Tensor):
        dense = output.layout is torch.strided and not output.is_nested and not output.is_meta
        if dense and output.is_floating_point() and output.numel():
            yield output
    elif isinstance(output, (tuple, list)):
        for each in output:
            yield from floats(each)
    elif isinstance(output, dict):
        yield from floats(tuple(output.values()))


def in_transform() -> bool:
    """Return whether a transform of ``torch.func`` runs, such as ``vmap``: its tensors are of no use after it."""
    level = getattr(getattr(torch._C, "_functorch", None), "maybe_current_level", None)
    return level is not None and level() is not None


def is_checkpointed(output: Iterator[torch.Tensor]) -> bool:
    """Return whether reentrant checkpointing, of torch or DeepSpeed, has a part in computing these tensors."""
    waiting = [each.grad_fn for each in output if each.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.name().startswith("CheckpointFunction"):
            return True
        further = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= further
        waiting += further
    return False
