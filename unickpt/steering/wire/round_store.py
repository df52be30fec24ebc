"""Store that torchrun's agents use in one round, which does not end an agent when the round ends too early.

After a rendezvous each agent writes its number of workers to the store and reads the global ranks of its workers from it
(``SimpleElasticAgent._assign_worker_ranks``). If a member dies in this moment, the others would wait for its entry, or fail
because the store is gone, and torchrun would end on all hosts. With this store they get ranks that no other host knows. The
workers that they start are stopped at once, because the round is over.

A client of a ``TCPStore`` waits without any limit for most answers, and so does its constructor (``TCPStore.cpp``:
``receiveValue``; seen in torch 2.13). If the machine of the store loses its power or its network, no answer and no error comes.
So each question is asked in a thread, which is left behind when the round is over.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from unickpt.base.logs import logger

ROLE, RANKS = "torchelastic/role_info/", "torchelastic/assigned_ranks/"  # keys of ``_assign_worker_ranks``
PAUSE_S = 0.02
GRACE_S = 1.0  # for the answer of a store whose round is over
T = TypeVar("T")


class StoreLostError(RuntimeError):
    """A store does not answer any more."""


class _Call(Generic[T]):
    """A call in a thread."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function, self._found, self._error = function, list[T](), list[BaseException]()
        self.ended = threading.Event()
        threading.Thread(target=self._run, name="unickpt-store", daemon=True).start()

    def _run(self) -> None:
        try:
            self._found.append(self._function())
        except BaseException as err:  # ``within`` raises it in the caller's thread
            self._error.append(err)
        self.ended.set()

    def within(self, is_over: Callable[[], bool], limit_s: float) -> T:
        """See ``answer``."""
        end_s = time.monotonic() + limit_s
        while not self.ended.wait(0.1):
            if (is_over() and not self.ended.wait(GRACE_S)) or time.monotonic() > end_s:
                raise StoreLostError("the store of the round does not answer")
        if self._error:
            raise self._error[0]
        return self._found[0]


def answer(function: Callable[[], T], is_over: Callable[[], bool], limit_s: float) -> T:
    """Return the result of a call that may never return.

    Args:
        function: the call. It is left behind in its thread if it does not return in time.
        is_over: returns True when the result is no longer needed.
        limit_s: longest time.

    Raises:
        StoreLostError: the call did not return within ``limit_s``, or before the result was no longer needed.
    """
    return _Call(function).within(is_over, limit_s)


class RoundStore:
    """A store of a round.

    Args:
        store: the connected store.
        is_over: whether the round has ended.
        own_workers: called with the number of workers of this agent.
        limit_s: longest time for an answer, also while the round goes on.
    """

    def __init__(
        self,
        store: Any,
        is_over: Callable[[], bool],
        own_workers: Callable[[int], None] = lambda _: None,
        limit_s: float = float("inf"),
    ) -> None:
        self._store, self._is_over, self._own_workers, self._limit_s = store, is_over, own_workers, limit_s
        self._own: bytes = b"{}"
        self._lost = False

    def __getattr__(self, name: str) -> Any:
        """All other methods are those of the store. They may go on after the round, such as the barrier of agents that end."""
        found = getattr(self._store, name)
        if not callable(found):
            return found
        return lambda *args, **named: self._ask(lambda: found(*args, **named), lambda: False)

    def set(self, key: str, value: Any) -> None:
        """Set a key. Without the store, an agent's own entry is only kept here."""
        if key.startswith(ROLE):
            self._own = value if isinstance(value, bytes) else str(value).encode()
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self._own_workers(int(json.loads(self._own)["local_world_size"]))
        try:
            self._ask(lambda: self._store.set(key, value), self._is_over if key.startswith(ROLE) else lambda: False)
        except RuntimeError:
            if not key.startswith(ROLE):
                raise

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        """Set several keys. Ranks of a store that is gone are not missed."""
        try:
            self._ask(lambda: self._store.multi_set(keys, values), self._is_over)
        except RuntimeError:
            if not all(key.startswith(RANKS) for key in keys):
                raise

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Get several keys. Entries of members that are gone are like this agent's own."""
        if not all(key.startswith(ROLE) for key in keys):
            return list(self._ask(lambda: self._store.multi_get(keys), self._is_over))
        found = self._arrived(keys)
        return [self._own] * len(keys) if found is None else found

    def get(self, key: str) -> bytes:
        """Get a key. Without ranks from rank 0's host, the workers are numbered as if all hosts had equally many."""
        if not key.startswith(RANKS):
            return bytes(self._ask(lambda: self._store.get(key), self._is_over))
        found = self._arrived([key])
        if found is not None:
            return found[0]
        own = json.loads(self._own)
        count, rank = int(own.get("local_world_size", 1)), int(key[len(RANKS) :])
        return json.dumps([rank * count, (rank + 1) * count, rank * count, (rank + 1) * count]).encode()

    def _arrived(self, keys: list[str]) -> list[bytes] | None:
        """Wait for keys, and return their values. None: the round is over, or the store is gone."""
        try:
            while not self._ask(lambda: self._store.check(keys), self._is_over):
                if self._is_over():
                    return None
                time.sleep(PAUSE_S)
            return [bytes(value) for value in self._ask(lambda: self._store.multi_get(keys), self._is_over)]
        except RuntimeError:
            return None

    def _ask(self, function: Callable[[], T], is_over: Callable[[], bool]) -> T:
        """Ask the store. After a question without an answer, its client is locked for all others.

        Raises:
            StoreLostError: it does not answer.
        """
        if self._lost:
            raise StoreLostError("the store of the round does not answer")
        call = _Call(function)
        try:
            return call.within(is_over, self._limit_s)
        except StoreLostError:
            logger.warning(
                "unickpt: steering: the store of the round at %s:%s does not answer. The machine of rank 0's host may have "
                "lost its power or its network. This host waits for the next round",
                getattr(self._store, "host", "?"),
                getattr(self._store, "port", "?"),
            )
            raise
        finally:
            self._lost = not call.ended.is_set()
