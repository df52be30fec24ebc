"""The one way in which the ranks of a job load a checkpoint: open, agree, plan, agree, read, agree.

A rank that fails takes part in the next agreement with its ``Failure``, whatever it failed at. So no rank waits for one that
has given up, and all ranks raise, or all ranks fall back to the same older checkpoint. No collective is used.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from unickpt import neighbours as neighbours_module
from unickpt.coordination import Rendezvous
from unickpt.errors import CorruptCheckpointError, MismatchError, NeighbourFailedError, UnickptError
from unickpt.load.failure import Failure, error_of, failure_of, is_damage
from unickpt.loading import Planned
from unickpt.neighbours import Neighbours
from unickpt.resuming import whole

logger = logging.getLogger("unickpt")

T = TypeVar("T")
Opener = Callable[[], Neighbours]
_SHOWN = 8  # whole checkpoints that an error names


class AgreedFailureError(Exception):
    """All ranks know that this load failed.

    Attributes:
        failures: of all ranks, the same on every rank.
        error: to raise on this rank.
    """

    def __init__(self, failures: tuple[Failure, ...], error: Exception) -> None:
        super().__init__(str(error))
        self.failures, self.error = failures, error


@dataclass(frozen=True, slots=True)
class Offer:
    """What a job tries to load next. The coordinator makes it, and it is the same on all ranks.

    Attributes:
        directory: of the checkpoint, as the coordinator sees it; '' if there is none, or none is left.
        name: of that directory in the folder; '' if the folder is itself the checkpoint.
        step: of the checkpoint, as far as it is known.
        notes: what is wrong with the folder itself, for the log.
        explicit: the user named this checkpoint, so no other one replaces it.
        native: it is in the framework's own format.
        present: whole checkpoints of the folder, newest first. Only where there is nothing to load.
        refused: why nothing can be loaded although something is there.
        failure: why the coordinator cannot offer anything.
    """

    directory: str = ""
    name: str = ""
    step: int = 0
    notes: tuple[str, ...] = ()
    explicit: bool = False
    native: bool = False
    present: tuple[str, ...] = ()
    refused: str = ""
    failure: Failure | None = None

    def to_message(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Offer:
        """The inverse of ``to_message``."""
        failure = message["failure"]
        return replace(
            cls(**{**message, "failure": None}),
            notes=tuple(message["notes"]),
            present=tuple(message["present"]),
            failure=None if failure is None else Failure.from_message(failure),
        )


class Together:
    """The agreements of one load. Every rank makes the same sequence of calls until one of them raises.

    Each method runs this rank's part, whose exception it keeps, and then exchanges the outcome.

    Attributes:
        where: the checkpoint's path or URL, for messages.
    """

    def __init__(self, meet: Rendezvous, where: str) -> None:
        self.meet, self.where = meet, where

    def step(self, name: str, part: Callable[[], T]) -> T:
        """One part of the load.

        Args:
            name: of the step; every rank passes the same one.
            part: what this rank does. It must not exchange anything with other ranks before it can no longer fail.

        Raises:
            AgreedFailureError: it failed on at least one rank.
        """
        result, error = None, None
        try:
            result = part()
        except Exception as err:
            error = err
        self.agree(name, error)
        return result  # type: ignore[return-value]  # the part has returned

    def plan(self, part: Callable[[], Planned], *, identity: Callable[[], str], share: bool) -> tuple[Planned, Opener | None]:
        """Plan the reads, and meet the ranks of this host that want the same.

        Args:
            part: returns this rank's plan.
            identity: of the checkpoint that this rank opened; ranks that opened different ones do not go on.
            share: False on any rank: nobody shares with it.

        Raises:
            AgreedFailureError: at least one rank has no plan, or opened another checkpoint.
        """
        planned, error, opened = None, None, ""
        try:
            opened = identity()
            planned = part()
        except Exception as err:
            error = err
        failures, opener = neighbours_module.meet(
            self.meet,
            None if planned is None else planned.rows,
            self._failure(error),
            identity=opened,
            wanted_bytes=0 if planned is None else planned.size_bytes,
            share=share,
        )
        self._raise(failures, error)
        assert planned is not None
        return planned, opener

    def read(self, part: Callable[[Neighbours | None], None], opener: Opener | None) -> None:
        """Read what was planned.

        Args:
            part: reads, with the neighbours that it shares memory with, if there are any.
            opener: of that memory, from ``plan``.

        Raises:
            AgreedFailureError: at least one rank could not.
        """

        def reading() -> None:
            if opener is None:
                part(None)
                return
            with opener() as neighbours:
                part(neighbours)

        self.step("read", reading)

    def agree(self, name: str, error: Exception | None) -> None:
        """Exchange how a step went.

        Raises:
            AgreedFailureError: it failed on at least one rank.
        """
        failure = self._failure(error)
        gathered = self.meet.gather(name, {"failure": None if failure is None else failure.to_message()})
        verdict = None
        if gathered is not None:
            verdict = {"failures": [m["failure"] for m in gathered if m["failure"] is not None]}
        told = self.meet.broadcast(f"{name}-verdict", verdict, notice=False)
        self._raise(tuple(map(Failure.from_message, told["failures"])), error)

    def _failure(self, error: Exception | None) -> Failure | None:
        return None if error is None else failure_of(error, rank=self.meet.rank, where=self.where)

    def _raise(self, failures: tuple[Failure, ...], error: Exception | None) -> None:
        causes = tuple(failure for failure in failures if failure.kind != "neighbour")
        if not failures:
            return
        if error is None or (causes and isinstance(error, NeighbourFailedError)):
            error = error_of(failures, where=self.where)
        raise AgreedFailureError(causes or failures, error)


def resume(
    meet: Rendezvous,
    offer: Callable[[], Offer],
    attempt: Callable[[Offer, tuple[str, ...]], T],
    nothing: Callable[[Offer], T],
    *,
    where: str,
    fall_back: bool = True,
) -> T:
    """Load the checkpoint that is offered, or the next one where that is damaged. Every rank calls it.

    Args:
        meet: of the whole job, in a session that all ranks have begun.
        offer: on the coordinator, what to try next; called again after damage.
        attempt: loads an offer, given the lines about what was passed over. Raises ``AgreedFailureError`` if it fails, on all
            ranks.
        nothing: called if nothing was offered in the first place.
        where: the folder, for messages.
        fall_back: False: damage is an error.

    Returns:
        What ``attempt`` or ``nothing`` returns.

    Raises:
        UnickptError: all ranks raise; the message names the rank that failed, and what to do.
    """
    skipped: list[str] = []
    tried = False
    while True:
        found = Offer.from_message(meet.broadcast("offer", _offered(offer, where).to_message() if meet.rank == 0 else None))
        if found.failure is not None:
            raise error_of([found.failure], where=where, what="cannot see what is there")
        if found.refused:
            raise MismatchError(found.refused)
        if found.notes and meet.rank == 0:
            follows = f"Trying {found.directory}." if found.directory else "No whole checkpoint is left."
            logger.warning("unickpt: %s. %s", "; ".join(found.notes), follows)
        if found.notes and not fall_back:
            raise CorruptCheckpointError("; ".join(found.notes))
        skipped += found.notes
        if not found.directory:
            if tried or skipped:
                raise CorruptCheckpointError(f"no whole checkpoint is left in {where}: " + "; ".join(skipped))
            return nothing(found)
        tried = True
        try:
            return attempt(found, tuple(skipped))
        except AgreedFailureError as agreed:
            error, failures = agreed.error, agreed.failures
        if found.explicit or not fall_back or not is_damage(failures):
            advised = _advised(meet, error, found, where) if is_damage(failures) else error
            raise advised from error.__cause__
        reason = error_of(failures, where=found.directory) if not isinstance(error, UnickptError) else error
        skipped.append(f"{found.directory}: {reason}")
        if meet.rank == 0:
            logger.warning("unickpt: %s cannot be used: %s. Looking for an older one.", found.directory, reason)


def _offered(offer: Callable[[], Offer], where: str) -> Offer:
    """What the coordinator offers. The other ranks wait for its word, also where it cannot see the folder."""
    try:
        return offer()
    except Exception as err:
        return Offer(failure=failure_of(err, rank=0, where=where))


def _advised(meet: Rendezvous, error: Exception, offer: Offer, where: str) -> Exception:
    """The error about a checkpoint that was asked for by name, with those beside it that are whole."""
    others: dict[str, Any] | None = None
    if meet.rank == 0:
        with contextlib.suppress(UnickptError, OSError):
            others = {"whole": [name for _, name in whole(where) if not offer.directory.rstrip("/").endswith(name)]}
        others = others or {"whole": []}
    found = meet.broadcast("whole", others)["whole"]
    if not found or not isinstance(error, UnickptError):
        return error
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    named = ", ".join(found[:_SHOWN])
    return type(error)(f"{error} Whole checkpoints in {where}, newest first: {named}{more}.").about(
        file=error.file, tensor=error.tensor
    )
