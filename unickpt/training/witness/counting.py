"""Sees values that are not finite in the outputs of layers and in their gradients. Nothing waits for the device.

Of each tensor its least and its largest value are kept: of what is not finite, one of them is not finite either. That reads a
tensor once, and writes next to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from unickpt.base.errors import ConfigError
from unickpt.base.module_hooks import ModuleHook
from unickpt.training.witness.held import local
from unickpt.training.witness.nonfinite import MOST_MICRO_BATCHES, Counted, Place, first_place
from unickpt.training.witness.outputs import floats, in_transform
from unickpt.training.witness.quiet import ignore, quiet

FACTOR = 1024.0  # times the largest value of the steps before; a step of training changes it by far less
WARM_UP = 20  # steps before a value counts as an outlier
_STAYS = 3  # steps with outliers after which they are usual
_MOST = 4096  # values of a micro-batch that are kept one by one, if a program calls layers again and again


_Range = tuple[Hashable, torch.Tensor, torch.Tensor]  # of what, least and largest value


def _joined(ranges: Iterable[_Range]) -> list[_Range]:
    """Return one range for each thing. Its ends are not finite where one of the ranges is not. Nothing waits for the device."""
    of: dict[Hashable, list[_Range]] = {}
    for each in ranges:
        of.setdefault(each[0], []).append(each)
    return [
        (what, torch.stack([low for _, low, _ in some]).amin(), torch.stack([high for _, _, high in some]).amax())
        for what, some in of.items()
    ]


@dataclass
class _Seen:
    """Least and largest values of tensors, by dtype and device, each with what it is of."""

    of: dict[tuple[torch.dtype, torch.device], list[_Range]] = field(default_factory=dict)
    most: int = _MOST

    @torch.no_grad()
    def add(self, what: Hashable, tensor: torch.Tensor) -> None:
        try:
            values = local(tensor)
            if not values.numel():
                return
            values = values if values.dtype.itemsize > 1 else values.float()  # fp8 has no order
            low, high = torch.aminmax(values)
            found = self.of.setdefault((values.dtype, values.device), [])
            found.append((what, low, high))
            if len(found) > self.most:
                found[:] = _joined(found)
                self.most = max(self.most, 2 * len(found))
        except Exception:  # of any class or dtype of tensor: the program that computes it must not notice
            return

    @torch.no_grad()
    def bad(self) -> set[Hashable]:
        """Return of what a value is not finite. Waits for the device."""
        found: set[Hashable] = set()
        for each in self.of.values():
            every = torch.stack([low for _, low, _ in each] + [high for _, _, high in each])
            found |= {each[at % len(each)][0] for at in torch.isfinite(every).logical_not().nonzero().view(-1).tolist()}
        return found

    @torch.no_grad()
    def largest(self) -> dict[Hashable, float]:
        """Return the largest absolute value by what it is of. Waits for the device."""
        found: dict[Hashable, float] = {}
        for each in self.of.values():
            low, high = torch.stack([low for _, low, _ in each]).abs(), torch.stack([high for _, _, high in each]).abs()
            for (what, _, _), value in zip(each, torch.maximum(low, high).tolist(), strict=True):
                found[what] = max(found.get(what, 0.0), value if value == value else math.inf)
        return found


class Counters:
    """What is not finite in the micro-batches since the last step.

    Layers are the modules without children, those with parameters of their own, and the whole model.

    Args:
        model: as the program calls it.
        inner: the model without wrappers that have no layer of their own.
        plain: returns the name of a layer of ``inner`` as messages have it.
        parameters: whose gradients are seen too, before any reduction, for ``gradients_finite``.

    Raises:
        ConfigError: it is compiled, so its layers call no hooks.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inner: torch.nn.Module | None = None,
        *,
        plain: Callable[[str], str] = str,
        parameters: Iterable[torch.Tensor] = (),
    ) -> None:
        require_layers(model, "nonfinite")
        self._model, self._wrapped = model, inner is not None and inner is not model
        self._names = [""]
        self._of_outputs: list[Any] = []  # hooks
        self._order: dict[int, None] = {}  # layers as they were first called
        self._rows: list[_Seen] = []  # of each micro-batch, by direction and number of the layer
        self._usual: set[str] = set()
        self._usually: dict[Hashable, float] = {}  # largest values of the steps before
        self._of_step: dict[Hashable, float] = {}  # and of this one
        self._steps = self._far_steps = 0  # that are learned, and that had outliers one after another
        self._of_gradients = _Seen()
        self.paused = False  # while a micro-batch is repeated, and nobody asks where its values are not finite
        self._repeats = self._closed = self._full = False
        self._hooks = [
            model.register_forward_pre_hook(ModuleHook(quiet(self._begins, ignore))),
            model.register_forward_hook(ModuleHook(quiet(partial(self._computed, 0), ignore))),
        ]
        inner = model if inner is None else inner
        for name, module in inner.named_modules():
            leaf = next(module.children(), None) is None or next(module.parameters(recurse=False), None) is not None
            if leaf and module not in (model, inner):
                computed = quiet(partial(self._computed, len(self._names)), ignore)
                self._hooks.append(module.register_forward_hook(ModuleHook(computed)))
                self._names.append(plain(name))
        for parameter in parameters:
            if parameter.requires_grad:
                self._hooks.append(parameter.register_hook(self._gradient))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Remove the hooks, and what is kept. Copies of the model keep the hooks."""
        self._closed = True
        self._of_step = {}
        self.clear()
        for hook in self._hooks:
            hook.remove()

    def clear(self) -> None:
        """Begin a step."""
        self._rows, self._full = [], False
        for hook in self._of_outputs:  # a program may use an output in several steps
            hook.remove()
        self._of_outputs = []
        self._of_gradients = _Seen()
        if self._of_step:
            self._learn(self._of_step)
            self._of_step = {}

    def blind(self) -> bool:
        """Return whether no layer was seen in any micro-batch since the last step, or the program has compiled some since."""
        return not self._rows or is_compiled(self._model)

    def gradients_finite(self) -> bool:
        """Return whether the gradients of the parameters were finite in all micro-batches since the last step."""
        return not self._of_gradients.bad()

    def _gradient(self, gradient: torch.Tensor) -> None:
        if not (self._closed or self.paused or self._repeats or self._full):
            self._of_gradients.add("", gradient)

    def _begins(self, model: torch.nn.Module, _args: Any) -> None:
        if self._closed or self.paused or self._repeats or not model.training or not torch.is_grad_enabled():
            return
        self._full = len(self._rows) >= MOST_MICRO_BATCHES
        if not self._full:
            self._rows.append(_Seen())

    def _computed(self, at: int, _module: torch.nn.Module, _args: Any, output: Any) -> None:
        if self._closed or self.paused or self._full or not self._rows or not self._model.training or in_transform():
            return
        self._order.setdefault(at)
        row = self._rows[-1]
        for tensor in floats(output):
            row.add((False, at), tensor)
            if tensor.grad_fn is not None:  # a layer may return a parameter, such as a bias, which would keep the hook
                self._of_outputs.append(tensor.register_hook(partial(row.add, (True, at))))  # type: ignore[no-untyped-call]

    def found(self, finite: Callable[[], bool]) -> Place | None:
        """Return where values that are not finite appear first, if they reach a gradient that the next step uses.

        Args:
            finite: returns whether all these gradients are finite. Called only if a layer has other values.
        """
        seen = [row.bad() for row in self._rows]
        if not any(seen):
            return None
        counted = [self._counted(each) for each in seen]
        if finite():
            self._usual |= {name for each in counted for name in each.forward}
            return None
        return first_place(counted, self._usual)

    def outlier(self) -> tuple[Place, float] | None:
        """Return where values appear first that are far larger than in the steps before, and how many times.

        ``clear`` then learns the values of this step, if they are finite.
        """
        of = [row.largest() for row in self._rows]
        for each in of:
            for what, value in each.items():
                if math.isfinite(value):
                    self._of_step[what] = max(self._of_step.get(what, 0.0), value)
        place = first_place([self._counted(self._far(each)) for each in of])
        if place is None:
            return None
        what = place.backward, self._names.index(place.layer)
        return place, of[place.micro_batch][what] / self._usually[what]

    def _learn(self, largest: Mapping[Hashable, float]) -> None:
        """Learn the values of a step, without outliers, unless they have come in several steps one after another."""
        far = self._far(largest)
        self._far_steps = self._far_steps + 1 if far else 0
        left_out = far if self._far_steps < _STAYS else ()
        self._steps += 1
        for what, value in largest.items():
            if what not in left_out:
                self._usually[what] = max(self._usually.get(what, 0.0), value)

    def _far(self, largest: Mapping[Hashable, float]) -> set[Hashable]:
        """Return of what the largest value is far larger than before. What was always 0 does not count."""
        if self._steps < WARM_UP:
            return set()
        return {what for what, value in largest.items() if value > FACTOR * self._usually.get(what, math.inf) > 0}

    def repeated(self, play: Callable[[Callable[[Any], None]], bool], *, large: bool = False) -> int:
        """Return the number of the first place where a repetition of a micro-batch has values that are not finite.

        Args:
            play: repeats it, calls its argument with the whole output, and returns whether output and gradients are finite.
            large: values that are far larger than in the steps of this rank before, or not finite.

        Returns:
            0 if there are none; -1 if nobody knows.
        """
        if self._closed:
            return -1
        kept, row = (self._rows, self.paused, self._full), _Seen()
        self._rows, self.paused, self._full, self._repeats = [row], False, False, True
        try:
            finite = play(partial(self._computed, 0, self._model, ()) if self._wrapped else lambda _: None)
            bad = self._far(row.largest()) if large else row.bad()
            if not bad if large else finite:
                return 0
            place = first_place([self._counted(bad)], () if large else self._usual)
        finally:
            (self._rows, self.paused, self._full), self._repeats = kept, False
        return -1 if place is None else self.number(place)

    def number(self, place: Place) -> int:
        """Return a number of a layer and a direction, which is the same on all ranks with this model, from 1."""
        return 1 + 2 * self._names.index(place.layer) + place.backward

    def order(self, place: Place) -> int:
        """Return a number that grows in the order in which a micro-batch computes layers, and then their gradients."""
        at = list(self._order).index(self._names.index(place.layer))
        return 2 * len(self._names) - at if place.backward else at

    def _counted(self, bad: Collection[Hashable]) -> Counted:
        named = [tuple(self._names[at] for at in self._order if (backward, at) in bad) for backward in (False, True)]
        return Counted(named[0], named[1])


def is_compiled(model: torch.nn.Module) -> bool:
    """Return whether a model, or a part of it, is compiled."""
    return any(type(each).__name__ == "OptimizedModule" or each._compiled_call_impl is not None for each in model.modules())


def require_layers(model: torch.nn.Module, check: str) -> None:
    """Raise ConfigError if a model is compiled, so that its layers call no hooks."""
    if is_compiled(model):
        raise ConfigError(f'the check "{check}" sees no layers of a compiled model; name the other checks in "checks"')


def all_finite(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Return whether all values of this rank are finite. Tensors may be None."""
    seen = _Seen()
    for each in tensors:
        if each is not None and each.is_floating_point():
            seen.add("", each)
    return not seen.bad()
