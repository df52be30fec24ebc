"""The micro-batches since the last step, so that they can be repeated. They are kept as they are, and not copied."""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from unickpt.base.module_hooks import ModuleHook
from unickpt.training.witness.cases import Begun
from unickpt.training.witness.outputs import floats
from unickpt.training.witness.quiet import quiet, quiet_gradient
from unickpt.training.witness.repeating import Tap

MOST_BYTES = 256 << 20  # of inputs, and of gradients of outputs, that stay in memory until the step


@dataclass
class Kept:
    """A micro-batch.

    Attributes:
        begun: what its forward pass starts from; None: its input cannot be kept, because it is too large, for one.
        marks: counters of writes of the tensors in it.
        of_output: gradients of the tensors of its output, by their number.
        large: a gradient of an output cannot be kept, because it is too large, for one.
    """

    begun: Begun | None
    marks: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    of_output: dict[int, torch.Tensor] = field(default_factory=dict)
    large: bool = False

    @property
    def whole(self) -> bool:
        """Whether it is as it was, as far as torch counts writes."""
        return self.begun is not None and all(tensor._version == version for tensor, version in self.marks)


class Recalled:
    """The micro-batches of a model since ``clear``.

    Args:
        tap: repeats them.
    """

    def __init__(self, tap: Tap) -> None:
        self.tap = tap
        self._kept: list[Kept] = []
        self._of_outputs: list[Any] = []  # hooks
        self._bytes = 0
        self._buffers: list[tuple[tuple[int, int], torch.Tensor]] = []  # address and counter of writes, and copy
        self._hooks = [
            tap.inner.register_forward_pre_hook(ModuleHook(quiet(self._begins, self._lost)), with_kwargs=True),
            tap.inner.register_forward_hook(ModuleHook(quiet(self._computed, self._lost))),
        ]

    def close(self) -> None:
        """Remove the hooks, and what is kept."""
        self.clear()
        for hook in self._hooks:
            hook.remove()

    def clear(self) -> None:
        """A step begins."""
        self._kept, self._bytes = [], 0
        for hook in self._of_outputs:
            hook.remove()
        self._of_outputs = []

    def kept(self, number: int) -> Kept | None:
        """Return the n-th micro-batch; None if it cannot be repeated."""
        found = self._kept[number] if number < len(self._kept) else None
        return found if found is not None and found.whole else None

    def data(self, number: int) -> bytes:
        """Return the n-th micro-batch as bytes; empty if it cannot be repeated. Never raises."""
        found = self.kept(number)
        if found is None:
            return b""
        buffer = io.BytesIO()
        try:
            torch.save((found.begun, {} if found.large else found.of_output), buffer)
        except Exception:  # of any object that the program passes to its model
            return b""
        return buffer.getvalue()

    def _begins(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self.tap.repeats or not module.training or not torch.is_grad_enabled():
            return
        self._kept.append(Kept(None))
        self._kept[-1] = self._noted(self.tap.begun(args, kwargs, self._copies(module)))

    def _lost(self, _err: Exception) -> None:
        """The last micro-batch cannot be repeated."""
        if self._kept:
            self._kept[-1] = Kept(None)

    def _noted(self, begun: Begun) -> Kept:
        tensors = list(_tensors((begun.args, begun.kwargs, begun.received)))
        if not self._fits(tensors):
            return Kept(None)
        return Kept(begun, [(each, each._version) for each in tensors])

    def _fits(self, tensors: list[torch.Tensor]) -> bool:
        size = sum(each.numel() * each.element_size() for each in tensors)
        fits = self._bytes + size <= MOST_BYTES
        self._bytes += size if fits else 0
        return fits

    def _copies(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """Return copies of the buffers. Those that nobody has written to since are those of the last micro-batch."""
        before, found = self._buffers, []
        for at, each in enumerate(module.buffers()):
            mark = each.data_ptr(), each._version
            same = at < len(before) and before[at][0] == mark and before[at][1].shape == each.shape
            found.append(before[at] if same else (mark, each.detach().clone()))
        self._buffers = found
        return [each for _, each in found]

    def _computed(self, module: torch.nn.Module, _args: Any, output: Any) -> None:
        if self.tap.repeats or not module.training or not torch.is_grad_enabled() or not self._kept:
            return
        if self.tap.gathering and self.tap.refuses(output):
            self._kept[-1] = Kept(None)
            return
        for at, tensor in enumerate(floats(output)):
            if tensor.requires_grad:
                self._of_outputs.append(tensor.register_hook(self._noting(self._kept[-1], at)))  # type: ignore[no-untyped-call]

    def _noting(self, kept: Kept, at: int) -> Callable[..., None]:
        """Return the hook of a tensor of an output.

        It keeps nothing alive: the tensor may be one of the input, and Python does not see that a tensor keeps its hooks.
        """
        itself, of = weakref.ref(self), weakref.ref(kept)

        def note(gradient: torch.Tensor) -> None:
            recalled, kept = itself(), of()
            if recalled is not None and kept is not None:
                recalled._of_output(kept, at, gradient)

        def failed(_err: Exception) -> None:
            kept = of()
            if kept is not None:
                kept.large = True

        return quiet_gradient(note, failed)

    def _of_output(self, kept: Kept, at: int, gradient: torch.Tensor) -> None:
        if at in kept.of_output or not self._fits([gradient]):
            kept.large = True
            return
        kept.of_output[at] = gradient.detach()
        kept.marks.append((kept.of_output[at], gradient._version))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
