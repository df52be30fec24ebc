"""``"compression": "auto"``: the job chooses a scheme from its own records, once, for all ranks alike."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ds_unickpt.compressing import compression
from ds_unickpt.held_state.names import ModuleNames
from ds_unickpt.runtime import EngineRuntime
from unickpt.base.errors import CoordinationError
from unickpt.base.logs import logger
from unickpt.base.options.job import AUTO, Options
from unickpt.checkpoint.coordination.message_exchange import Message, MessageExchange
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.diagnosis import session
from unickpt.planning.replay.sources import read_trace
from unickpt.training.compression.automatic import Choice, chosen, timed_candidates
from unickpt.training.compression.settings import NONE, Compression

WARM_UP = 20  # recorded steps before the choice
STORED = "gradient_compression"  # the choice among the shared objects of a checkpoint


class Automatic:
    """The choice of one engine.

    Attributes:
        choice: None until it is made.
        compressed: compression of the gradients; None without, or before.
    """

    def __init__(self, runtime: EngineRuntime, settings: Compression, exchange: MessageExchange) -> None:
        """``settings``: all but the scheme."""
        self._runtime, self._settings, self._exchange = runtime, settings, exchange
        self.choice: Choice | None = None
        self.compressed: compression.CompressedEngine | None = None
        self._steps = 0
        self._asks = True

    def stepped(self, engine: Any) -> None:
        """Count a step, and choose after the warm-up. Every rank calls this after every step. Never raises."""
        if not self._asks:
            return
        self._steps += 1
        if self._steps < WARM_UP:
            return
        self._asks = False
        choice, made = None, None
        try:
            choice, made = self._agreed(engine)
        except Exception as err:
            logger.warning("unickpt: compression: none: the ranks could not agree (%s: %s)", type(err).__name__, err)
        try:
            everywhere = self._everywhere(engine, choice is not None)
        except Exception as err:  # the next collective of the job fails as well
            logger.warning("unickpt: compression: none: %s: %s", type(err).__name__, err)
            return
        if choice is None:
            return
        if not everywhere:
            logger.warning("unickpt: compression: none: another rank has no choice")
            return
        self._take(engine, choice, made)
        if self._exchange.rank == 0:
            logger.info("unickpt: %s", choice)

    def _agreed(self, engine: Any) -> tuple[Choice | None, compression.CompressedEngine | None]:
        """Return the choice of rank 0, and the compression that it needs. No choice: rank 0 found none.

        Raises:
            CoordinationError: a rank cannot do it, or the store failed. Other ranks may have a choice.
        """
        exchange = self._exchange
        exchange.begin("compression")
        # all ranks have ended the step
        answer = exchange.combined("steps", {"step": int(engine.global_steps)}, lambda _: self._asked(engine))
        if answer["failure"]:
            if exchange.rank == 0:
                logger.warning("unickpt: compression: none: %s", answer["failure"])
            return None, None
        failure, made, choice = None, None, None
        try:
            choice = Choice.from_json(answer["choice"])
            made = compression.enabled(engine, choice.settings)
            failure = None if made is not None or choice.settings.scheme == NONE else "this job cannot compress"
        except Exception as err:
            failure = f"{type(err).__name__}: {err}"
        failed = exchange.agree("ready", failure)
        if failed:
            raise CoordinationError("; ".join(f"rank {rank}: {reason}" for rank, reason in failed.items()))
        return choice, made

    @staticmethod
    def _everywhere(engine: Any, ready: bool) -> bool:
        """Whether all ranks are ready. Every rank calls this, also one whose store failed.

        It is a collective of the job's own backend, because the store can fail on one rank alone. Then some ranks would
        compress and others not, and the job would hang.
        """
        flag = torch.tensor([float(ready)], device=engine.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag.item())

    def _asked(self, engine: Any) -> Message:
        """Return the choice of rank 0, or why there is none."""
        try:
            names = ModuleNames.read(engine.module)
            trained = [p for p in names.parameters.values() if p.requires_grad and p.numel()]
            shapes = [tuple(p.shape) for p in trained]
            candidates = timed_candidates(self._settings, shapes, self._exchange.world, trained[0].device)
            trace = read_trace([str(session.folder())])
            choice = chosen(trace, candidates, self._settings, step=int(engine.global_steps), world=self._exchange.world)
            return {"choice": choice.as_json(), "failure": ""}
        except Exception as err:
            return {"choice": None, "failure": f"no answer from the records of this job ({type(err).__name__}: {err})"}

    def _take(self, engine: Any, choice: Choice | None, made: compression.CompressedEngine | None) -> None:
        self.choice, self.compressed, self._asks = choice, made, False
        if made is None:
            compression.stop(self._runtime, engine)
        else:
            compression.start(self._runtime, engine, made)

    # ---------------------------------------------------------------- checkpoints

    def shared_objects(self, rank: int) -> dict[str, Any]:
        """Return the choice as a shared object, which rank 0 stores."""
        return {} if self.choice is None or rank else {STORED: self.choice.as_json()}

    def restore(self, engine: Any, checkpoint: Checkpoint) -> None:
        """Go on with the choice of a checkpoint. Without one, this job asks its own records. Every rank calls this.

        Raises:
            FormatError: the choice in the checkpoint is damaged.
        """
        if STORED not in checkpoint.shared_names():
            return
        choice = Choice.from_json(checkpoint.shared_object(STORED).value)
        made = compression.enabled(engine, choice.settings)
        self._take(engine, choice, made)
        if self._exchange.rank == 0:
            logger.info("unickpt: %s (chosen after step %d, from the checkpoint)", choice, choice.step)


def begin(runtime: EngineRuntime, engine: Any, options: Options) -> Automatic | None:
    """Prepare the choice of an engine, if the options ask for one.

    None without, or if this job cannot compress, or has no records to choose from. Then a warning of rank 0 has the reason.
    """
    if options.compression.scheme != AUTO:
        return None
    reason = compression.refusal(engine)
    said = f"this job uses {reason}" if reason else "" if options.timing.enabled else 'it needs "timing": {"enabled": true}'
    if not said:
        exchange = runtime.engine_exchange(engine, timeout_s=options.timeout_seconds)
        exchange.begin("timed")
        untimed = exchange.agree("timed", None if session.folder() else "not timed")
        if not untimed:
            found = Automatic(runtime, compression.settings_of(options.compression), exchange)
            runtime.choosing[engine] = found
            return found
        said = f"collectives are not timed on rank {', '.join(map(str, untimed))}"
    if engine.global_rank == 0:
        logger.warning("unickpt: compression: none: auto cannot choose: %s", said)
    return None
