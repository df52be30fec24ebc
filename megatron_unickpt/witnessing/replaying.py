"""A Megatron job that ``unickpt replay-step`` has started: it records the steps after the load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from megatron_unickpt.framework import internals
from megatron_unickpt.framework.versions import FRAMEWORK, version
from megatron_unickpt.runtime import Runtime
from megatron_unickpt.witnessing.held import held_by, named_parameters, unwrapped
from megatron_unickpt.witnessing.step_hooks import HOOKS
from unickpt.base import hooks
from unickpt.base.errors import ConfigError
from unickpt.base.step_replay import ReplayRequest
from unickpt.checkpoint.load.replayed import require_layout
from unickpt.training.witness.agreeing import Ranks
from unickpt.training.witness.held import Stepped
from unickpt.training.witness.replay.layers import LayerTap
from unickpt.training.witness.replay.recorder import Recorder


class OptimizerReplay:
    """Tells a recorder of the steps of an optimizer."""

    def __init__(self, request: ReplayRequest, chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
        self._chunks, self._optimizer = chunks, optimizer
        device = next((each.device for chunk in chunks for each in chunk.parameters()), torch.device("cpu"))
        topology, parallel = internals.topology(), 1
        for key in ("tensor", "pipeline", "context", "expert"):
            parallel *= int(topology.get(key, 1))
        self.recorder = Recorder(request, Ranks.of(None, device), [self._held], self._buffers, model_parallel=parallel)

    def before(self) -> None:
        """A step begins."""
        with torch.no_grad():
            self.recorder.gradients(self._gradients())

    def after(self, result: Any) -> None:
        """A step has ended. One that a loss scaler leaves out counts, as iterations do."""
        del result
        self.recorder.ended()

    def layers(self) -> LayerTap:
        """Return what hashes the layers of all chunks."""
        several = len(self._chunks) > 1
        models = [(chunk, unwrapped(chunk), f"chunk {at}: " if several else "") for at, chunk in enumerate(self._chunks)]
        return LayerTap(models, add=self.recorder.add)

    def _held(self) -> list[Stepped]:
        return held_by(self._chunks, self._optimizer, {False: (), True: ()})

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {
            f"chunk {at}: {name}": each
            for at, chunk in enumerate(self._chunks)
            for name, each in unwrapped(chunk).named_buffers()
            if isinstance(each, torch.Tensor)
        }

    def _gradients(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield the gradients in Megatron's buffers, or without buffers those of the parameters."""
        for name, parameter in named_parameters(self._chunks).items():
            gradient = getattr(parameter, "main_grad", parameter.grad)
            if gradient is not None:
                yield name, gradient


def begin(runtime: Runtime, request: ReplayRequest, model: Any, optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Record the steps of a model that was just loaded. Every rank calls it. Only the first model of a process counts.

    Raises:
        MismatchError: the layout is another one than that which saved the checkpoint.
        ConfigError: there is no optimizer, or this megatron-core has no step that is known.
    """
    if runtime.replays:
        return
    require_layout(request, saved, internals.topology())
    reason = "" if optimizer is not None else "the job loads no optimizer"
    if not reason and not hooks.install(HOOKS, framework=FRAMEWORK, version=version(), lost="no repetition of a step"):
        reason = "this release of megatron-core has no step that is known ('unickpt hooks status')"
    if reason:
        request.refuse(reason)
        raise ConfigError(f"unickpt replay-step: {reason}")
    own = OptimizerReplay(request, list(model) if isinstance(model, (list, tuple)) else [model], optimizer)
    runtime.replays[optimizer] = own
    own.recorder.begin(own.layers)
