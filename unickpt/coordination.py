"""How the ranks of one save or load agree, without a collective.

Ranks exchange short messages through the job's key-value store (the one that set up the process
groups). It works from any thread, never mixes with training's collectives, and a rank that does
not come can be *named*: 'rank 3 has not entered save #7', within seconds.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from unickpt.errors import CoordinationError

logger = logging.getLogger("unickpt")

Message = dict[str, Any]  # JSON-able

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05
_HEAR_EVERY_S = 0.25  # how often a rank that waits looks whether the coordinator has given up
_COORDINATOR_LATER_S = 30.0  # the coordinator waits for the rank that is gone as long as the others wait for the coordinator


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...


class Rendezvous:
    """Message exchange among the ranks of a job, with time limits and names.

    Every rank makes the same sequence of calls. Rank 0 is the coordinator.

    Attributes:
        rank, world: this process among all.
        timeout_s: how long to wait for others before giving up.
        notice_s: after this long, one warning names the ranks that are awaited.
    """

    def __init__(
        self, store: Store | None, *, rank: int, world: int, prefix: str, timeout_s: float = 1800.0, notice_s: float = 20.0
    ) -> None:
        if store is None and world != 1:
            raise CoordinationError(f"{world} ranks need a store to coordinate through")
        self.rank, self.world, self.timeout_s, self.notice_s = rank, world, timeout_s, notice_s
        self._store, self._prefix, self._round = store, prefix, 0
        self._session = "0"
        self._begun: dict[str, int] = {}
        self._uncount: Callable[[], None] | None = None
        self._following: Callable[[], Rendezvous] | None = None
        self._spent: list[str] = []
        self._longest_pause_s = min(_LONGEST_PAUSE_S, 0.001 * world)  # the coordinator's store answers all of them

    def begin(self, name: str) -> None:
        """Open a session: ranks meet in it only with ranks that began the same one as often.

        So a session that some ranks missed (one called save, the others did not) cannot mix with
        the next.
        """
        self._begun[name] = self._begun.get(name, 0) + 1
        self._session, self._round = f"{name}/{self._begun[name]}", 0

    def apart(self, name: str) -> Rendezvous:
        """A rendezvous of its own for work that may overlap with other work, such as a save in a thread.

        Ranks that called this for the same name as often meet in it. A call in which the coordinator did not appear does
        not count. The name must be the same on all ranks, so it holds no argument of a user's call.
        """
        self._begun[name] = self._begun.get(name, 0) + 1
        found = Rendezvous(
            self._store, rank=self.rank, world=self.world, prefix=f"{self._prefix}/{name}/{self._begun[name]}",
            timeout_s=self.timeout_s, notice_s=self.notice_s,
        )  # fmt: skip

        def uncount() -> None:
            self._begun[name] -= 1

        found._uncount = uncount
        found._following = lambda: self.apart(name)
        return found

    def following(self) -> Rendezvous:
        """Of a rendezvous made by ``apart``: the next one of the same name."""
        return self if self._following is None else self._following()

    def given_up(self) -> str:
        """Why a rank has abandoned this session, or the coordinator waited in vain; '' if that is not so."""
        if self._store is None or not self._present([self._said]):
            return ""
        return str(self._take(self._said, delete=False)["reason"])

    def abandon(self, reason: str) -> None:
        """Leave before the end: ranks that wait in this session raise CoordinationError with this reason at once."""
        if self._store is not None:
            self._put(self._said, {"reason": reason})

    def gather(self, topic: str, message: Message) -> list[Message] | None:
        """Send a message to the coordinator; there, returns all ranks' messages, elsewhere None."""
        base = self._next(topic)
        if self._store is None:
            return [message]
        if self.rank:
            self._put(f"{base}/{self.rank}", message)
            return None
        keys = {rank: f"{base}/{rank}" for rank in range(1, self.world)}
        self._await(topic, keys)
        return [message, *(self._take(key) for key in keys.values())]

    def broadcast(self, topic: str, message: Message | None, *, notice: bool = True) -> Message:
        """The coordinator's message, on every rank.

        With ``notice=False`` no warning is given while waiting: the coordinator is itself waiting
        for others, and names them.
        """
        base = self._next(topic)
        if self._store is None or self.rank == 0:
            assert message is not None  # the coordinator always has something to say
            if self._store is not None:
                self._put(f"{base}/all", message)
                self._forget(f"{base}/all")
            return message
        self._await(topic, {0: f"{base}/all"}, notice=notice)
        return self._take(f"{base}/all", delete=False)

    def scatter(self, topic: str, messages: list[Message] | None, *, notice: bool = True) -> Message:
        """One message of the coordinator's for each rank, where a broadcast of all of them would be too much."""
        base = self._next(topic)
        if self._store is None or self.rank == 0:
            assert messages is not None
            for rank in range(1, self.world):
                self._put(f"{base}/{rank}", messages[rank])
            return messages[0]
        self._await(topic, {0: f"{base}/{self.rank}"}, notice=notice)
        return self._take(f"{base}/{self.rank}")

    def agree(self, topic: str, failure: str | None) -> dict[int, str]:
        """Every rank says whether it failed; every rank learns who did.

        Returns:
            rank -> reason, the same on all ranks; empty if all went well.
        """
        messages = self.gather(topic, {"failure": failure})
        verdict = None
        if messages is not None:
            verdict = {str(rank): m["failure"] for rank, m in enumerate(messages) if m["failure"] is not None}
        return {int(rank): reason for rank, reason in self.broadcast(f"{topic}-verdict", verdict, notice=False).items()}

    def part(self, timeout_s: float = 10.0) -> None:
        """The end of a rendezvous of its own: the coordinator, who may hold the store, stays until all have heard it."""
        if self._store is None:
            return
        base = self._next("part")
        if self.rank:
            self._put(f"{base}/{self.rank}", {})
            return
        keys = [f"{base}/{rank}" for rank in range(1, self.world)]
        end = time.monotonic() + timeout_s
        while not self._present(keys) and time.monotonic() < end:
            time.sleep(self._longest_pause_s)
        for key in [*keys, *self._spent]:
            self._delete(key)
        self._spent.clear()

    def _next(self, topic: str) -> str:
        self._round += 1
        return f"{self._prefix}/{self._session}/{self._round}/{topic}"

    def _put(self, key: str, message: Message) -> None:
        self._call(lambda store: store.set(key, json.dumps(message)))

    def _take(self, key: str, *, delete: bool = True) -> Message:
        text = self._call(lambda store: store.get(key))
        if delete:
            self._call(lambda store: store.delete_key(key))
        message: Message = json.loads(text)
        return message

    def _forget(self, key: str) -> None:
        """Delete broadcasts once no rank can still be reading them: two rounds later all have moved on."""
        self._spent.append(key)
        if len(self._spent) > 4:
            old = self._spent.pop(0)
            self._call(lambda store: store.delete_key(old))

    def _delete(self, key: str) -> None:
        self._call(lambda store: store.delete_key(key))

    def _call(self, use: Callable[[Store], Any]) -> Any:
        assert self._store is not None
        try:
            return use(self._store)
        except Exception as err:  # DistStoreError, DistNetworkError, RuntimeError: the job is falling apart
            raise CoordinationError(f"rank {self.rank}: the job's store does not answer ({err})") from err

    def _await(self, topic: str, keys: dict[int, str], *, notice: bool = True) -> None:
        """Wait until all keys are there, by asking: a waiting store call would lock the client and, in torch, log."""
        begin = heard = time.monotonic()
        noticed = not notice
        pause = _FIRST_PAUSE_S
        while not self._present(list(keys.values())):
            now = time.monotonic()
            waited = now - begin
            if now - heard >= _HEAR_EVERY_S:
                heard = now
                self._hear()
            if waited >= self.timeout_s:
                self._give_up(topic, keys, waited)
                continue
            if not noticed and waited >= self.notice_s:
                noticed = True
                logger.warning(
                    "unickpt: rank %d has waited %.0f s at %r for rank %s", self.rank, waited, topic, self._missing(keys)
                )
            time.sleep(pause)
            pause = min(pause * 1.5, self._longest_pause_s)

    def _give_up(self, topic: str, keys: dict[int, str], waited_s: float) -> None:
        """Raise, but where it is the coordinator that is awaited, first hear whom it may itself be missing.

        Returns only if what was awaited has come after all.
        """
        if self.rank:
            end = time.monotonic() + min(self.timeout_s, _COORDINATOR_LATER_S)
            while time.monotonic() < end:
                if self._present(list(keys.values())):
                    return
                self._hear()
                time.sleep(self._longest_pause_s)
            if self._round == 1 and self._uncount is not None:
                self._uncount()  # the coordinator never made this call
        reason = (
            f"rank {self.rank} gave up after {waited_s:.0f} s at {topic!r}: no word from rank {self._missing(keys)}. "
            "Every rank has to make the call; look at what the named ranks are doing."
        )
        if self.rank == 0:
            self.abandon(reason)
        raise CoordinationError(reason)

    @property
    def _said(self) -> str:
        return f"{self._prefix}/{self._session}/given-up"

    def _hear(self) -> None:
        """Raise if the session was abandoned."""
        reason = self.given_up()
        if reason:
            raise CoordinationError(f"rank {self.rank} heard: {reason}")

    def _present(self, keys: list[str]) -> bool:
        return bool(self._call(lambda store: store.check(keys)))

    def _missing(self, keys: dict[int, str]) -> str:
        ranks = [rank for rank, key in keys.items() if not self._present([key])]
        return ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
