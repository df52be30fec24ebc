"""One micro-batch: what this rank has computed of it, and its repetition from the same input."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from unickpt.base.module_hooks import ModuleHook
from unickpt.training.witness.attributes import Untrained, attributes_kept
from unickpt.training.witness.cases import Begun, Case, loaded
from unickpt.training.witness.hashes import combined, hashes
from unickpt.training.witness.outputs import floats, is_checkpointed
from unickpt.training.witness.quiet import quiet, quiet_gradient
from unickpt.training.witness.surroundings import Generators, Surroundings

_SEVERAL = "several micro-batches share a backward pass, or one has several"
_REENTRANT = "reentrant checkpointing (use_reentrant=True) cannot be repeated"
_NO_GRADIENT = "no gradient comes to the output of the model before the step"


@dataclass
class _Recording:
    """What is known of a micro-batch.

    Attributes:
        before: what the forward pass starts from, as ``torch.save`` writes it.
        output: hash of the output.
        gradients: hash of the gradient of each parameter and each received tensor, by its number.
        of_output: gradients of the output's tensors, by their number.
        task: number of the backward pass in which they came; -1: there was none.
        other_task: that of another micro-batch, the last one.
        running: its backward pass has begun, and none of another micro-batch since.
        unsuited: why it cannot be repeated, or ''.
        hooks: on parameters.
        closed: nothing more is recorded.
    """

    before: bytes
    output: int = 0
    gradients: dict[int, int] = field(default_factory=dict)
    of_output: dict[int, torch.Tensor] = field(default_factory=dict)
    task: int = -1
    other_task: int = -1
    running: bool = False
    unsuited: str = ""
    hooks: list[Any] = field(default_factory=list)
    closed: bool = False

    def drop(self) -> None:
        """Free what it holds: hooks keep it as long as the program keeps an output."""
        self.before, self.of_output = b"", {}

    def fail(self, err: Exception) -> None:
        """It cannot be repeated."""
        self.unsuited = self.unsuited or f"a micro-batch cannot be recorded: {type(err).__name__}: {err}"


class Tap:
    """Records a micro-batch, and repeats one.

    A repetition computes the gradient of each parameter, and frees it at once: the gradients of the step stay, and no reduction
    begins. If layers gather their parameters when they are called, all ranks must repeat something at the same time.

    Attributes:
        inner: the model.
        gathering: modules that gather their parameters when they are called, as those of ``fully_shard`` do.
        sends: as in ``Surroundings``.
        counts: the last repetition has changed numbers that modules have as attributes, so another one may compute something
            else.

    Args:
        model: without what reduces its gradients.
        parameters: those that are trained, by name.
        gathering: see above. Their parameters have other tensors then, under the same names.
        plain: returns a name in the model as ``parameters`` has it.
        generators: random generators that the model uses.
        surroundings: see there.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Mapping[str, torch.Tensor],
        *,
        gathering: Mapping[str, torch.nn.Module] | None = None,
        plain: Callable[[str], str] = str,
        generators: Generators | None = None,
        surroundings: Surroundings | None = None,
    ) -> None:
        self.inner, self.gathering = model, dict(gathering or {})
        self._parameters = list(parameters.values())
        self._numbers = {name: at for at, name in enumerate(parameters)}
        self._surroundings = surroundings or Surroundings()
        self.sends = self._surroundings.sends
        self._slots = list(self._surroundings.slots())
        self.names = [
            "the output",
            *(f"the gradient of {name}" for name in parameters),
            *["the gradient of the input"] * len(self._slots),
        ]
        self._device = self._parameters[0].device
        self._generators = generators or Generators(self._device, model)
        self._plain, self._untrained = plain, Untrained(model)
        self._armed, self._repeating, self.counts = False, False, False
        self._recording: _Recording | None = None
        self._leaves: dict[int, torch.Tensor] = {}  # of the forward pass that runs now
        self._on_leaf: Callable[[int, torch.Tensor], None] | None = None
        self._hooks = [
            self.inner.register_forward_pre_hook(self._quiet(self._begins), with_kwargs=True),
            self.inner.register_forward_hook(self._quiet(self._computed)),
            *(
                each.register_forward_pre_hook(self._quiet(partial(self._gathered, name)))
                for name, each in self.gathering.items()
            ),
        ]

    def _quiet(self, hook: Callable[..., None]) -> ModuleHook:
        """Return a hook whose errors are the reason why the micro-batch is not repeated; those of a repetition are raised."""
        return ModuleHook(quiet(hook, self._failed, loud=lambda: self._repeating))

    def _failed(self, err: Exception) -> None:
        if self._recording is None:
            self._recording = _Recording(b"")
        self._recording.fail(err)

    def close(self) -> None:
        """Remove the hooks."""
        self._close_recording()
        if self._recording is not None:
            self._recording.drop()
        for hook in self._hooks:
            hook.remove()

    def arm(self, turn: int = 0) -> None:  # noqa: ARG002 - the first micro-batch, whichever check it is
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
            recording.drop()
            return None, recording.unsuited or _NO_GRADIENT
        buffer = io.BytesIO()
        torch.save((recording.before, recording.of_output), buffer)
        recording.drop()
        gradients = (recording.gradients.get(at, 0) for at in range(len(self.names) - 1))
        return Case(buffer.getvalue(), (recording.output, *gradients)), ""

    def repeat(self, data: bytes) -> tuple[int, ...]:
        """Return the values of a case, computed here. What the forward pass changes is afterwards as before."""
        before, of_output = self.loaded(data)
        found = [0] * (len(self.names) - 1)

        def note(at: int, gradient: torch.Tensor) -> None:
            found[at] = _joined(found[at], gradient)

        output = self.play(self.loaded(before), of_output, gradient=note)
        return (_hash(*output), *found)

    def play(
        self,
        begun: Begun,
        of_output: Mapping[int, torch.Tensor],
        seen: Callable[[Any], None] = lambda _: None,
        gradient: Callable[[int, torch.Tensor], None] = lambda *_: None,
    ) -> list[torch.Tensor]:
        """Compute a micro-batch. Return the tensors of the output.

        Args:
            begun: what the forward pass starts from.
            of_output: gradients of tensors of the output, by their number; empty: there is no backward pass.
            seen: called with the output before the backward pass.
            gradient: called with the number of each parameter, or of each received tensor after those, and its gradient.
        """
        now = self.state()
        self._repeating, self.counts, hooks = True, False, []
        leaves: dict[int, torch.Tensor] = {}

        def watch(at: int, leaf: torch.Tensor) -> None:
            if leaf.requires_grad:  # the program may have frozen it since
                leaves[at] = leaf
                hooks.append(leaf.register_hook(partial(_freed, gradient, at)))  # type: ignore[no-untyped-call]

        try:
            with (
                attributes_kept(self.inner, self._counted),
                self._untrained.kept(),
                self._surroundings.kept(),
                self._with_received(begun.received, watch),
            ):
                self._restore(begun.random, begun.buffers)
                autocast = torch.autocast(self._device.type, dtype=begun.autocast[1], enabled=begun.autocast[0])
                with torch.enable_grad(), autocast, self._leaves_to(watch):
                    whole = self.inner(*begun.args, **begun.kwargs)
                output = list(floats(whole))
                seen(whole)
                if not of_output:
                    return output
                chosen, weights = [output[at] for at in of_output], list(of_output.values())
                for tensor, weight in zip(chosen, weights, strict=True):
                    hooks.append(tensor.register_hook(partial(_given, weight)))  # type: ignore[no-untyped-call]
                self._surroundings.backward(chosen, list(leaves.values()), weights)
                return output
        finally:
            self._repeating = False
            for hook in hooks:  # an output may be a parameter, which would keep it
                hook.remove()
            self._restore(*now)

    def _counted(self) -> None:
        self.counts = True

    @contextlib.contextmanager
    def _with_received(
        self, values: Sequence[torch.Tensor | None], watch: Callable[[int, torch.Tensor], None]
    ) -> Iterator[None]:
        """Let these tensors reach the model beside its arguments."""
        own = self._slot_values()
        try:
            for at, ((holder, name), value) in enumerate(zip(self._slots, values, strict=True)):
                leaf = None if value is None else value.detach().requires_grad_(value.is_floating_point())
                setattr(holder, name, leaf)
                if leaf is not None:
                    watch(len(self._parameters) + at, leaf)
            yield
        finally:
            for (holder, name), tensor in zip(self._slots, own, strict=True):
                setattr(holder, name, tensor)

    def _slot_values(self) -> list[torch.Tensor | None]:
        return [getattr(holder, name, None) for holder, name in self._slots]

    @contextlib.contextmanager
    def _leaves_to(self, watch: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
        """Tell of each parameter that the next forward pass uses, with the tensor that it uses."""
        self._watch_leaves(watch)
        try:
            yield
        finally:
            self._on_leaf = None

    def _watch_leaves(self, watch: Callable[[int, torch.Tensor], None]) -> None:
        self._leaves, self._on_leaf = {}, watch
        for at, parameter in enumerate(self._parameters):
            if not _is_shard(parameter):
                watch(at, parameter)

    def _gathered(self, prefix: str, module: torch.nn.Module, _args: Any) -> None:
        """A module has gathered its parameters. Those of modules in it that are not yet gathered are DTensors."""
        if self._on_leaf is None:
            return
        for name, parameter in module.named_parameters(remove_duplicate=False):
            at = self._numbers.get(self._plain(f"{prefix}.{name}" if prefix else name))
            if at is None or at in self._leaves or _is_shard(parameter) or not _is_shard(self._parameters[at]):
                continue
            self._leaves[at] = parameter
            self._on_leaf(at, parameter)

    def refuses(self, output: Any) -> bool:
        """Return whether the backward pass from this output would raise halfway, which leaves gathered parameters behind."""
        return not self._surroundings.reentrant and is_checkpointed(floats(output))

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

    def begun(self, args: Any, kwargs: Any, buffers: list[torch.Tensor]) -> Begun:
        """Return what a forward pass starts from that begins now."""
        received = [None if each is None else each.detach() for each in self._slot_values()]
        return Begun(args, kwargs, self._generators.states(), buffers, self.autocast(), received)

    def state(self) -> tuple[Any, list[torch.Tensor]]:
        """Return copies of what a forward pass changes: states of random generators, and buffers."""
        return self._generators.states(), [each.detach().clone() for each in self.inner.buffers()]

    @torch.no_grad()
    def _restore(self, random: Any, buffers: Sequence[torch.Tensor]) -> None:
        self._generators.restore(random)
        for own, value in zip(self.inner.buffers(), buffers, strict=True):
            own.copy_(value)

    def _begins(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self._repeating or not module.training or not torch.is_grad_enabled():
            return
        self._untrained.note()
        if self._recording is not None and self._recording.task >= 0:  # its backward pass has ended
            self._close_recording()
        if self._recording is not None and not (self._recording.output or self._recording.unsuited):
            self._close_recording()  # an error has ended its forward pass, and the program goes on
            self._armed = True
        if not self._armed:
            return
        self._armed = False
        buffer = io.BytesIO()
        try:
            torch.save(self.begun(args, kwargs, self.state()[1]), buffer)
        except Exception as err:  # of any object that the program passes to its model
            self._recording = _Recording(b"", unsuited=f"the input of the model cannot be sent to another rank ({err})")
            return
        self._recording = recording = _Recording(buffer.getvalue())

        def watch(at: int, leaf: torch.Tensor) -> None:
            if leaf.requires_grad:
                noted = quiet_gradient(partial(self._gradient, recording, at), recording.fail)
                recording.hooks.append(leaf.register_hook(noted))  # type: ignore[no-untyped-call]

        self._watch_leaves(watch)
        for at, tensor in enumerate(self._slot_values()):
            if tensor is not None:
                watch(len(self._parameters) + at, tensor)

    def _computed(self, _module: torch.nn.Module, _args: Any, output: Any) -> None:
        recording = self._recording
        if self._repeating or recording is None or recording.closed or recording.unsuited:
            return
        if recording.output:
            for tensor in floats(output):  # of another micro-batch, whose backward pass may come before, or be the same
                if tensor.grad_fn is not None:
                    tensor.register_hook(partial(self._of_other, recording))  # type: ignore[no-untyped-call]
            return
        self._on_leaf = None
        found = list(floats(output))
        if self.refuses(output):
            recording.unsuited = _REENTRANT
            return
        try:
            recording.output = _hash(*found)
        except Exception as err:  # of any class of tensor
            recording.unsuited = f"the output of the model has no hash ({err})"
            return
        for at, tensor in enumerate(found):
            if tensor.requires_grad:
                noted = quiet_gradient(partial(self._of_output, recording, at), recording.fail)
                recording.hooks += [tensor.register_hook(noted)] * tensor.is_leaf  # type: ignore[no-untyped-call]

    def _of_output(self, recording: _Recording, at: int, gradient: torch.Tensor) -> None:
        if recording.closed:
            return
        now = _backward_pass()
        if at in recording.of_output or recording.task not in (-1, now) or recording.other_task == now:
            recording.unsuited = _SEVERAL
        recording.task, recording.running = now, True
        recording.of_output[at] = gradient.detach().clone()

    def _of_other(self, recording: _Recording, _gradient: torch.Tensor) -> None:
        """The backward pass of another micro-batch has begun."""
        recording.other_task, recording.running = _backward_pass(), False
        if recording.task == recording.other_task:
            recording.unsuited = _SEVERAL

    def _gradient(self, recording: _Recording, at: int, gradient: torch.Tensor) -> None:
        """A gradient comes to a parameter. In a pipeline it may be of another micro-batch.

        It comes in several parts if several blocks use the parameter, each of which has a backward pass of its own
        (checkpointing).
        """
        if recording.closed or not recording.running:
            return
        try:
            recording.gradients[at] = _joined(recording.gradients.get(at, 0), gradient)
        except Exception as err:  # of any class of tensor: the program that computes it must not notice
            recording.unsuited = f"{self.names[1 + at]} has no hash ({err})"

    def _close_recording(self) -> None:
        if self._recording is not None:
            self._recording.closed, self._on_leaf = True, None
            for hook in self._recording.hooks:
                hook.remove()
            self._recording.hooks.clear()


def _backward_pass() -> int:
    """Return the number of the backward pass that runs now; -1: none."""
    return torch._C._current_graph_task_id()


def _is_shard(parameter: torch.Tensor) -> bool:
    """Return whether it is a DTensor, which is a part of a parameter while no layer uses that."""
    return hasattr(parameter, "device_mesh")


def _freed(note: Callable[[int, torch.Tensor], None], at: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Note a gradient of a repetition, and replace it by one that takes no memory."""
    if gradient is None:  # as for ``quiet_gradient``
        return None
    with torch.no_grad():
        note(at, gradient)
        return gradient.new_zeros(()).expand_as(gradient)


def _given(gradient: torch.Tensor, _computed: torch.Tensor) -> torch.Tensor:
    """Replace the gradient of an output by the recorded one, which has also what comes from other outputs."""
    return gradient


def _joined(before: int, gradient: torch.Tensor) -> int:
    """Return the hash of a gradient, together with that of what came before; 0: nothing did."""
    found = _hash(gradient)
    return combined(torch.tensor([before, found], device="cpu")) if before else found


@torch.no_grad()
def _hash(*tensors: torch.Tensor) -> int:
    return combined(hashes([each.detach() for each in tensors])) or 1
