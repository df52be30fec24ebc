"""Load a checkpoint on all ranks of a job: open, agree, plan, agree, read, agree.

A rank that fails at any step takes part in the next agreement with its ``Failure``. So no rank waits for a rank that failed.
Either all ranks raise, or all ranks fall back to the same older checkpoint. No collective is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from unickpt.base import step_replay
from unickpt.base.errors import (
    ConfigError,
    CoordinationError,
    CorruptCheckpointError,
    HostPeerFailedError,
    MismatchError,
    UnickptError,
)
from unickpt.base.listing import some
from unickpt.base.logs import logger
from unickpt.checkpoint.checkpoint_folder import complete_checkpoints
from unickpt.checkpoint.coordination import host_peers as host_peers_module
from unickpt.checkpoint.coordination.failure import Failure, FailureKind
from unickpt.checkpoint.coordination.host_peers import HostMemory, HostPeers
from unickpt.checkpoint.coordination.message_exchange import MessageExchange
from unickpt.checkpoint.fence import take_on_resume
from unickpt.checkpoint.load.checkpoint import Planned
from unickpt.checkpoint.load.failure import error_of, failure_of, is_damage
from unickpt.checkpoint.load.replayed import replayed, replays
from unickpt.checkpoint.witness_faults import note_gone_back

T = TypeVar("T")
Opener = Callable[[], HostPeers]


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
    """The checkpoint that a job tries next. The coordinator selects it, and it is the same on all ranks.

    Attributes:
        directory: checkpoint directory, as the coordinator sees it. '' if no checkpoint is left.
        name: name of the directory in the folder. '' if the folder is itself the checkpoint.
        step: training step, if known.
        notes: problems of the folder itself, for the log.
        explicit: the user named this checkpoint, so no other one replaces it.
        native: the checkpoint has the framework's own format.
        present: complete checkpoints of the folder, newest first. Set only if there is nothing to load.
        missing: what the folder or the user names but is not there. Set only if there is nothing to load.
        refused: why an existing checkpoint cannot be loaded.
        failure: why the coordinator cannot select a checkpoint.
        generation: number of a generation in the memory of the hosts; 0 for a checkpoint on disk.
        checked: each host first removes its damaged files of the generation.
        replays: the coordinator repeats a step for ``unickpt replay-step``.
    """

    directory: str = ""
    name: str = ""
    step: int = 0
    notes: tuple[str, ...] = ()
    explicit: bool = False
    native: bool = False
    present: tuple[str, ...] = ()
    missing: str = ""
    refused: str = ""
    failure: Failure | None = None
    generation: int = 0
    checked: bool = False
    replays: bool = False

    def to_message(self) -> dict[str, Any]:
        """Return a JSON-compatible value."""
        return {**asdict(self), "failure": None if self.failure is None else self.failure.to_json()}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Offer:
        """Return the value that ``to_message`` encoded."""
        failure = message["failure"]
        return replace(
            cls(**{**message, "failure": None}),
            notes=tuple(message["notes"]),
            present=tuple(message["present"]),
            failure=None if failure is None else Failure.from_json(failure),
        )


@contextlib.contextmanager
def _telling(exchange: MessageExchange) -> Iterator[None]:
    """Tell the other ranks of Ctrl-C or SystemExit on this rank: they raise CoordinationError and do not wait for it."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as err:
        with contextlib.suppress(CoordinationError):
            exchange.abandon(f"rank {exchange.rank}: {type(err).__name__}")
        raise


class Together:
    """The agreements of one load. Every rank makes the same sequence of calls until one of them raises.

    Each method runs the part of this rank, catches its exception, and then exchanges the outcome with the other ranks. After
    Ctrl-C in a step they raise CoordinationError.

    Attributes:
        exchange: message exchange of the ranks.
        where: path or URL of the checkpoint, for messages.
    """

    def __init__(self, exchange: MessageExchange, where: str) -> None:
        self.exchange, self.where = exchange, where

    def step(self, name: str, part: Callable[[], T]) -> T:
        """Run one step of the load and agree on its outcome.

        Args:
            name: name of the step, the same on every rank.
            part: work of this rank. It must not communicate with other ranks while it can still fail.

        Raises:
            AgreedFailureError: the step failed on at least one rank.
        """
        result, error = None, None
        with _telling(self.exchange):
            try:
                result = part()
            except Exception as err:
                error = err
            self.agree(name, error)
        return result  # type: ignore[return-value]  # the part has returned

    def plan(self, part: Callable[[], Planned], *, identity: Callable[[], str], share: bool) -> tuple[Planned, Opener | None]:
        """Plan the reads, and find the ranks of this host that need the same fragments.

        Args:
            part: returns the plan of this rank.
            identity: returns the identity of the opened checkpoint. The load fails if ranks opened different checkpoints.
            share: whether this rank shares reads with the ranks of its host.

        Raises:
            AgreedFailureError: at least one rank has no plan, or opened another checkpoint.
        """
        planned, error, opened = None, None, ""
        with _telling(self.exchange):
            try:
                opened = identity()
                planned = part()
            except Exception as err:
                error = err
            failures, opener = host_peers_module.prepare_peers(
                self.exchange,
                None if planned is None else planned.shareable,
                self._failure(error),
                identity=opened,
                wanted_bytes=0 if planned is None else planned.size_bytes,
                cached=planned is not None and planned.cached,
                share=share,
            )
        self._raise(failures, error)
        assert planned is not None
        return planned, opener

    def read(self, part: Callable[[HostPeers | None], None], opener: Opener | None) -> None:
        """Read what was planned, given the ranks that share memory with this one, or None.

        Raises:
            AgreedFailureError: the read failed on at least one rank.
        """
        with HostMemory(opener) as memory:
            self.step("read", lambda: memory.use(part))

    def agree(self, name: str, error: Exception | None) -> None:
        """Exchange the outcome of a step.

        Raises:
            AgreedFailureError: the step failed on at least one rank.
        """
        failure = self._failure(error)
        agreed = self.exchange.combined(
            name,
            {"failure": None if failure is None else failure.to_json()},
            lambda messages: {"failures": [m["failure"] for m in messages if m["failure"] is not None]},
        )
        self._raise(tuple(map(Failure.from_json, agreed["failures"])), error)

    def _failure(self, error: Exception | None) -> Failure | None:
        return None if error is None else failure_of(error, rank=self.exchange.rank, where=self.where)

    def _raise(self, failures: tuple[Failure, ...], error: Exception | None) -> None:
        causes = tuple(failure for failure in failures if failure.kind is not FailureKind.HOST_PEER)
        if not failures:
            return
        if error is None or (causes and isinstance(error, HostPeerFailedError)):
            error = error_of(failures, where=self.where)
        raise AgreedFailureError(causes or failures, error)


def resume(
    exchange: MessageExchange,
    offer: Callable[[], Offer],
    attempt: Callable[[Offer, tuple[str, ...]], T],
    nothing: Callable[[Offer], T],
    *,
    where: str,
    fall_back: bool = True,
) -> T:
    """Load a checkpoint, or the next older one if it is damaged. Every rank calls this function.

    Args:
        exchange: message exchange of the whole job, in a session that all ranks have begun.
        offer: selects the checkpoint to try next. Called on the coordinator, again after damage.
        attempt: loads an offer, given the notes on skipped checkpoints. If it fails, it raises ``AgreedFailureError`` on all
            ranks.
        nothing: called if there was no checkpoint to try.
        where: path or URL of the folder, for messages.
        fall_back: whether to try an older checkpoint after damage.

    Returns:
        The return value of ``attempt`` or ``nothing``.

    Raises:
        UnickptError: raised on all ranks. The message names the rank that failed and what to do.
        KeyboardInterrupt, SystemExit: this rank was interrupted; the others raise CoordinationError.
    """
    with _telling(exchange):
        return _resumed(exchange, offer, attempt, nothing, where, fall_back)


def _resumed(
    exchange: MessageExchange,
    offer: Callable[[], Offer],
    attempt: Callable[[Offer, tuple[str, ...]], T],
    nothing: Callable[[Offer], T],
    where: str,
    fall_back: bool,
) -> T:
    skipped: list[str] = []
    tried = False
    request = replays(where)
    if exchange.rank == 0 and step_replay.asked() is None:
        take_on_resume(where)
    while True:
        found = Offer.from_message(
            exchange.broadcast("offer", _offered(offer, where).to_message() if exchange.rank == 0 else None)
        )
        if found.replays != (request is not None) and found.failure is None:
            has, lacks = (0, exchange.rank) if found.replays else (exchange.rank, 0)
            raise ConfigError(
                f"{step_replay.VARIABLE} is in the environment of rank {has}, and not in that of rank {lacks}. All ranks need "
                "it: let the launcher pass it on"
            )
        if found.failure is not None:
            raise error_of([found.failure], where=where, what="cannot see what is there")
        if found.refused:
            raise MismatchError(found.refused)
        if found.notes and exchange.rank == 0:
            follows = f"Trying {found.directory}." if found.directory else "No complete checkpoint is left."
            logger.warning("unickpt: %s. %s", "; ".join(found.notes), follows)
        if found.notes and not fall_back:
            raise CorruptCheckpointError("; ".join(found.notes))
        skipped += found.notes
        if not found.directory:
            if tried or skipped:
                reasons = _ended("; ".join(skipped))
                raise CorruptCheckpointError(f"no complete checkpoint is left in {where}: {reasons} {_WITHOUT_OTHERS}")
            return nothing(found)
        tried = True
        try:
            done = attempt(found, tuple(skipped))
            if exchange.rank == 0:
                gone_back(where)
            return done
        except AgreedFailureError as agreed:
            error, failures = agreed.error, agreed.failures
        if found.explicit or not fall_back or not is_damage(failures):
            advised = _advised(exchange, error, found, where) if is_damage(failures) else error
            raise advised from error.__cause__
        reason = error_of(failures, where=found.directory) if not isinstance(error, UnickptError) else error
        skipped.append(str(reason) if found.directory in str(reason) else f"{found.directory}: {reason}")
        if exchange.rank == 0:
            logger.warning("unickpt: %s cannot be used: %s Looking for an older one.", found.directory, _ended(str(reason)))


def gone_back(where: str) -> None:
    """Note that a job has loaded a checkpoint behind the faults that the witness has found."""
    if step_replay.asked() is not None:  # which changes nothing in the folder
        return
    try:
        note_gone_back(where)
    except UnickptError as err:
        logger.warning("unickpt: faults that the witness has found stay as they are: %s", err)


_WITHOUT_OTHERS = "Copy the files back if there is another copy of them, or start anew."


def _offered(offer: Callable[[], Offer], where: str) -> Offer:
    """Return the offer of the coordinator; its failure if it cannot read the folder, because the other ranks wait for it."""
    try:
        request = replays(where)
        if request is None:
            return offer()
        found = replayed(request, where)
        return Offer(found.directory, found.name, found.step, explicit=True, refused=found.refused, replays=True)
    except Exception as err:
        return Offer(failure=failure_of(err, rank=0, where=where))


def _ended(text: str) -> str:
    """Return a message with one full stop at its end."""
    return text.rstrip(".") + "."


def _advised(exchange: MessageExchange, error: Exception, offer: Offer, where: str) -> Exception:
    """Return the error about a checkpoint that the user named, extended by the complete checkpoints in the same folder."""
    others: dict[str, Any] | None = None
    if exchange.rank == 0:
        with contextlib.suppress(UnickptError, OSError):
            others = {
                "whole": [name for _, name in complete_checkpoints(where) if not offer.directory.rstrip("/").endswith(name)]
            }
        others = others or {"whole": []}
    found = exchange.broadcast("whole", others)["whole"]
    if not isinstance(error, UnickptError):
        return error
    others_are = (
        f"Complete checkpoints in {where}, newest first: {some(found)}. Resume from one of them." if found else _WITHOUT_OTHERS
    )
    text = f"{_ended(str(error))} {others_are}"
    return type(error)(text).about(file=error.file, tensor=error.tensor)
