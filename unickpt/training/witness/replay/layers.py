"""Hashes of what each rank computes by itself: inputs, outputs of layers, and gradients before any reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from unickpt.base.module_hooks import ModuleHook
from unickpt.training.witness.hashes import combined, hashes
from unickpt.training.witness.held import local
from unickpt.training.witness.quiet import ignore, quiet, quiet_gradient
from unickpt.training.witness.replay.records import Phase

Add = Callable[[Phase, int, str, int], None]  # phase, micro-batch, name, hash


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in arguments or in an output of a module, of any dtype."""
    if isinstance(values, torch.Tensor):
        return [values] if values.numel() else []
    if isinstance(values, dict):
        values = tuple(values.values())
    return [each for value in values for each in tensors_in(value)] if isinstance(values, (tuple, list)) else []


@torch.no_grad()
def hash_of(tensors: Sequence[torch.Tensor]) -> int:
    """Return one hash of some tensors, in their order. Those that have no memory of their own are left out."""
    held = [local(each) for each in tensors]
    plain = (each for each in held if each.layout is torch.strided and not (each.is_meta or each.is_nested))
    return combined(hashes(list(plain)))


class LayerTap:
    """Hashes what the layers of some models compute, in training.

    A compiled model has no layers: of it, only the gradients of its parameters are seen.

    Args:
        models: each as something calls it, the model without wrappers, and the beginning of the names of its layers.
        plain: returns the name of a layer as messages have it.
        add: gets what is computed.
    """

    def __init__(
        self, models: Sequence[tuple[torch.nn.Module, torch.nn.Module, str]], *, add: Add, plain: Callable[[str], str] = str
    ) -> None:
        self._add, self._plain = add, plain
        self._begun: dict[str, int] = {}  # micro-batches of this step, by the beginning of the names
        self._of_parameter: Any = WeakIdKeyDictionary()
        self._hooks: list[Any] = []
        self._active = False
        for model, inner, prefix in models:
            self._tap(model, inner, prefix)

    def begin_step(self) -> None:
        """Count the micro-batches anew."""
        self._begun.clear()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in (*self._hooks, *self._of_parameter.values()):
            hook.remove()

    def _tap(self, model: torch.nn.Module, inner: torch.nn.Module, prefix: str) -> None:
        if any(type(each).__name__ == "OptimizedModule" or each._compiled_call_impl is not None for each in model.modules()):
            for name, parameter in inner.named_parameters():
                self._watch(parameter, f"{prefix}{self._plain(name)}", prefix)
            return
        self._hooks += [
            model.register_forward_pre_hook(_hook(partial(self._begins, prefix)), with_kwargs=True),
            model.register_forward_hook(_hook(partial(self._computed, "the model", prefix))),
        ]
        for own, module in inner.named_modules():
            name = f"{prefix}{self._plain(own)}"
            if next(module.parameters(recurse=False), None) is not None:
                self._hooks.append(module.register_forward_pre_hook(_hook(partial(self._parameters, name, prefix))))
            leaf = next(module.children(), None) is None or next(module.parameters(recurse=False), None) is not None
            if leaf and module not in (model, inner):
                self._hooks.append(module.register_forward_hook(_hook(partial(self._computed, name, prefix))))

    def _begins(self, prefix: str, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._active = model.training and torch.is_grad_enabled()
        if not self._active:
            return
        at = self._begun[prefix] = self._begun.get(prefix, -1) + 1
        self._add(Phase.RANDOM, at, f"{prefix}random states", hash_of(_random()))
        self._add(Phase.INPUT, at, f"{prefix}the input of the model", hash_of(tensors_in((args, kwargs))))

    def _parameters(self, name: str, prefix: str, module: torch.nn.Module, _args: Any) -> None:
        """Watch the gradients of parameters as the forward pass has them: with FSDP2 these are not those at rest."""
        if not self._active:
            return
        for own, parameter in module._parameters.items():
            if parameter is not None:
                self._watch(parameter, f"{name}.{own}" if name else own, prefix)

    def _watch(self, parameter: torch.Tensor, name: str, prefix: str) -> None:
        if parameter.requires_grad and parameter not in self._of_parameter:
            noted = quiet_gradient(partial(self._gradient, name, prefix), ignore)
            self._of_parameter[parameter] = parameter.register_hook(noted)  # type: ignore[no-untyped-call]

    def _gradient(self, name: str, prefix: str, gradient: torch.Tensor) -> None:
        self._add(Phase.GRADIENT, self._begun.get(prefix, 0), name, hash_of([gradient]))

    def _computed(self, name: str, prefix: str, module: torch.nn.Module, _args: Any, output: Any) -> None:
        if not self._active or not module.training:
            return
        found = [each for each in tensors_in(output) if each.layout is torch.strided and not each.is_nested]
        at = self._begun.get(prefix, 0)
        self._add(Phase.OUTPUT, at, name, hash_of(found))
        for number, tensor in enumerate(found):
            if tensor.grad_fn is not None:  # a parameter, which a layer may return, would keep the hook
                what = name if len(found) == 1 else f"{name}, tensor {number}"
                tensor.register_hook(quiet_gradient(partial(self._of_output, what, at), ignore))  # type: ignore[no-untyped-call]

    def _of_output(self, what: str, at: int, gradient: torch.Tensor) -> None:
        self._add(Phase.OUTPUT_GRADIENT, at, what, hash_of([gradient]))


def _hook(function: Callable[..., None]) -> ModuleHook:
    """Return a hook that leaves out what has no hash: the program computes without it."""
    return ModuleHook(quiet(function, ignore))


def _random() -> list[torch.Tensor]:
    """Return the states of torch's random generators on this rank."""
    found = [torch.get_rng_state()]
    return [*found, torch.cuda.get_rng_state()] if torch.cuda.is_available() else found
