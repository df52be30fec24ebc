"""One micro-batch: what this rank has computed of it, and its repetition from the same input."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from unickpt.base.module_hooks import ModuleHook
from unickpt.training.witness.hashes import combined, hashes

Begun = tuple[Any, Any, list[torch.Tensor], list[torch.Tensor], tuple[bool, torch.dtype]]
# what a forward pass starts from: positional and named arguments, states of random generators, buffers, and autocast
_SEVERAL = "several micro-batches share a backward pass, or one has several"


def floats(output: Any) -> Iterator[torch.Tensor]:
    """Yield the dense tensors of floating point numbers in the output of a module: not sparse, nested or meta ones."""
    if isinstance(output, torch.Tensor):
        dense = output.layout is torch.strided and not output.is_nested and not output.is_meta
        if dense and output.is_floating_point() and output.numel():
            yield output
    elif isinstance(output, (tuple, list)):
        for each in output:
            yield from floats(each)
    elif isinstance(output, dict):
        yield from floats(tuple(output.values()))


@dataclass
class _Recording:
    """What is known of a micro-batch.

    Attributes:
        before: what the forward pass starts from, as ``torch.save`` writes it.
        output: hash of the output.
        gradients: hash of the gradient of each parameter, by its number.
        of_output: gradients of the output's tensors, by their number.
        unsuited: why it cannot be repeated, or ''.
        hooks: on parameters.
        closed: another micro-batch has begun.
    """

    before: bytes
    output: int = 0
    gradients: dict[int, int] = field(default_factory=dict)
    of_output: dict[int, torch.Tensor] = field(default_factory=dict)
    unsuited: str = ""
    hooks: list[Any] = field(default_factory=list)
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """A micro-batch, or a step of an optimizer, to be repeated.

    Attributes:
        data: input, random state, buffers and gradients of the output. From a rank of this job: it holds pickles.
        values: hash of the output, and of the gradient of each parameter, which is 0 if there is none.
        what: name of what is repeated; '' where each value has a name.
    """

    data: bytes
    values: tuple[int, ...]
    what: str = ""


class Tap:
    """Records a micro-batch, and repeats one.

    Attributes:
        inner: the model.

    Args:
        model: without what reduces its gradients.
        parameters: those that are trained, by name.
    """

    def __init__(self, model: torch.nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
        self.inner = model
        self._parameters = list(parameters.values())
        self.names = ["the output", *(f"the gradient of {name}" for name in parameters)]
        self._device = self._parameters[0].device
        self._armed, self._repeating = False, False
        self._recording: _Recording | None = None
        self._hooks = [
            self.inner.register_forward_pre_hook(ModuleHook(self._begins), with_kwargs=True),
            self.inner.register_forward_hook(ModuleHook(self._computed)),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        self._close_recording()
        for hook in self._hooks:
            hook.remove()

    def arm(self) -> None:
        """Record the next micro-batch."""
        self._close_recording()
        self._armed, self._recording = True, None

    def take(self) -> tuple[Case | None, str]:
        """Return the recorded micro-batch; None if there is none that can be repeated, and why."""
        self._close_recording()
        recording, self._recording, self._armed = self._recording, None, False
        if recording is None:
            return None, "the program did not call the model that it has given to the witness"
        if recording.unsuited or not recording.of_output:
            return None, recording.unsuited or "no gradient comes to the output of the model before the next micro-batch begins"
        buffer = io.BytesIO()
        torch.save((recording.before, recording.of_output), buffer)
        gradients = (recording.gradients.get(at, 0) for at in range(len(self._parameters)))
        return Case(buffer.getvalue(), (recording.output, *gradients)), ""

    def repeat(self, data: bytes) -> tuple[int, ...]:
        """Return the values of a case, computed here. Random generators and buffers are afterwards as before."""
        begun, of_output = self.loaded(data)
        output, gradients = self.play(self.loaded(begun), of_output)
        return (_hash(*output), *(0 if each is None else _hash(each) for each in gradients))

    def play(
        self, begun: Begun, of_output: Mapping[int, torch.Tensor], seen: Callable[[Any], None] = lambda _: None
    ) -> tuple[list[torch.Tensor], tuple[torch.Tensor | None, ...]]:
        """Compute a micro-batch. Return the tensors of the output, and the gradient of each parameter.

        Args:
            begun: what the forward pass starts from.
            of_output: gradients of tensors of the output, by their number; empty: there is no backward pass.
            seen: called with the output before the backward pass.
        """
        args, kwargs, random, buffers, autocast = begun
        now = self.state()
        self._repeating, hooks = True, []
        try:
            self._restore(random, buffers)
            with torch.enable_grad(), torch.autocast(self._device.type, dtype=autocast[1], enabled=autocast[0]):
                whole = self.inner(*args, **kwargs)
            output = list(floats(whole))
            seen(whole)
            if not of_output:
                return output, ()
            chosen, weights = [output[at] for at in of_output], list(of_output.values())
            for tensor, weight in zip(chosen, weights, strict=True):
                hooks.append(tensor.register_hook(partial(_given, weight)))  # type: ignore[no-untyped-call]
            return output, torch.autograd.grad(chosen, self._parameters, weights, allow_unused=True)
        finally:
            self._repeating = False
            for hook in hooks:  # an output may be a parameter, which would keep it
                hook.remove()
            self._restore(*now)

    @property
    def repeats(self) -> bool:
        """Whether a micro-batch is repeated now."""
        return self._repeating

    def autocast(self) -> tuple[bool, torch.dtype]:
        """Return whether autocast is on, and its dtype."""
        return torch.is_autocast_enabled(self._device.type), torch.get_autocast_dtype(self._device.type)

    def loaded(self, data: bytes) -> Any:
        """Return what ``torch.save`` has written, on this rank's device."""
        return loaded(data, self._device)

    def random(self) -> list[torch.Tensor]:
        """Return the states of torch's random generators."""
        found = [torch.get_rng_state()]
        return [*found, torch.cuda.get_rng_state(self._device)] if self._device.type == "cuda" else found

    def state(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return copies of what a forward pass changes: states of random generators, and buffers."""
        return self.random(), [each.detach().clone() for each in self.inner.buffers()]

    @torch.no_grad()
    def _restore(self, random: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
        torch.set_rng_state(random[0])
        if len(random) > 1:
            torch.cuda.set_rng_state(random[1], self._device)
        for own, value in zip(self.inner.buffers(), buffers, strict=True):
            own.copy_(value)

    def _begins(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self._repeating or not module.training or not torch.is_grad_enabled():
            return
        self._close_recording()
        if not self._armed:
            return
        self._armed = False
        buffer = io.BytesIO()
        try:
            torch.save((args, kwargs, *self.state(), self.autocast()), buffer)
        except Exception as err:  # of any object that the program passes to its model
            self._recording = _Recording(b"", unsuited=f"the input of the model cannot be sent to another rank ({err})")
            return
        self._recording = recording = _Recording(buffer.getvalue())
        for at, parameter in enumerate(self._parameters):
            recording.hooks.append(parameter.register_hook(partial(self._gradient, recording, at)))  # type: ignore[no-untyped-call]

    def _computed(self, _module: torch.nn.Module, _args: Any, output: Any) -> None:
        recording = self._recording
        if self._repeating or recording is None or recording.closed or recording.output or recording.unsuited:
            return
        found = list(floats(output))
        try:
            recording.output = _hash(*found)
        except Exception as err:  # of any class of tensor
            recording.unsuited = f"the output of the model has no hash ({err})"
            return
        for at, tensor in enumerate(found):
            if tensor.requires_grad:
                hook = tensor.register_hook(partial(self._of_output, recording, at))  # type: ignore[no-untyped-call]
                recording.hooks += [hook] * tensor.is_leaf  # a parameter keeps it

    def _of_output(self, recording: _Recording, at: int, gradient: torch.Tensor) -> None:
        if recording.closed or at in recording.of_output:
            recording.unsuited = _SEVERAL
        recording.of_output[at] = gradient.detach().clone()

    def _gradient(self, recording: _Recording, at: int, gradient: torch.Tensor) -> None:
        if at in recording.gradients:
            recording.unsuited = _SEVERAL
        recording.gradients[at] = _hash(gradient)

    def _close_recording(self) -> None:
        if self._recording is not None:
            self._recording.closed = True
            for hook in self._recording.hooks:
                hook.remove()
            self._recording.hooks.clear()


def _given(gradient: torch.Tensor, _computed: torch.Tensor) -> torch.Tensor:
    """Replace the gradient of an output by the recorded one, which has also what comes from other outputs."""
    return gradient


def loaded(data: bytes, here: torch.device) -> Any:
    """Return what ``torch.save`` has written on a rank of this job: it holds pickles. Tensors of a device go to this one."""

    def place(storage: Any, location: str) -> Any:
        return storage.to(device=here) if here.type != "cpu" and location != "cpu" else storage

    return torch.load(io.BytesIO(data), map_location=place, weights_only=False)


@torch.no_grad()
def _hash(*tensors: torch.Tensor) -> int:
    return combined(hashes([each.detach() for each in tensors])) or 1
