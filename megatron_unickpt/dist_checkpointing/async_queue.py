"""Asynchronous saves in a thread of the training process, in Megatron's queue of asynchronous saves.

Megatron schedules, polls and finalizes them like its own. It forks no process for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import async_utils

from megatron_unickpt.dist_checkpointing.saving import Finalizers, MegatronSave
from megatron_unickpt.framework import internals
from unickpt.base.logs import logger
from unickpt.base.switch import switch


@dataclass
class Polling:
    """Whether somebody has ever polled a queue. Once that is so on one rank, it is so on all: a poll is a call of all ranks."""

    seen: bool = False


class ThreadCaller(async_utils.AsyncCaller):  # type: ignore[misc]
    """An ``AsyncCaller`` for a save that already runs. It notes the polls of its queue."""

    def __init__(self, pending: MegatronSave, polling: Polling) -> None:
        self._pending, self._polling = pending, polling

    def schedule_async_call(self, async_req: Any, *_: Any, **__: Any) -> None:
        """Do nothing: the save already runs."""

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Return whether all ranks are done, or with ``no_dist`` this rank. Wait for them if ``blocking``."""
        self._polling.seen = True
        if blocking:
            self._pending.wait()
        alive = int(not self._pending.done)
        if no_dist:
            return not alive
        flag = torch.tensor(
            [alive], dtype=torch.int, device=torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        )
        torch.distributed.all_reduce(flag)
        return int(flag.item()) == 0

    def close(self, abort: bool = False) -> None:  # noqa: ARG002 - the signature is Megatron's
        """Wait for the thread. The save is not aborted."""
        self._pending.wait()

    def __del__(self) -> None:
        """Required by the base class."""


def schedule(wrapped: Callable[..., Any], queue: Any, async_request: Any) -> Any:
    """Wrap ``AsyncCallsQueue.schedule_async_request``: a save in a thread gets a ``ThreadCaller``."""
    finalizers = async_request.finalize_fns
    if not isinstance(finalizers, Finalizers):
        return wrapped(async_request)
    if finalizers.in_memory:
        return None  # nothing follows when it ends, and the next save waits for it
    polling = vars(queue).setdefault("unickpt_polling", Polling())
    if switch().saves and not polling.seen:
        _finalize_done(queue, polling)
    return internals.enqueue(queue, ThreadCaller(finalizers.pending, polling), async_request)


def _finalize_done(queue: Any, polling: Polling) -> None:
    """Call the finalize functions of earlier saves that are done on all ranks, in a queue that nobody polls.

    verl's trainer calls a method for that which no worker has: its tracker file would never name these checkpoints.
    """
    if all(isinstance(call.async_caller, ThreadCaller) for call in queue.async_calls):
        done = queue.maybe_finalize_async_calls(blocking=False)
        polling.seen = False
        if done and torch.distributed.get_rank() == 0:
            logger.info("unickpt: %d asynchronous saves that nobody has polled are finalized at the next one", len(done))
