"""What to look at, as values: ``Verdict.next``. ``unickpt.diagnosis.reports.next_text`` renders them as text."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from unickpt.base.failure_kinds import FailureKind, Remedy
from unickpt.diagnosis.detectors.observations import CallRef
from unickpt.diagnosis.hardware.events import HostEvent
from unickpt.diagnosis.recording.records import Op


@dataclass(frozen=True, slots=True)
class OffTrack:
    """``ranks`` make ``call`` where ``others`` make ``usual``.

    Attributes:
        ranks: ranks that have left the common order.
        call: their call.
        others: ranks in the other call.
        usual: the other call.
        left_out: number of calls that ``ranks`` have left out, by the order in earlier steps; 0 if unknown.
        as_before: whether earlier steps have ``usual`` at this place.
        made: calls like ``usual`` that the first of ``ranks`` has made since step ``since_step``; 0 if unknown.
        of: such calls of the first of ``others``, with that in which it waits.
        since_step: first step of which all calls of both are known.
        alone: whether no rank is known to have made a call like ``call`` in that group before.
    """

    ranks: tuple[int, ...]
    call: CallRef
    others: tuple[int, ...]
    usual: CallRef
    left_out: int = 0
    as_before: bool = False
    made: int = 0
    of: int = 0
    since_step: int = 0
    alone: bool = False


@dataclass(frozen=True, slots=True)
class OtherOrder:
    """``ranks`` have left the common order of calls, and earlier steps do not show where."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SameSideFirst:
    """``ranks`` wait for each other in calls of the same direction: all send first, or all receive first."""

    ranks: tuple[int, ...]
    op: Op


@dataclass(frozen=True, slots=True)
class OneCallMore:
    """``ranks`` make a call that ``others``, which have ended, never make."""

    ranks: tuple[int, ...]
    call: CallRef
    others: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EndedEarly:
    """``ranks`` have ended in order, and ``others`` go on."""

    ranks: tuple[int, ...]
    call: CallRef
    others: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LooksAtProcess:
    """The process of ``rank`` has the answer.

    Attributes:
        rank: global rank.
        pid: process number; 0 if unknown.
        host: host name.
        matter: what the matter is.
    """

    rank: int
    pid: int
    host: str
    matter: Matter


class Matter(enum.Enum):
    """What the matter is with a process."""

    STOPPED = "stopped"
    KILLED = "killed"
    NO_DATA = "no data"
    NOT_BEGUN = "not begun"
    STARVED = "no processor"
    FAILED = "failed"  # has ended by itself, but not in order
    STUCK = "in uninterruptible sleep"
    BUSY = "busy"  # in a computation, a loop or a wait of the program
    SAVES = "saves"
    SLOW = "slow"
    LATE = "late now and then"


@dataclass(frozen=True, slots=True)
class LooksAtNetwork:
    """The network between ``hosts`` has the answer.

    Attributes:
        hosts: hosts of the ranks at fault; of a link its two ends.
        link: source and destination rank, if a single link is at fault.
        slow: whether the network is slow; otherwise a call does not end.
    """

    hosts: tuple[str, ...]
    link: tuple[int, int] | None = None
    slow: bool = False


@dataclass(frozen=True, slots=True)
class AllSlower:
    """What all ranks share has the answer: clocks of devices, power, cooling, storage, or the program itself.

    Attributes:
        hosts: hosts of the job.
        first, last: newest steps that are slow.
    """

    hosts: tuple[str, ...]
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Helps:
    """What helps after the end of ``rank``.

    Attributes:
        rank: global rank.
        host: host name.
        kind: what has failed.
        remedy: what helps.
    """

    rank: int
    host: str
    kind: FailureKind
    remedy: Remedy


@dataclass(frozen=True, slots=True)
class LooksAtHardware:
    """The hardware of a host, or what the host can give, is the cause.

    Attributes:
        rank: first rank at fault.
        host: host name.
        event: what has happened there.
    """

    rank: int
    host: str
    event: HostEvent


@dataclass(frozen=True, slots=True)
class CollectTogether:
    """Garbage collections cost time because they are not at the same step on all ranks, or because there are many."""

    ranks: tuple[int, ...]


Hint = (
    OffTrack | OtherOrder | SameSideFirst | OneCallMore | EndedEarly | LooksAtProcess | LooksAtNetwork | CollectTogether
    | Helps | AllSlower | LooksAtHardware
)  # fmt: skip
