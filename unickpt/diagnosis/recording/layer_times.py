"""Times of a model's layers in sampled steps, in a small file of each rank beside its ring.

Hooks are on the layers only during a sampled step, so other steps cost nothing. The first samples are of consecutive steps.

A forward hook of torch begins and ends the forward time. The backward time begins when the gradient of a layer's output is
known, and ends when that of its input is known (hooks on these tensors, which leave the graph as it is). A forward computation
inside a backward pass repeats the one before it (activation checkpointing), so its time is part of the backward time. On a
device each of these moments waits for the device.

The file is JSON: ``{"schema", "rank", "world", "host", "device", "steps", "total", "layers": [...]}``. A layer has ``number``
and ``name`` in the whole model, ``role``, ``kind`` (name of its class), ``dtype`` (that it computes in:
of autocast, or else of its largest parameter), ``forward_s`` and ``backward_s`` (medians of its
calls), ``recent_s`` (forward and backward, medians of the calls in the ``RECENT`` newest sampled steps), ``calls``,
``parameters``, ``shape`` and ``input_bytes`` of its first input, and ``activation_bytes`` (saved for one backward computation).
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from unickpt.base.logs import logger
from unickpt.base.module_hooks import ModuleHook
from unickpt.base.private_files import replacing

SCHEMA = 1
WARM_UP = 2  # first steps of a process, which are not sampled
RECENT = 3  # sampled steps that show the time of today; so many steps are sampled at the beginning
MOST_CALLS = 512  # newest calls of each layer that count


@dataclass(frozen=True, slots=True)
class TimedLayer:
    """A layer that this rank has.

    Attributes:
        number: place in the whole model; an embedding comes before all layers and a loss after them.
        name: name in the whole model.
        role: ``embedding``, ``layer`` or ``loss``.
        module: the module.
        total: number of layers of the whole model, with embedding and loss; a number without a layer takes no time.
        parameters: number of parameters that it computes with; None if its own are whole.
    """

    number: int
    name: str
    role: str
    module: torch.nn.Module
    total: int
    parameters: int | None = None

    def count(self) -> int:
        """Return the number of parameters that it computes with."""
        own = sum(each.numel() for each in self.module.parameters())
        return own if self.parameters is None else self.parameters


@dataclass(slots=True)
class _Times:
    """Nanoseconds of the calls of one layer."""

    calls: int = 0
    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    shape: tuple[int, ...] = ()
    input_bytes: int = 0
    dtype: str = ""
    activation_bytes: int = 0
    saved: _SavedBytes | None = None  # during the first call
    began: int = 0
    repeated: int = 0  # forward time inside the backward pass


class LayerTimes:
    """Measures the layers of this process.

    Args:
        path: file to write.
        every: one step out of this number is sampled, after the first ``RECENT`` samples.
        about: further values of the file.
    """

    def __init__(self, path: Path, every: int, about: Mapping[str, Any]) -> None:
        self._path, self._every, self._about = path, every, dict(about)
        self._layers: dict[int, TimedLayer] = {}
        self._times: dict[int, _Times] = {}
        self._owners: set[int] = set()
        self._handles: list[Any] = []
        self._seen = self._sampled = self._total = 0
        self._devices: set[torch.device] = set()

    def add(self, owner: Any, find: Callable[[], Sequence[TimedLayer]]) -> None:
        """Add the layers that ``find`` returns of a model, once for each model."""
        if id(owner) in self._owners:
            return
        self._owners.add(id(owner))
        for layer in find():
            self._layers[layer.number] = layer
            self._total = max(self._total, layer.total)
            self._times[layer.number] = _Times()
            self._devices |= devices_of(layer.module)

    def stepped(self) -> None:
        """A step has ended: write what was sampled, and begin the next sample if it is time."""
        self._seen += 1
        if self._handles:
            self.stop()
            self._sampled += 1
            self._write()
        later = self._seen - WARM_UP
        if later >= 0 and (later < RECENT or later % self._every == 0):
            for number, layer in self._layers.items():
                self._watch(layer.module, self._times[number])

    def stop(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _now(self) -> int:
        for device in self._devices:
            torch.accelerator.synchronize(device)
        return time.monotonic_ns()

    def _watch(self, module: torch.nn.Module, times: _Times) -> None:
        def begins(_module: Any, args: Any, kwargs: Any) -> None:
            tensors = _tensors((args, kwargs))
            times.shape, times.input_bytes = (tuple(tensors[0].shape), tensors[0].nbytes) if tensors else ((), 0)
            if module.training and torch._C._current_graph_task_id() < 0:  # a repetition may be without autocast
                times.dtype = dtype_of(module, tensors)
            times.began = self._now()
            if not times.activation_bytes and not torch.is_grad_enabled():
                times.activation_bytes = sum(each.nbytes for each in tensors)  # its input is kept, and it computes again
            elif not times.activation_bytes:
                times.saved = _SavedBytes(module)
                times.saved.__enter__()

        def ends(_module: Any, args: Any, kwargs: Any, output: Any) -> None:
            if times.saved is not None:
                times.saved.__exit__(None, None, None)
                times.activation_bytes, times.saved = times.saved.total, None
            if output is None:  # the computation has raised an error
                return
            took = self._now() - times.began
            if torch._C._current_graph_task_id() >= 0:
                times.repeated += took
            else:
                times.calls += 1
                times.forward.append(took)
            self._watch_backward(module, times, _tensors((args, kwargs)), _tensors(output))

        self._handles.append(module.register_forward_pre_hook(ModuleHook(begins), with_kwargs=True))
        self._handles.append(module.register_forward_hook(ModuleHook(ends), with_kwargs=True, always_call=True))

    def _watch_backward(
        self, module: torch.nn.Module, times: _Times, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        """Time one backward computation: from the gradient of the first output to the last gradient of the inputs."""
        last = next((each for each in outputs if each.requires_grad), None)
        if last is None:
            return
        sources = [each for each in inputs if each.requires_grad][:1]
        sources = sources or [each for each in module.parameters() if each.requires_grad]
        state = {"began": 0, "left": len(sources)}
        handles: list[Any] = []

        def begins(_grad: torch.Tensor) -> None:
            state["began"] = self._now()

        def ends(_grad: torch.Tensor) -> None:
            state["left"] -= 1
            if state["left"] or not state["began"]:
                return
            times.backward.append(self._now() - state["began"] + times.repeated)
            times.repeated = 0
            for handle in handles:
                handle.remove()

        hooked: list[tuple[Any, Callable[[torch.Tensor], None]]] = [(last, begins), *((each, ends) for each in sources)]
        handles += [tensor.register_hook(hook) for tensor, hook in hooked]
        self._handles += handles[1:]  # a parameter keeps its hook otherwise

    def _write(self) -> None:
        document = {
            "schema": SCHEMA,
            **self._about,
            "device": device_name(self._devices),
            "steps": self._sampled,
            "total": self._total,
            "layers": self.layers(),
        }
        try:
            with replacing(self._path) as file:
                file.write(json.dumps(document).encode())
        except OSError as err:
            logger.warning("unickpt: times of layers are not written, training is not affected (%s)", err)
            self._every = 1 << 62

    def _recent(self, calls: int) -> int:
        """Return how many of the calls were made in the newest sampled steps."""
        return -(-calls * RECENT // max(self._sampled, RECENT))

    def layers(self) -> list[dict[str, Any]]:
        """Return the rows of the file: layers with a forward time, by number."""
        return [
            {
                "number": number, "name": layer.name, "role": layer.role, "kind": type(layer.module).__name__,
                "dtype": times.dtype,
                "forward_s": _seconds(times.forward), "backward_s": _seconds(times.backward),
                "recent_s": sum(_seconds(each[-self._recent(len(each)) :]) for each in (times.forward, times.backward)),
                "calls": times.calls,
                "parameters": layer.count(), "shape": list(times.shape),
                "input_bytes": times.input_bytes,
                "activation_bytes": times.activation_bytes,
            }
            for number, layer in sorted(self._layers.items()) if (times := self._times[number]).forward
        ]  # fmt: skip


class _SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that a computation saves for its backward pass, without parameters. Each storage counts once."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.total = 0
        seen = {each.untyped_storage().data_ptr() for each in module.parameters()}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                self.total += storage.nbytes()
            return tensor.detach()

        super().__init__(pack, lambda tensor: tensor)


def devices_of(module: torch.nn.Module) -> set[torch.device]:
    """Return the devices with parameters of a module; none for a processor."""
    return {each.device for each in module.parameters() if each.device.type != "cpu"}


def dtype_of(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> str:
    """Return the name of the data type that a module computes in: of autocast, its largest parameter, or its ``inputs``."""
    parameters = [each for each in module.parameters() if each.is_floating_point()]
    found: torch.Tensor | None = max(parameters, key=torch.Tensor.numel, default=None)
    found = next((each for each in inputs if each.is_floating_point()), None) if found is None else found
    if found is None:
        return ""
    device = found.device.type
    return str(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else found.dtype).removeprefix("torch.")


def device_name(devices: set[torch.device]) -> str:
    """Return the name of the kind of device that layers are on, from ``devices_of``."""
    for device in devices:
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"cpu {platform.processor() or platform.machine()}"


def _seconds(times: list[int]) -> float:
    return median(times[-MOST_CALLS:]) * 1e-9 if times else 0.0


def _tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists and dictionaries."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, tuple | list):
        return []
    return [tensor for each in values for tensor in _tensors(each)]
