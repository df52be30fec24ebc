"""What repeats micro-batches of a Megatron model: each stage of a pipeline repeats its own part."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_unickpt.framework import internals
from unickpt.training.witness.cases import Case, loaded
from unickpt.training.witness.counting import is_compiled
from unickpt.training.witness.repeating import Tap
from unickpt.training.witness.surroundings import Generators, Surroundings


class ChunkSurroundings(Surroundings):
    """A chunk of a model in Megatron's DDP, whose gradients are in buffers of their own.

    Attributes:
        reentrant: Megatron's recomputation is repeated.

    Args:
        chunk: as the schedule calls it.
        inner: without wrappers.
    """

    reentrant = True

    def __init__(self, chunk: Any, inner: torch.nn.Module) -> None:
        self._chunk = chunk
        self.sends = not getattr(inner, "post_process", True)
        self._holders = [each for each in inner.modules() if hasattr(each, "input_tensor")]

    def slots(self) -> Sequence[tuple[Any, str]]:
        """Return where the schedule puts the output of the stage before (``set_input_tensor``)."""
        return [(each, "input_tensor") for each in self._holders]

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Let no gradient reach a buffer, begin no reduction and no gathering, and count no loss for the log."""
        with (
            self._chunk.no_sync(),
            internals.no_gradients_added(self._chunk.parameters()),
            internals.no_parameters_gathered(self._chunk),
            internals.logged_losses_kept(),
        ):
            yield

    def backward(
        self, output: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        """Compute gradients. Megatron's checkpointing refuses ``torch.autograd.grad``."""
        del leaves
        torch.autograd.backward(output, gradients)


class MegatronGenerators(Generators):
    """Random generators of any model, and those of Megatron for tensor parallel ranks."""

    def states(self) -> Any:
        """Return copies of their states."""
        return super().states(), internals.tracked_generators()

    def restore(self, states: Any) -> None:
        """Go back to these states."""
        own, tracked = states
        super().restore(own)
        internals.restore_tracked_generators(tracked)


class ChunkTaps:
    """The taps of the chunks of a rank, one after the other: it repeats all, or none."""

    def __init__(self, taps: Sequence[Tap]) -> None:
        self._taps = taps
        several = len(taps) > 1
        self.names = [f"chunk {at}: {name}" if several else name for at, tap in enumerate(taps) for name in tap.names]

    def close(self) -> None:
        """Remove the hooks."""
        for tap in self._taps:
            tap.close()

    def arm(self, turn: int) -> None:
        """Record the next micro-batch."""
        for tap in self._taps:
            tap.arm(turn)

    def take(self) -> tuple[Case | None, str]:
        """Return what is recorded; None if a chunk has nothing that can be repeated, and why."""
        cases = [tap.take() for tap in self._taps]
        found = [case for case, _ in cases if case is not None]
        if len(found) < len(cases):
            return None, next(why for case, why in cases if case is None)
        buffer = io.BytesIO()
        torch.save([case.data for case in found], buffer)
        return Case(buffer.getvalue(), tuple(value for case in found for value in case.values)), ""

    def repeat(self, data: bytes) -> tuple[int, ...]:
        """Return the values of a case, computed here."""
        every = loaded(data, torch.device("cpu"))
        return tuple(value for tap, each in zip(self._taps, every, strict=True) for value in tap.repeat(each))


def tap_of(chunk: torch.nn.Module, inner: torch.nn.Module, parameters: Mapping[str, torch.Tensor]) -> Tap:
    """Return what repeats micro-batches of a chunk. ``parameters``: of the chunk, by name."""
    trained = {name: each for name, each in parameters.items() if each.requires_grad}
    device = next((each.device for each in trained.values()), torch.device("cpu"))
    surroundings, generators = ChunkSurroundings(chunk, inner), MegatronGenerators(device, inner)
    return Tap(inner, trained, generators=generators, surroundings=surroundings)


def unsuited(chunks: Sequence[Any]) -> str:
    """Return why micro-batches of these chunks cannot be repeated; '' if they can."""
    if any(not internals.is_in_ddp(chunk) for chunk in chunks):
        return "it needs Megatron's DistributedDataParallel"
    if any(not any(each.requires_grad for each in chunk.parameters()) for chunk in chunks):
        return "a part of the model has no trained parameters"
    if any(is_compiled(chunk) for chunk in chunks):
        return "the model is compiled"
    config = chunks[0].config
    if getattr(config, "gradient_accumulation_fusion", False):
        return "--no-gradient-accumulation-fusion is needed: otherwise layers add gradients to the buffers themselves"
    if getattr(config, "enable_cuda_graph", False) or getattr(config, "cuda_graph_impl", "none") not in ("none", None):
        return "layers run in CUDA graphs"
    return ""
