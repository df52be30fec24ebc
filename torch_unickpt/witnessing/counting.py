"""Counts values that are not finite in the outputs of layers and in their gradients. Nothing waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from torch_unickpt.held_state.names import plain, without_ddp
from torch_unickpt.witnessing.held import Stepped, local
from torch_unickpt.witnessing.repeating import floats
from unickpt.base.errors import ConfigError
from unickpt.training.witness.nonfinite import Counted, Place, first_place


class Counters:
    """The counts of the micro-batches since the last step.

    Layers are the modules without children, those with parameters of their own, and the whole model.

    Args:
        model: as the program calls it.

    Raises:
        ConfigError: it is compiled, so its layers call no hooks.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        if any(type(each).__name__ == "OptimizedModule" or each._compiled_call_impl is not None for each in model.modules()):
            raise ConfigError('the check "nonfinite" sees no layers of a compiled model; name the other checks in "checks"')
        self._model = model
        self._device = next((each.device for each in model.parameters()), torch.device("cpu"))
        self._names = [""]
        self._order: dict[int, None] = {}  # layers as they were first called
        self._rows: list[torch.Tensor] = []  # of each micro-batch: counts forward, backward
        self._usual: set[str] = set()
        self.paused = False  # while a micro-batch is repeated
        self._hooks = [model.register_forward_pre_hook(self._begins), model.register_forward_hook(partial(self._computed, 0))]
        inner = without_ddp(model)
        for name, module in inner.named_modules():
            leaf = next(module.children(), None) is None or next(module.parameters(recurse=False), None) is not None
            if leaf and module not in (model, inner):
                self._hooks.append(module.register_forward_hook(partial(self._computed, len(self._names))))
                self._names.append(plain(name))

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def clear(self) -> None:
        """Begin a step."""
        self._rows = []

    def _begins(self, model: torch.nn.Module, _args: Any) -> None:
        if not model.training or not torch.is_grad_enabled():
            return
        self._rows.append(torch.zeros(2, len(self._names), dtype=torch.int64, device=self._device))

    def _computed(self, at: int, _module: torch.nn.Module, _args: Any, output: Any) -> None:
        if self.paused or not self._rows or not self._model.training:
            return
        self._order.setdefault(at)
        row = self._rows[-1]
        for tensor in floats(output):
            _count(row, 0, at, tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(_count, row, 1, at))  # type: ignore[no-untyped-call]

    def found(self, stepped: Sequence[Stepped]) -> Place | None:
        """Return where values that are not finite appear first, if they reach a gradient that the next step uses."""
        if not self._rows:
            return None
        rows = torch.stack(self._rows)
        if not bool(rows.any()):
            return None
        counted = [self._counted(row) for row in rows.tolist()]
        if all_finite(each.parameter.grad for each in stepped):
            self._usual |= {name for each in counted for name in each.forward}
            return None
        return first_place(counted, self._usual)

    def _counted(self, row: list[list[int]]) -> Counted:
        named = [{self._names[at]: each[at] for at in self._order if each[at]} for each in row]
        return Counted(named[0], named[1])


@torch.no_grad()
def _count(row: torch.Tensor, way: int, at: int, tensor: torch.Tensor) -> None:
    values = local(tensor)
    row[way, at] += (values.numel() - torch.isfinite(values).sum()).to(row.device)


def all_finite(tensors: Any) -> bool:
    """Return whether all values of this rank are finite. Tensors may be None."""
    parts = [local(each) for each in tensors if each is not None]
    return all(bool(torch.isfinite(each).all()) for each in parts if each.numel() and each.is_floating_point())
