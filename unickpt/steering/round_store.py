"""Store that torchrun's agents use in one round, which does not end an agent when the round ends too early.

After a rendezvous each agent writes its number of workers to the store and reads the global ranks of its workers from it
(``SimpleElasticAgent._assign_worker_ranks``). If a member dies in this moment, the others would wait for its entry, or fail
because the store is gone, and torchrun would end on all hosts. With this store they get ranks that no other host knows. The
workers that they start are stopped at once, because the round is over.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

ROLE, RANKS = "torchelastic/role_info/", "torchelastic/assigned_ranks/"  # keys of ``_assign_worker_ranks``
PAUSE_S = 0.02


class RoundStore:
    """A store of a round.

    Args:
        store: the connected store.
        is_over: whether the round has ended.
        own_workers: called with the number of workers of this agent.
    """

    def __init__(
        self, store: Any, is_over: Callable[[], bool], own_workers: Callable[[int], None] = lambda _: None
    ) -> None:  # fmt: skip
        self._store, self._is_over, self._own_workers = store, is_over, own_workers
        self._own: bytes = b"{}"

    def __getattr__(self, name: str) -> Any:
        """All other methods are those of the store."""
        return getattr(self._store, name)

    def set(self, key: str, value: Any) -> None:
        """Set a key. Without the store, an agent's own entry is only kept here."""
        if key.startswith(ROLE):
            self._own = value if isinstance(value, bytes) else str(value).encode()
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self._own_workers(int(json.loads(self._own)["local_world_size"]))
        try:
            self._store.set(key, value)
        except RuntimeError:
            if not key.startswith(ROLE):
                raise

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        """Set several keys. Ranks of a store that is gone are not missed."""
        try:
            self._store.multi_set(keys, values)
        except RuntimeError:
            if not all(key.startswith(RANKS) for key in keys):
                raise

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Get several keys. Entries of members that are gone are like this agent's own."""
        if not all(key.startswith(ROLE) for key in keys) or self._arrives(keys):
            return list(self._store.multi_get(keys))
        return [self._own] * len(keys)

    def get(self, key: str) -> bytes:
        """Get a key. Without ranks from rank 0's host, the workers are numbered as if all hosts had equally many."""
        if not key.startswith(RANKS) or self._arrives([key]):
            return bytes(self._store.get(key))
        own = json.loads(self._own)
        count, rank = int(own.get("local_world_size", 1)), int(key[len(RANKS) :])
        return json.dumps([rank * count, (rank + 1) * count, rank * count, (rank + 1) * count]).encode()

    def _arrives(self, keys: list[str]) -> bool:
        """Wait for keys. False: the round is over, or the store is gone."""
        try:
            while not self._store.check(keys):
                if self._is_over():
                    return False
                time.sleep(PAUSE_S)
        except RuntimeError:
            return False
        return True
