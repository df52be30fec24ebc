"""Attributes of the modules of a model, and parameters that nothing trains, that a repetition leaves as they were."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

MOST_BYTES = 64 << 20  # of a tensor that is copied
MOST_HELD_BYTES = 256 << 20  # of the tensors in containers of a model that are copied
MOST_ITEMS = 10_000  # of a container whose items are looked at
_OF_TORCH = vars(torch.nn.Module()).keys() - {"training", "_buffers"}  # parameters, modules and hooks
_CONTAINERS: Any = (list, dict, set, deque, OrderedDict, defaultdict, Counter)


@contextmanager
def attributes_kept(model: torch.nn.Module, counted: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Leave the attributes of the modules of a model as they are, whatever is done meanwhile.

    Containers get back what they hold, also those that others hold. Small tensors that are no parameters get back their values,
    also in containers. Other objects do not get back what is inside of them. Of buffers, only which tensors they are.

    Args:
        model: see above.
        counted: called at the end if a number among the attributes and in containers, or the size of one, had changed.
    """
    kept: list[_Attributes] = []
    left_bytes = MOST_HELD_BYTES
    for module in model.modules():
        kept.append(_Attributes(module, left_bytes))
        left_bytes -= kept[-1].held_bytes
    try:
        yield
    finally:
        if any(each.counted() for each in kept):
            counted()
        for each in kept:
            each.restore()


class Untrained:
    """Parameters that nothing trains and that forward passes write to, such as running means.

    The others, such as those of a base model beside adapters, are not copied. Writes through ``.data`` are not seen.

    Args:
        model: whose parameters they are among.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._noted: list[tuple[torch.nn.Parameter, int]] | None = None

    def note(self) -> None:
        """A forward pass begins. The first one finds the parameters."""
        if self._noted is None:
            found = (each for each in self._model.parameters() if not each.requires_grad and not each.is_inference())
            self._noted = [(each, each._version) for each in found if not hasattr(each, "device_mesh")]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Give the parameters that have been written to since ``note`` their values back, whatever is done meanwhile."""
        written = [each for each, version in self._noted or () if each._version != version]
        before = [(each, each.data_ptr(), each._version, each.detach().clone()) for each in written]
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, memory, version, value in before:
                    if parameter._version != version and (parameter.data_ptr(), parameter.shape) == (memory, value.shape):
                        parameter.copy_(value)


class _Attributes:
    """Those of a module, as they are now.

    Args:
        module: see above.
        most_bytes: of the tensors in containers that may still be copied.

    Attributes:
        held_bytes: of those that were.
    """

    def __init__(self, module: torch.nn.Module, most_bytes: int = MOST_HELD_BYTES) -> None:
        self._all = vars(module)
        self._kept = {name: value for name, value in self._all.items() if name not in _OF_TORCH}
        self._containers: list[tuple[Any, Any]] = []
        values = list(self._kept.values())
        own, seen, self.held_bytes = len(values), set(), 0
        for value in values:  # which gets the items of containers
            if type(value) in (*_CONTAINERS, tuple) and id(value) not in seen:
                seen.add(id(value))
                if type(value) is not tuple:
                    self._containers.append((value, value.copy()))
                if len(value) <= MOST_ITEMS:
                    values += value.values() if isinstance(value, dict) else value
        self._generators = [(value, value.get_state()) for value in values if isinstance(value, torch.Generator)]
        self._tensors = []
        for at, value in enumerate(values):
            size = value.numel() * value.element_size() if _has_state(value) else None
            if size is not None and (at < own or self.held_bytes + size <= most_bytes):
                self.held_bytes += size if at >= own else 0
                self._tensors.append((value, value._version, value.clone()))

    def counted(self) -> bool:
        numbers = ((value, self._all.get(name)) for name, value in self._kept.items() if isinstance(value, (int, float)))
        held = any(_numbers(container) != _numbers(before) for container, before in self._containers)
        return held or any(isinstance(now, (int, float)) and now != before for before, now in numbers)

    def restore(self) -> None:
        for name in self._all.keys() - self._kept.keys() - _OF_TORCH:
            del self._all[name]
        self._all.update(self._kept)
        for container, before in self._containers:
            if not _same(container, before):
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(before)
        for generator, state in self._generators:
            generator.set_state(state)
        with torch.no_grad():
            for tensor, version, value in self._tensors:
                if tensor._version != version:
                    tensor.copy_(value)


def _has_state(value: Any) -> bool:
    """Return whether it is a plain tensor that a forward pass may write to, and that autograd does not know."""
    plain = type(value) is torch.Tensor and not (value.requires_grad or value.is_inference() or value.is_nested)
    return plain and value.numel() * value.element_size() <= MOST_BYTES


def _numbers(container: Any) -> tuple[int, list[Any]]:
    """Return the number of items, and the numbers among them."""
    if len(container) > MOST_ITEMS:
        return len(container), []
    items = container.values() if isinstance(container, dict) else container
    return len(container), [item for item in items if isinstance(item, (int, float))]


def _same(container: Any, before: Any) -> bool:
    """Return whether a container holds the same objects as before, in the same order."""
    if isinstance(container, dict) and not _same(list(container.values()), list(before.values())):
        return False
    return len(container) == len(before) and all(a is b for a, b in zip(container, before, strict=True))
