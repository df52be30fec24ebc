"""What a model needs beside its arguments, and what a repetition leaves as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch


class Generators:
    """torch's own random generators, of the CPU and of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def states(self) -> Any:
        """Return copies of their states, which any rank of the job can load."""
        found = [torch.get_rng_state()]
        return [*found, torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else found

    def restore(self, states: Any) -> None:
        """Go back to these states."""
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.cuda.set_rng_state(states[1], self._device)


class Surroundings:
    """What a model needs beside its arguments, and what a repetition must leave as it was. This class: nothing.

    Attributes:
        sends: the output goes to another rank, which sends its gradient, as in a pipeline.
        reentrant: ``backward`` can do what reentrant checkpointing computes.
    """

    sends = reentrant = False

    def slots(self) -> Sequence[tuple[Any, str]]:
        """Return the attributes by which tensors reach the model: objects, and names. They may be None."""
        return ()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Leave everything else as it is, whatever a repetition does."""
        yield

    def backward(
        self, output: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        """Compute the gradients of the leaves, whose hooks see them, from those of the output. Nothing accumulates them."""
        torch.autograd.grad(output, leaves, gradients, allow_unused=True)
