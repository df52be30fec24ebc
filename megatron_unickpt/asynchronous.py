"""Megatron's queue of asynchronous saves, for saves that run in a thread of the training process.

Megatron schedules, polls and finalizes as always; only what it polls is the thread. Nothing is forked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import async_utils

from megatron_unickpt import internals
from megatron_unickpt.saving import Background, MegatronSave


class ThreadCaller(async_utils.AsyncCaller):  # type: ignore[misc]
    """An ``AsyncCaller`` whose call already runs."""

    def __init__(self, pending: MegatronSave) -> None:
        self._pending = pending

    def schedule_async_call(self, async_req: Any, *_: Any, **__: Any) -> None:
        """Nothing to start."""

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Whether all ranks are done (this one, with ``no_dist``); waits for them if ``blocking``."""
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

    def close(self, abort: bool = False) -> None:  # noqa: ARG002 - a save that was begun is finished
        """Wait for the thread; a save that was begun is finished."""
        self._pending.wait()

    def __del__(self) -> None:
        """The base class demands one."""


def schedule(wrapped: Callable[..., Any], queue: Any, async_request: Any) -> Any:
    """``AsyncCallsQueue.schedule_async_request``: ours get a caller of their own."""
    if not isinstance(async_request.async_fn, Background):
        return wrapped(async_request)
    return internals.enqueue(queue, ThreadCaller(async_request.async_fn.pending), async_request)
