"""What is repeated: a micro-batch, or a step of an optimizer, as ranks of a job send it to each other."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Begun:
    """What a forward pass starts from.

    Attributes:
        args: positional arguments.
        kwargs: named arguments.
        random: states of random generators.
        buffers: of the model.
        autocast: whether it is on, and its dtype.
        received: what reaches the model beside its arguments, such as the output of another pipeline stage.
    """

    args: Any
    kwargs: Any
    random: Any
    buffers: list[torch.Tensor]
    autocast: tuple[bool, torch.dtype]
    received: list[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Case:
    """A micro-batch, or a step of an optimizer, to be repeated.

    Attributes:
        data: input, random state, buffers and gradients of the output. From a rank of this job: it holds pickles.
        values: hash of the output, and of the gradient of each parameter, which is 0 if there is none.
        what: name of what is repeated; '' where each value has a name.
    """

    data: bytes
    values: tuple[int, ...]
    what: str = ""


def loaded(data: bytes, here: torch.device) -> Any:
    """Return what ``torch.save`` has written on a rank of this job: it holds pickles. Tensors of a device go to this one."""

    def place(storage: Any, location: str) -> Any:
        return storage.to(device=here) if here.type != "cpu" and location != "cpu" else storage

    return torch.load(io.BytesIO(data), map_location=place, weights_only=False)
