"""Ranks of a job as threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from unickpt.checkpoint.coordination.message_exchange import MessageExchange

WORLD = 3


def on_all_ranks(
    action: Callable[[MessageExchange], Any], *, timeout_s: float = 30.0, world: int = WORLD,
    ended: Callable[[], frozenset[int]] = frozenset,
) -> list[Any]:  # fmt: skip
    """Run an action on ``world`` threads that share a store, as ranks do. Returns errors as results."""
    store = dist.HashStore()
    out: list[Any] = [None] * world

    def run(rank: int) -> None:
        exchange = MessageExchange(store, rank=rank, world=world, prefix="t", timeout_s=timeout_s, notice_s=0.2, ended=ended)
        try:
            out[rank] = action(exchange)
        except Exception as err:
            out[rank] = err

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


def alone(*, notice_s: float = 20.0) -> MessageExchange:
    return MessageExchange(None, rank=0, world=1, prefix="t", notice_s=notice_s)
