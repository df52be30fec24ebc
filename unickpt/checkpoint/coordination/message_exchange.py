"""Agreement of the ranks of one save or load, without a collective.

Ranks exchange short messages through the key-value store of the job, the one that set up the process groups. This works
from any thread and cannot interfere with the collectives of training. A message names the rank that does not arrive.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from unickpt.base.errors import CoordinationError
from unickpt.base.listing import some
from unickpt.base.logs import logger

Message = dict[str, Any]  # JSON-able

_FEW_RANKS = 64
_KEYS_AT_ONCE = 32  # in one question to the store
_CHECK_EVERY_S = 0.25  # interval at which a waiting rank checks whether the session was abandoned
_COORDINATOR_LATER_S = 30.0  # extra time for the coordinator, whose own timeout for a lost rank ends at about the same time


class Store(Protocol):
    """Subset of ``torch.distributed.Store``."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Pauses:
    """Pauses between two questions to the store. They grow with the wait, so that a waiting rank takes no time from training.

    Attributes:
        first_s: first pause.
        share: of the time waited so far.
        longest_s: longest pause.
    """

    first_s: float
    share: float
    longest_s: float

    @classmethod
    def of(cls, world: int) -> Pauses:
        """Return the pauses of a job. One store serves the questions of all ranks, so many ranks ask less often."""
        longest_s = min(0.05, max(0.01, 0.001 * world))
        return cls(0.0002, 0.1, longest_s) if world <= _FEW_RANKS else cls(0.0005, 0.5, longest_s)

    def after(self, waited_s: float) -> float:
        """Return the pause after a wait of some seconds."""
        return min(max(self.first_s, self.share * waited_s), self.longest_s)


class Awaited:
    """The keys that a rank waits for, in their order. Those that exist are asked for only once.

    A wait asks many times. So a question has few keys, and fewer after each answer that one is missing: the bytes of a wait do
    not grow as the number of ranks times its length.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys, self._at_once = list(keys), _KEYS_AT_ONCE

    def arrived(self, present: Callable[[list[str]], bool]) -> bool:
        """Whether all keys exist. ``present`` asks the store whether it has some."""
        while self._keys:
            if not present(self._keys[: self._at_once]):
                self._at_once = max(self._at_once // 2, 1)
                return False
            del self._keys[: self._at_once]
            self._at_once = min(self._at_once * 2, _KEYS_AT_ONCE)
        return True


class MessageExchange:
    """Message exchange among the ranks of a job, with time limits. Errors and warnings name the missing ranks.

    Every rank makes the same sequence of calls. Rank 0 is the coordinator.

    Args:
        store: key-value store of the job; None for a single process.
        rank, world: rank of this process, and number of ranks.
        prefix: prefix of all keys.
        timeout_s: seconds to wait for other ranks before CoordinationError.
        notice_s: seconds after which one warning names the missing ranks.
        ended: returns the ranks whose processes have ended (``round_folder.ends_of_job``). A wait for a message that
            one of them has not sent ends at once.
        call: what tells this call of the program from others, the same on all ranks. See ``is_of_others``.
    """

    def __init__(
        self, store: Store | None, *, rank: int, world: int, prefix: str, timeout_s: float = 1800.0, notice_s: float = 20.0,
        ended: Callable[[], frozenset[int]] = frozenset, call: str = "",
    ) -> None:  # fmt: skip
        if store is None and world != 1:
            raise CoordinationError(f"{world} ranks need a key-value store for coordination, but none was given")
        self.rank, self.world, self.timeout_s, self.notice_s = rank, world, timeout_s, notice_s
        self._store, self._prefix, self._round, self.ended = store, prefix, 0, ended
        self._session = "0"
        self._begun: dict[str, int] = {}
        self._name = call
        self._uncount: Callable[[], None] | None = None
        self._following: Callable[[], MessageExchange] | None = None
        self._heard = False  # anything of the coordinator
        self._spent: list[str] = []
        self._pauses = Pauses.of(world)

    def begin(self, name: str) -> None:
        """Start a session. Ranks meet only if they have started sessions of this name equally often.

        A session that some ranks missed (one rank called save, the others did not) therefore cannot mix with the next.
        """
        self._begun[name] = self._begun.get(name, 0) + 1
        self._session, self._round = f"{name}/{self._begun[name]}", 0

    def separate(self, name: str) -> MessageExchange:
        """Return a separate exchange for work that may overlap with other work, such as a save in a thread.

        Ranks that called this equally often for the same name meet in it. A call in which the coordinator did not arrive
        does not count. The name must be equal on all ranks, so it must not contain an argument of a user's call.
        """
        self._begun[name] = self._begun.get(name, 0) + 1
        found = MessageExchange(
            self._store, rank=self.rank, world=self.world, prefix=f"{self._prefix}/{name}/{self._begun[name]}",
            timeout_s=self.timeout_s, notice_s=self.notice_s, ended=self.ended,
        )  # fmt: skip

        def uncount() -> None:
            self._begun[name] -= 1

        found._uncount = uncount
        found._following = lambda: self.separate(name)
        return found

    def following(self) -> MessageExchange:
        """Return the next exchange of the same name, if ``separate`` created this one; otherwise this one."""
        return self if self._following is None else self._following()

    @property
    def deserted(self) -> bool:
        """Whether the process of the coordinator has ended, so that no wait for it can end."""
        return self.rank != 0 and 0 in self.ended()

    def abandon_reason(self) -> str:
        """Return why a rank abandoned this session, or ''."""
        if self._store is None or not self._present([self._abandon_key]):
            return ""
        return str(self._take(self._abandon_key, delete=False)["reason"])

    def is_of_others(self) -> bool:
        """Return whether other ranks made another call here, which this rank never made, and gave up."""
        if self._store is None or not self._present([self._abandon_key]):
            return False
        return bool(self._take(self._abandon_key, delete=False)["call"] != self._name)

    def abandon(self, reason: str) -> None:
        """Abandon the session: ranks that wait in it raise CoordinationError with this reason."""
        if self._store is not None:
            self._put(self._abandon_key, {"reason": reason, "call": self._name})

    def gather(self, topic: str, message: Message) -> list[Message] | None:
        """Send a message to the coordinator. Return the messages of all ranks on the coordinator, None elsewhere."""
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
        """Return the message of the coordinator on every rank.

        With ``notice=False`` there is no warning during the wait. Use it where the coordinator itself waits for other
        ranks and names them.
        """
        base = self._next(topic)
        if self._store is None or self.rank == 0:
            assert message is not None  # the coordinator always passes a message
            if self._store is not None:
                self._put(f"{base}/all", message)
                self._delete_later(f"{base}/all")
            return message
        self._await(topic, {0: f"{base}/all"}, notice=notice)
        self._heard = True
        return self._take(f"{base}/all", delete=False)

    def scatter(self, topic: str, messages: list[Message] | None, *, notice: bool = True) -> Message:
        """Return the message that the coordinator has for this rank. ``messages`` has one per rank; None elsewhere."""
        base = self._next(topic)
        if self._store is None or self.rank == 0:
            assert messages is not None
            for rank in range(1, self.world):
                self._put(f"{base}/{rank}", messages[rank])
            return messages[0]
        self._await(topic, {0: f"{base}/{self.rank}"}, notice=notice)
        self._heard = True
        return self._take(f"{base}/{self.rank}")

    def combined(self, topic: str, message: Message, function: Callable[[list[Message]], Message]) -> Message:
        """Return on every rank what the coordinator makes of the messages of all ranks. Every rank calls this.

        Only the coordinator warns of ranks that are late. The others wait for it, and it names them.
        """
        messages = self.gather(topic, message)
        return self.broadcast(f"{topic}-verdict", None if messages is None else function(messages), notice=False)

    def agree(self, topic: str, failure: str | None) -> dict[int, str]:
        """Exchange failures. Every rank passes its own failure, or None.

        Returns:
            The reason of every failed rank, by rank; the same on all ranks.
        """

        def failed(messages: list[Message]) -> Message:
            return {str(rank): m["failure"] for rank, m in enumerate(messages) if m["failure"] is not None}

        return {int(rank): reason for rank, reason in self.combined(topic, {"failure": failure}, failed).items()}

    def leave(self, timeout_s: float = 10.0) -> None:
        """End a separate exchange. The coordinator, which may host the store, waits until all ranks have left or ended."""
        if self._store is None:
            return
        base = self._next("leave")
        if self.rank:
            self._put(f"{base}/{self.rank}", {})
            return
        keys = {rank: f"{base}/{rank}" for rank in range(1, self.world)}
        checked = time.monotonic()
        end = checked + timeout_s
        awaited, known = Awaited(keys.values()), frozenset[int]()
        while time.monotonic() < end and not awaited.arrived(self._present):
            if time.monotonic() - checked >= _CHECK_EVERY_S:
                checked, ended = time.monotonic(), self.ended()
                if ended != known:
                    awaited, known = Awaited(key for rank, key in keys.items() if rank not in ended), ended
                    continue
            time.sleep(self._pauses.longest_s)
        for key in [*keys.values(), *self._spent]:
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

    def _delete_later(self, key: str) -> None:
        """Delete a broadcast some rounds later, when no rank can still read it."""
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
        except Exception as err:  # DistStoreError, DistNetworkError, RuntimeError: the job is ending
            raise CoordinationError(f"rank {self.rank}: the key-value store of the job does not answer ({err})") from err

    def _await(self, topic: str, keys: dict[int, str], *, notice: bool = True) -> None:
        """Poll until all keys exist. A blocking call of the store would lock the client and, in torch, write log lines."""
        begin = checked = time.monotonic()
        lost: frozenset[int] = frozenset()
        noticed, awaited = not notice, Awaited(keys.values())
        while not awaited.arrived(self._present):
            now = time.monotonic()
            waited = now - begin
            if now - checked >= _CHECK_EVERY_S:
                checked = now
                self._check_abandoned()
                lost = self._check_ended(topic, keys, lost)
            if waited >= self.timeout_s:
                self._give_up(topic, keys, waited)
                continue
            if not noticed and waited >= self.notice_s:
                noticed = True
                logger.warning(
                    "unickpt: rank %d has waited %.0f s in step %r for rank %s", self.rank, waited, topic, self._missing(keys)
                )
            time.sleep(self._pauses.after(waited))

    def _give_up(self, topic: str, keys: dict[int, str], waited_s: float) -> None:
        """Raise CoordinationError, or return if the awaited keys exist after all.

        A rank that waits for the coordinator first waits for the coordinator's own timeout, which names the lost rank.
        """
        if self.rank:
            end = time.monotonic() + min(self.timeout_s, _COORDINATOR_LATER_S)
            while time.monotonic() < end:
                if self._present(list(keys.values())):
                    return
                self._check_abandoned()
                time.sleep(self._pauses.longest_s)
            if self._round == 1 and self._uncount is not None:
                self._uncount()  # the coordinator never made this call
        reason = (
            f"rank {self.rank} gave up after {waited_s:.0f} s in step {topic!r}: no message from rank {self._missing(keys)}. "
            "Every rank must make this call. Check the state of the named ranks."
        )
        if self.rank == 0 or (self._name and not self._heard):
            self.abandon(reason)
        raise CoordinationError(reason)

    def _check_ended(self, topic: str, keys: dict[int, str], lost: frozenset[int]) -> frozenset[int]:
        """Return the awaited ranks whose processes have ended and whose messages are missing.

        A last message may still be on its way to the store. So CoordinationError is raised only for a rank that was missing at
        the check before, too, which has returned ``lost``.
        """
        found = frozenset(rank for rank in self.ended() & keys.keys() if not self._present([keys[rank]]))
        if not found & lost:
            return found
        named = ", ".join(map(str, sorted(found & lost)))
        reason = f"rank {self.rank} gave up in step {topic!r}: the process of rank {named} has ended without a message"
        if self.rank == 0:
            self.abandon(reason)
        raise CoordinationError(reason)

    @property
    def _abandon_key(self) -> str:
        return f"{self._prefix}/{self._session}/abandoned"

    def _check_abandoned(self) -> None:
        """Raise CoordinationError if the session was abandoned."""
        reason = self.abandon_reason()
        if reason:
            raise CoordinationError(f"rank {self.rank} was notified: {reason}")

    def _present(self, keys: list[str]) -> bool:
        return bool(self._call(lambda store: store.check(keys)))

    def _missing(self, keys: dict[int, str]) -> str:
        return some((rank for rank, key in keys.items() if not self._present([key])), most=16)
