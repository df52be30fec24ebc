"""What a model needs beside its arguments, and what a repetition leaves as it was."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch


class Generators:
    """Random generators: torch's own, of the CPU and of one device, those of Python and numpy, and those of a model.

    Args:
        device: see above.
        model: whose modules hold generators.
    """

    def __init__(self, device: torch.device, model: torch.nn.Module | None = None) -> None:
        self._device = device
        held = {} if model is None else {id(each): each for module in model.modules() for each in _generators(module)}
        self._held = list(held.values())

    def states(self) -> Any:
        """Return copies of their states, which any rank of the job can load. Nothing in them is of numpy."""
        own, held = [torch.get_rng_state()], [each.get_state() for each in self._held]
        if self._device.type == "cuda":
            own.append(torch.cuda.get_rng_state(self._device))
        numpy = sys.modules.get("numpy.random")  # a program without it has drawn nothing from it
        return own, held, random.getstate(), None if numpy is None else _without_arrays(numpy.get_state(legacy=False))

    def restore(self, states: Any) -> None:
        """Go back to these states."""
        own, held, python, of_numpy = states
        torch.set_rng_state(own[0])
        if len(own) > 1:
            torch.cuda.set_rng_state(own[1], self._device)
        for each, state in zip(self._held, held, strict=True):
            each.set_state(state)
        random.setstate(python)
        if of_numpy is not None and "numpy.random" in sys.modules:
            sys.modules["numpy.random"].set_state(_with_arrays(of_numpy))


def _generators(module: torch.nn.Module) -> Iterator[torch.Generator]:
    return (each for each in vars(module).values() if isinstance(each, torch.Generator))


def _without_arrays(state: Any) -> Any:
    """Return the state of a generator of numpy with a tensor in the place of each array of unsigned numbers."""
    if isinstance(state, dict):
        return {key: _without_arrays(each) for key, each in state.items()}
    return (
        torch.from_numpy(state.view(f"i{state.itemsize}")) if hasattr(state, "itemsize") and hasattr(state, "view") else state
    )


def _with_arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _with_arrays(each) for key, each in state.items()}
    return state.numpy().view(f"u{state.element_size()}") if isinstance(state, torch.Tensor) else state


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
