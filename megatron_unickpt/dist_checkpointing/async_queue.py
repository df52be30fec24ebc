"""Asynchronous saves in a thread of the training process, in Megatron's queue of asynchronous saves.

Megatron schedules, polls and finalizes them like its own. It forks no process for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import async_utils

from megatron_unickpt.dist_checkpointing.saving import Background, MegatronSave
from megatron_unickpt.framework import internals


class ThreadCaller(async_utils.AsyncCaller):  # type: ignore[misc]
    """An ``AsyncCaller`` for a save that already runs."""

    def __init__(self, pending: MegatronSave) -> None:
        self._pending = pending

    def schedule_async_call(self, async_req: Any, *_: Any, **__: Any) -> None:
        """Do nothing: the save already runs."""

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Return whether all ranks are done, or with ``no_dist`` this rank. Wait for them if ``blocking``."""
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
    if not isinstance(async_request.async_fn, Background):
        return wrapped(async_request)
    if async_request.async_fn.in_memory:
        return None  # nothing follows when it ends, and the next save waits for it
    return internals.enqueue(queue, ThreadCaller(async_request.async_fn.pending), async_request)
