"""Residuals as values: of one rank, and for another number of ranks. Pure functions.

The mean gradient of a step and what the job still owes are conserved: the mean over the ranks of what they did not send, plus
what the ranks together did not send back. On the same number of ranks each rank gets its own residuals. On another number each
rank gets the mean of the first, so their mean stays, and its own slice of the second, so their sum stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from unickpt.base.errors import FormatError

NamedTensors = dict[str, torch.Tensor]
STORED = "gradient_residuals/"  # + rank, or + COMMON: names among the shared objects of a checkpoint
COMMON = "common"
OF_OPTIMIZERS = "optimizer_residuals/"  # + rank: those of DeepSpeed's 1-bit optimizers and of LoCo-ZeRO++


def slice_of(elements: int, rank: int, world: int) -> tuple[int, int]:
    """Return the range of a flat parameter whose mean a rank computes and sends back. It may be empty."""
    size = math.ceil(elements / world)
    return min(rank * size, elements), min((rank + 1) * size, elements)


@dataclass
class Residuals:
    """What one rank has not sent.

    Attributes:
        rank, world: this rank, and number of ranks.
        sent: parameter name -> float32 ``[elements]``: rest of this rank's gradient.
        returned: parameter name -> float32 ``[slice_of(...)]``: rest of the mean that this rank sends back.
    """

    rank: int
    world: int
    sent: NamedTensors = field(default_factory=dict)
    returned: NamedTensors = field(default_factory=dict)

    def to_object(self) -> dict[str, Any]:
        """Return the state as an object of a checkpoint. The tensors are live."""
        return {"rank": self.rank, "world": self.world, "sent": dict(self.sent), "returned": dict(self.returned)}

    @classmethod
    def from_object(cls, value: Any) -> Residuals:
        """Return the state from an object of a checkpoint.

        Raises:
            FormatError: the object has another form.
        """
        if isinstance(value, Mapping):
            rank, world = value.get("rank"), value.get("world")
            sent, returned = _tensors(value.get("sent")), _tensors(value.get("returned"))
            if isinstance(rank, int) and isinstance(world, int) and sent is not None and returned is not None:
                return cls(rank, world, sent, returned)
        raise FormatError("the residuals of compressed gradients do not have the expected form")


def own_or_resized(saved: Callable[[int], Any], rank: int, world: int) -> tuple[Residuals, bool]:
    """Return the residuals of a rank from a checkpoint, and whether they are its own: not so after a change of ``world``.

    Args:
        saved: returns the object that a rank of the saving job stored (``Residuals.to_object``).
        rank, world: this rank, and number of ranks of this job.

    Raises:
        FormatError: objects of the checkpoint are missing or have another form.
    """
    first = Residuals.from_object(saved(0))
    if first.world != world:
        return resized((Residuals.from_object(saved(each)) for each in range(first.world)), rank, world), False
    return (Residuals.from_object(saved(rank)) if rank else first), True


def _tensors(value: Any) -> NamedTensors | None:
    if not isinstance(value, Mapping) or not all(isinstance(each, torch.Tensor) and each.dim() == 1 for each in value.values()):
        return None
    return {str(name): each.float() for name, each in value.items()}


@dataclass
class Common:
    """What all ranks have alike.

    Attributes:
        counts: parameter name -> number of exchanges, for the seeds of ``random-k``.
        factors: parameter name -> float32 ``[columns, rank]``: factor of ``powersgd`` of the step before.
    """

    counts: dict[str, int] = field(default_factory=dict)
    factors: NamedTensors = field(default_factory=dict)

    def to_object(self) -> dict[str, Any]:
        """Return the state as an object of a checkpoint. The tensors are live."""
        return {"counts": dict(self.counts), "factors": dict(self.factors)}

    @classmethod
    def from_object(cls, value: Any) -> Common:
        """Return the state from an object of a checkpoint."""
        return cls({name: int(count) for name, count in value["counts"].items()}, dict(value["factors"]))


def resized(
    states: Iterable[Residuals], rank: int, world: int, cut: Callable[[int, int, int], tuple[int, int]] = slice_of
) -> Residuals:
    """Return the residuals of a rank of a job with another number of ranks.

    Args:
        states: those of every rank of the job that saved, in order of the ranks. Read one after the other.
        rank, world: this rank, and number of ranks of this job.
        cut: returns the slice of a rank, from the number of elements, the rank and the number of ranks.

    Raises:
        FormatError: the residuals of a rank are missing.
    """
    total: NamedTensors = {}
    slices: dict[str, list[torch.Tensor]] = {}
    number, before = 0, 0
    for number, state in enumerate(states, start=1):
        before = state.world
        if state.rank != number - 1:
            raise FormatError(f"the residuals of rank {number - 1} of {before} are missing")
        for name, tensor in state.sent.items():
            total[name] = total[name].add_(tensor) if name in total else tensor.double()
        for name, tensor in state.returned.items():
            slices.setdefault(name, []).append(tensor)
    if number != before:
        raise FormatError(f"the checkpoint has the residuals of {number} ranks, and was saved by {before}")
    sent = {name: (tensor / before).float() for name, tensor in total.items()}
    returned = {}
    for name, parts in slices.items():
        lo, hi = cut(sum(map(len, parts)), rank, world)
        returned[name] = torch.cat(parts)[lo:hi].clone()
    return Residuals(rank, world, sent, returned)
