"""An engine of a job that ``unickpt replay-step`` has started: it records the steps after the load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ds_unickpt.framework import internals, partitions
from ds_unickpt.framework.versions import version
from ds_unickpt.held_state.engine_view import EngineView
from ds_unickpt.held_state.names import KnownNames
from ds_unickpt.runtime import EngineRuntime
from ds_unickpt.witnessing.held import held_by
from ds_unickpt.witnessing.step_hooks import HOOKS
from unickpt.base import hooks
from unickpt.base.errors import ConfigError
from unickpt.base.step_replay import ReplayRequest
from unickpt.checkpoint.load.replayed import require_layout
from unickpt.training.witness.agreeing import Ranks
from unickpt.training.witness.held import Stepped
from unickpt.training.witness.replay.layers import LayerTap
from unickpt.training.witness.replay.recorder import Recorder, named_gradients


class EngineReplay:
    """Tells a recorder of the steps of an engine."""

    def __init__(self, request: ReplayRequest, engine: Any) -> None:
        self._names, self._ranges, self._engine = KnownNames(), partitions.KnownRanges(), engine
        self._parts: list[tuple[torch.Tensor, str, int, int]] = []
        groups = internals.copy_groups(engine, engine.module.parameters())
        self._copies: dict[str, tuple[int, ...]] = dict.fromkeys(groups, ())
        topology = self._view().topology
        parallel = 1
        for key in ("tensor", "pipeline", "sequence", "expert"):
            parallel *= int(topology.get(key, 1))
        self.recorder = Recorder(
            request, Ranks.of(None, engine.device), [self._held], lambda: dict(engine.module.named_buffers()),
            model_parallel=parallel,
        )  # fmt: skip
        for optimizer in self._optimizers():
            self.recorder.hooks.append(optimizer.register_step_pre_hook(self._stepping))

    def before(self, engine: Any) -> None:
        """A step of the engine begins."""
        del engine
        view = self._view()
        self._parts = [
            (part.master, view.names.name(piece.parameter), piece.at, piece.at + piece.hi - piece.lo)
            for part in view.parts
            for piece in part.pieces
            if piece.hi > piece.lo
        ]

    def after(self, engine: Any) -> None:
        """A step of the engine has ended."""
        del engine
        self.recorder.ended()

    def _view(self) -> EngineView:
        return EngineView(self._engine, self._names, self._ranges)

    def _held(self) -> list[Stepped]:
        return held_by(self._view(), self._copies)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        view = self._view()
        every = [view.base, *(part.stepped_by for part in view.parts)]
        found = [each for each in every if isinstance(each, torch.optim.Optimizer)]
        return [each for at, each in enumerate(found) if all(each is not before for before in found[:at])]

    def _stepping(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._parts:  # within a step of the engine
            with torch.no_grad():
                self.recorder.gradients(named_gradients(optimizer, self._parts))


def begin(runtime: EngineRuntime, request: ReplayRequest, engine: Any, saved: Mapping[str, Any]) -> None:
    """Record the steps of an engine that was just loaded. Every rank calls it. Only the first engine of a process counts.

    Raises:
        MismatchError: the layout is another one than that which saved the checkpoint.
        ConfigError: this DeepSpeed has no step that is known.
    """
    if runtime.replays:
        return
    require_layout(request, saved, EngineView(engine).topology)
    own = EngineReplay(request, engine)
    if not hooks.install(HOOKS, framework="DeepSpeed", version=version(), lost="no repetition of a step"):
        reason = "this release of DeepSpeed has no step that is known ('unickpt hooks status')"
        request.refuse(reason)
        raise ConfigError(f"unickpt replay-step: {reason}")
    runtime.replays[engine] = own
    module = engine.module
    own.recorder.begin(lambda: LayerTap([(module, module, "")], add=own.recorder.add, plain=internals.plain))
