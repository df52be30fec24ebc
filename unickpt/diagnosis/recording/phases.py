"""Record steps, phases, garbage collections and waits for data, with hooks on Python and torch."""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import safetensors.numpy
import safetensors.torch
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from unickpt.base.module_hooks import ModuleHook
from unickpt.diagnosis.recording.recorder import CallRecorder
from unickpt.diagnosis.recording.records import Op, Phase

SHORTEST_NS = 500_000  # shortest pause or wait that is recorded

# With these, programs write files. ``save_file``, ``save_model`` and ``save_pretrained`` call safetensors' by these names.
_WRITERS: tuple[tuple[Any, str], ...] = (
    (torch, "save"), (torch.serialization, "save"),
    (safetensors.torch, "serialize_file"), (safetensors.numpy, "serialize_file"),
)  # fmt: skip

_ASIDE = (Phase.CHECKPOINT, Phase.EVALUATION)
_TRAINING = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
_now = time.monotonic_ns


def outside(before: int, phase: Phase) -> int:
    """Return the phase after one that began in ``before``. Training ends an evaluation, and writes of the program itself."""
    return int(Phase.UNKNOWN) if before in _ASIDE and phase in _TRAINING else before


# ---------------------------------------------------------------- evaluation
# ``engine.module(...)`` and ``generate`` do not pass through the engine, and between two batches a rank computes metrics. So
# the phase stays until the rank trains again.


def watch_evaluation(
    model: torch.nn.Module, evaluates: Callable[[], None], trains: Callable[[], None] = lambda: None
) -> list[Any]:
    """Call a function before each forward computation of a model that is not part of training. Return the handles of the hooks.

    Args:
        model: the model. The modules that it only wraps are hooked too: ``generate`` of an adapter calls the model inside.
        evaluates: the function.
        trains: called before all others.
    """

    def begins(module: torch.nn.Module, _inputs: Any) -> None:
        if torch.compiler.is_compiling():  # the call would break the graph
            return
        if not module.training or not (torch.is_grad_enabled() or torch._C._current_graph_task_id() >= 0):
            evaluates()
        else:
            trains()

    return [module.register_forward_pre_hook(ModuleHook(begins)) for module in _wrappers(model)]


def _wrappers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a model and the modules inside it that hold most of its parameters."""
    inside: torch.nn.Module | None = model
    total = sum(1 for _ in model.parameters())
    while inside is not None:
        yield inside
        inside = next((child for child in inside.children() if 2 * sum(1 for _ in child.parameters()) > total), None)


# ---------------------------------------------------------------- all others


class PhaseHooks:
    """Hooks that write to one recorder. At most one instance per process is installed."""

    def __init__(self, recorder: CallRecorder) -> None:
        self._recorder = recorder
        self._collecting_since = 0
        self._step_since = 0
        self._noticed = False  # whether the current phase is one that ``_begins`` has entered
        self._aside = 0  # phase of the current step in which other ranks may wait long
        self._before: list[int] = []  # phases around the current optimizer steps, innermost last
        self._handles: list[Any] = []
        self._next: Callable[..., Any] | None = None
        self._writers: list[tuple[Any, str, Any]] = []  # functions that write files: module, name, as they were

    def install(self) -> None:
        """Begin to record."""
        gc.callbacks.append(self._collects)
        self._handles = [
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ends),
        ]
        loader: Any = dataloader._BaseDataLoaderIter
        self._next = original = loader.__next__
        recorder = self._recorder

        def waits(iterator: Any) -> Any:
            begin = _now()
            before = self.phase(Phase.DATA)
            try:
                return original(iterator)
            finally:
                self.phase(Phase(before))
                end = _now()
                if end - begin >= SHORTEST_NS:
                    recorder.moment(Op.DATA, begin, end)

        loader.__next__ = waits
        self._see_writes()

    def _see_writes(self) -> None:
        """Notice that the program writes files of its own: between two files it does not train either."""

        def noticed(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def write(*args: Any, **kwargs: Any) -> Any:
                if threading.current_thread() is threading.main_thread():
                    self._begins(Phase.CHECKPOINT)
                return original(*args, **kwargs)

            return write

        self._writers = [(module, name, getattr(module, name)) for module, name in _WRITERS if hasattr(module, name)]
        wrapped = {original: noticed(original) for _, _, original in self._writers}  # one for all names of a function
        for module, name, original in self._writers:
            setattr(module, name, wrapped[original])

    def uninstall(self) -> None:
        """Remove all hooks."""
        if self._collects in gc.callbacks:
            gc.callbacks.remove(self._collects)
        for handle in self._handles:
            handle.remove()
        if self._next is not None:
            loader: Any = dataloader._BaseDataLoaderIter
            loader.__next__ = self._next
            self._next = None
        for module, name, original in self._writers:
            setattr(module, name, original)
        self._writers = []

    def step(self, number: int) -> None:
        """Record the end of training step ``number``."""
        now = _now()
        if self._step_since:
            self._recorder.moment(Op.STEP, self._step_since, now, self._aside or None)
        self._step_since = now
        self._aside = self._recorder.state.phase if self._recorder.state.phase in _ASIDE else 0
        self._recorder.state.step = number
        self._recorder.publish()

    def phase(self, phase: Phase) -> int:
        """Enter a phase and return the one before."""
        self._noticed = False
        before, self._recorder.state.phase = self._recorder.state.phase, int(phase)
        if phase in _ASIDE:
            self._aside = int(phase)
        self._recorder.publish()
        return before

    def evaluates(self) -> None:
        """Enter the phase of evaluation, unless the rank is in another one. It lasts until training goes on."""
        self._begins(Phase.EVALUATION)

    def _begins(self, phase: Phase) -> None:
        if self._recorder.state.phase == Phase.UNKNOWN:
            self.phase(phase)
            self._noticed = True

    def trains(self) -> None:
        """Leave the phase of an evaluation or of files, unless the program has announced it."""
        if self._noticed:
            self.phase(Phase.UNKNOWN)

    def _collects(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting_since = _now()
        elif self._collecting_since:
            begin, self._collecting_since = self._collecting_since, 0
            end = _now()
            if end - begin >= SHORTEST_NS:
                self._recorder.moment(Op.GARBAGE, begin, end)

    def _optimizer_begins(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._before.append(outside(self.phase(Phase.OPTIMIZER), Phase.OPTIMIZER))

    def _optimizer_ends(self, _optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._before:
            self._recorder.state.phase = self._before.pop()
