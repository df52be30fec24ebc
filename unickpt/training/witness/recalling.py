"""The micro-batches since the last step, so that they can be repeated. Their inputs are kept as they are, and not copied."""

from __future__ import annotations

import io
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from unickpt.base.module_hooks import ModuleHook
from unickpt.training.witness.cases import Begun
from unickpt.training.witness.nonfinite import MOST_MICRO_BATCHES
from unickpt.training.witness.outputs import floats, in_transform
from unickpt.training.witness.quiet import quiet, quiet_gradient
from unickpt.training.witness.repeating import Tap

MOST_BYTES = 256 << 20  # of inputs, copies of buffers, and gradients of outputs, that stay in memory until the step


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


_NOTHING = Kept(None)  # of any micro-batch that cannot be repeated


@dataclass(frozen=True, slots=True)
class _Copied:
    """A buffer, its memory, which nothing else gets as long as this is kept, its counter of writes, and its copy."""

    buffer: torch.Tensor
    memory: torch.Tensor
    version: int
    copy: torch.Tensor

    def is_of(self, buffer: torch.Tensor) -> bool:
        """Return whether this is a copy of a buffer as it is now."""
        same = self.buffer is buffer and self.memory.data_ptr() == buffer.data_ptr() and self.copy.shape == buffer.shape
        return same and self.version == buffer._version


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
        self._full = self._closed = False
        self._buffers: list[_Copied] = []
        self._hooks = [
            tap.inner.register_forward_pre_hook(ModuleHook(quiet(self._begins, self._lost)), with_kwargs=True),
            tap.inner.register_forward_hook(ModuleHook(quiet(self._computed, self._lost))),
        ]

    def close(self) -> None:
        """Remove the hooks, and what is kept. Copies of the model keep the hooks."""
        self._closed = True
        self.clear()
        self._buffers = []
        for hook in self._hooks:
            hook.remove()

    def clear(self) -> None:
        """A step begins."""
        self._kept, self._bytes, self._full = [], 0, False
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
        if self._leaves_out(module):
            return
        self._full = len(self._kept) >= MOST_MICRO_BATCHES
        if self._full:
            return
        self._kept.append(_NOTHING)
        if in_transform():
            return
        begun = self.tap.begun(_without_graph(args), _without_graph(kwargs), [])
        tensors = list(_tensors((begun.args, begun.kwargs, begun.received)))
        if self._fits([*tensors, *_tensors(begun.random), *self._written(module)]):
            begun.buffers.extend(self._copies(module))
            self._kept[-1] = Kept(begun, [(each, each._version) for each in tensors])

    def _leaves_out(self, module: torch.nn.Module) -> bool:
        """Return whether what runs now is no micro-batch of the training."""
        return self._closed or self.tap.repeats or not module.training or not torch.is_grad_enabled()

    def _lost(self, _err: Exception) -> None:
        """The last micro-batch cannot be repeated."""
        if self._kept and not self._full:
            self._kept[-1] = _NOTHING

    def _fits(self, tensors: Iterable[torch.Tensor]) -> bool:
        size = sum(each.numel() * each.element_size() for each in tensors)
        fits = self._bytes + size <= MOST_BYTES
        self._bytes += size if fits else 0
        return fits

    def _written(self, module: torch.nn.Module) -> Iterator[torch.Tensor]:
        """Yield the buffers whose copies take more memory than one copy of all does, which is always there."""
        if any(each.begun is not None for each in self._kept):
            for at, each in enumerate(module.buffers()):
                if not self._is_copied(at, each):
                    yield each

    def _is_copied(self, at: int, buffer: torch.Tensor) -> bool:
        """Return whether nobody has written to a buffer since it was copied."""
        return at < len(self._buffers) and self._buffers[at].is_of(buffer)

    def _copies(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """Return copies of the buffers. Those that nobody has written to since are those of the last micro-batch."""
        self._buffers = [
            self._buffers[at]
            if self._is_copied(at, each)
            else _Copied(each, each.detach(), each._version, each.detach().clone())
            for at, each in enumerate(module.buffers())
        ]
        return [each.copy for each in self._buffers]

    def _computed(self, module: torch.nn.Module, _args: Any, output: Any) -> None:
        if self._leaves_out(module) or self._full or not self._kept or self._kept[-1] is _NOTHING:
            return
        if self.tap.gathering and self.tap.refuses(output):
            self._kept[-1] = _NOTHING
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


def _without_graph(value: Any) -> Any:
    """Return an argument without what has computed its tensors, which would keep the forward pass of other models."""
    if isinstance(value, torch.Tensor):
        return value if value.grad_fn is None else value.detach().requires_grad_()
    if type(value) in (tuple, list):
        return type(value)(map(_without_graph, value))
    return {key: _without_graph(each) for key, each in value.items()} if type(value) is dict else value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
