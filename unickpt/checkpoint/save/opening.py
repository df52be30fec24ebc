"""First exchange of a save: the coordinator announces the save, and every rank follows or refuses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from unickpt.base.errors import CoordinationError
from unickpt.checkpoint.coordination.failure import Failure, FailureKind
from unickpt.checkpoint.coordination.message_exchange import Message, MessageExchange
from unickpt.checkpoint.save import shutdown
from unickpt.checkpoint.save.failure import save_failure
from unickpt.checkpoint.save.requests import SaveRequest


@dataclass(frozen=True, slots=True)
class Opening:
    """Announcement of the coordinator. All ranks follow it, because they see the end of earlier saves at different times.

    Attributes:
        skip: this save is skipped because an earlier one is still being written.
        background: the save continues in a thread after the call has returned.
        arguments: arguments of the call on the coordinator. They must be equal on all ranks.
        refused: failure that prevents the save on the coordinator, or None.
        announce: message of the caller to all ranks.
    """

    skip: bool
    background: bool
    arguments: Message
    refused: Failure | None
    announce: Message

    def to_json(self) -> dict[str, Any]:
        """Return the JSON-able form for messages between ranks."""
        found = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**found, "refused": None if self.refused is None else self.refused.to_json()}

    @classmethod
    def from_json(cls, value: Message) -> Opening:
        """Return the opening that ``to_json`` encoded."""
        return cls(**{**value, "refused": None if value["refused"] is None else Failure.from_json(value["refused"])})


def opening_of(request: SaveRequest, *, skip: bool, background: bool, known_defect: Failure | None) -> Opening:
    """Return the coordinator's announcement of a save. ``known_defect``: of an earlier save, which this one would repeat."""
    if skip:
        return Opening(skip, background, request.arguments, None, {})
    refused = known_defect if request.framework_stands_in else None
    if request.failed is not None:
        refused = save_failure(request.failed, 0, describing=True)
    announce: Message = {}
    if refused is None and request.announce is not None:
        try:
            announce = request.announce()
        except Exception as err:
            refused = save_failure(err, 0, describing=True)
    return Opening(skip, background, request.arguments, refused, announce)


def announced(request: SaveRequest, exchange: MessageExchange, make: Callable[[], Opening]) -> tuple[MessageExchange, Opening]:
    """Announce the save on the coordinator, or receive the announcement on another rank.

    A rank skips saves that the coordinator abandoned and that this rank never called.

    Returns:
        The message exchange of the announced save, and the announcement.

    Raises:
        CoordinationError: the coordinator does not arrive, or gave up waiting for this rank.
    """
    if exchange.rank == 0:
        try:
            opening = make()
            exchange.broadcast("save", opening.to_json())
            return exchange, opening
        except BaseException as err:
            with contextlib.suppress(CoordinationError):
                exchange.abandon(str(save_failure(err, exchange.rank)))
            raise
    while True:
        opening = Opening.from_json(exchange.broadcast("save", None))
        reason = exchange.abandon_reason()
        if not reason:
            return exchange, opening
        following = exchange.following()
        if following is exchange or _difference(request.arguments, opening.arguments, exchange.rank) is None:
            raise CoordinationError(f"rank {exchange.rank} arrived after the coordinator abandoned this save: {reason}")
        exchange = following


def differences(request: SaveRequest, exchange: MessageExchange) -> tuple[Failure, ...]:
    """Return the failures of ranks, and of those whose arguments are not the first rank's; the same on every rank.

    For a save that the framework makes. Every rank calls this. A rank that failed before it knew its arguments has no part in
    the comparison.

    Raises:
        CoordinationError: a rank did not arrive in time.
    """
    own = None if request.failed is None else save_failure(request.failed, exchange.rank, describing=True).to_json()

    def compared(messages: list[Message]) -> Message:
        failed = [message["failure"] for message in messages if message["failure"] is not None]
        known = [(rank, message["arguments"]) for rank, message in enumerate(messages) if message["failure"] is None]
        found = (_difference(arguments, known[0][1], rank) for rank, arguments in known)
        return {"failures": [*failed, *(failure.to_json() for failure in found if failure is not None)]}

    agreed = exchange.combined("arguments", {"failure": own, "arguments": request.arguments}, compared)
    return tuple(map(Failure.from_json, agreed["failures"]))


def refusal(here: Message, there: Message, rank: int) -> Failure | None:
    """Return why a rank takes no part in a save, or None. ``here`` and ``there``: arguments on it and on the coordinator."""
    ending = shutdown.ending_signal()
    if ending:
        return Failure(FailureKind.INTERRUPTED, rank, text=f"this process received {ending} and starts no new save")
    return _difference(here, there, rank)


def _difference(here: Message, there: Message, rank: int) -> Failure | None:
    """Return which arguments of a rank differ from those of the coordinator, or None."""
    differing = _differing(here, there)
    if not differing:
        return None
    found = "; ".join(f"{name} is {own!r} on this rank and {other!r} on rank 0" for name, own, other in differing)
    return Failure(FailureKind.ARGUMENTS, rank, text=found)


def _differing(here: Message, there: Message) -> list[tuple[str, Any, Any]]:
    """Return name and both values of the arguments that differ. A place may be an argument itself (``SaveRequest.place``)."""
    found: list[tuple[str, Any, Any]] = []
    for name, other in there.items():
        own = here.get(name)
        if isinstance(own, dict) and isinstance(other, dict):
            found += [(f"{name}.{inner}", mine, its) for inner, mine, its in _differing(own, other)]
        elif own != other and name != "resolved" and not (name == "save_dir" and _is_same_folder(here, there)):
            found.append((name, own, other))
    return found


def _is_same_folder(here: Message, there: Message) -> bool:
    """Whether two ranks name one folder: by the same path, which hosts may link to different mounts, or by two links to it."""
    return any(name in there and here.get(name) == there[name] for name in ("save_dir", "resolved"))
