"""Findings of the detectors, as values. ``unickpt.diagnosis.reports.verdict_text`` renders them as text."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from unickpt.base.failure_kinds import FailureKind, Remedy
from unickpt.diagnosis.host.process_exits import ExitStatus
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.host.stack_dumps import Frame
from unickpt.diagnosis.recording.records import Op
from unickpt.diagnosis.snapshot.snapshot import GroupInfo


class Syndrome(enum.Enum):
    """Kind of a finding: the four syndromes of C4 (arXiv 2406.04594, section 4) and two hangs that the program causes."""

    COMMUNICATION_HANG = "communication hang"
    NON_COMMUNICATION_HANG = "non-communication hang"
    COMMUNICATION_SLOW = "communication slow"
    NON_COMMUNICATION_SLOW = "non-communication slow"
    MISMATCH = "mismatched collectives"
    DEADLOCK = "deadlock between groups"
    FAILED = "failed job"

    @property
    def meaning(self) -> str:
        """What it is, for a reader who does not know C4's names."""
        return _MEANINGS[self]


_MEANINGS = {
    Syndrome.COMMUNICATION_HANG: "a call that all members have entered and that does not end",
    Syndrome.NON_COMMUNICATION_HANG: "a rank that the others wait for is busy elsewhere, stopped or dead",
    Syndrome.COMMUNICATION_SLOW: "transfers of a link, or of all links of a rank, take longer than others or than before",
    Syndrome.NON_COMMUNICATION_SLOW: "the own work of a rank, between its calls, takes longer than that of its peers",
    Syndrome.MISMATCH: "ranks make different calls where all must make the same one",
    Syndrome.DEADLOCK: "ranks wait for each other in different calls",
    Syndrome.FAILED: "all ranks have ended, and not in order: the first cause, and what followed from it",
}


class Cause(enum.Enum):
    """Activity of the ranks at fault."""

    DATA = "data"
    GARBAGE = "garbage collection"
    COMPUTE = "compute"
    COMMUNICATION = "communication"
    CHECKPOINT = "checkpoint"


class Direction(enum.Enum):
    """Side of a link that is slow."""

    SENDS = "sends"
    RECEIVES = "receives"
    LINK = "link"


class Baseline(enum.Enum):
    """Quantity that a slow link is compared with."""

    OTHER_LINKS = "other links"
    OWN_PAST = "own past"


@dataclass(frozen=True, slots=True)
class CallRef:
    """Identity of one call.

    Attributes:
        op: operation.
        seq: sequence number in the group, or in the pair of ranks and direction.
        group: communicator.
        pair: source and destination rank of a point-to-point call; None for a collective.
    """

    op: Op
    seq: int
    group: GroupInfo
    pair: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class NotEntered:
    """``waiting`` ranks wait in a call that ``rank`` has not entered."""

    rank: int
    call: CallRef
    waiting: int


@dataclass(frozen=True, slots=True)
class Unfinished:
    """All members have entered a call, and it does not end on ``waiters``."""

    call: CallRef
    waiters: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CircularWait:
    """``waiters`` wait in ``call`` for ``awaited``, which wait in another call (``opposite``, if it is the only one)."""

    call: CallRef
    waiters: tuple[int, ...]
    awaited: tuple[int, ...]
    opposite: CallRef | None = None


@dataclass(frozen=True, slots=True)
class CallVariant:
    """Form in which some members have entered a mismatched call.

    Attributes:
        op: operation.
        dtype: code of the element type, as in ``recording.records.DTYPES`` (from 1; 0 for none).
        shape: hash of the tensor's shape.
        ranks: members that called it so.
        elements: elements that one of them sends; 0 if none, or unknown.
    """

    op: Op
    dtype: int
    shape: int
    ranks: tuple[int, ...]
    elements: int = 0


@dataclass(frozen=True, slots=True)
class LongSteps:
    """A rank's own time per step exceeds that of its peers.

    Attributes:
        excess_ns: median excess.
        step_ns: median duration of a step.
        peers: number of other ranks that make the same calls.
        steps: number of steps compared.
        share: fraction of these steps in which the rank was slow, 0 to 1.
    """

    excess_ns: float
    step_ns: float
    peers: int
    steps: int
    share: float


@dataclass(frozen=True, slots=True)
class SlowLayers:
    """The layers of a rank take longer than those of earlier jobs.

    Attributes:
        took_s: seconds of a step.
        expected_s: seconds of a step in earlier jobs on such a device.
        others: median of ``took_s / expected_s`` of the other ranks; 0 if unknown.
    """

    took_s: float
    expected_s: float
    others: float


@dataclass(frozen=True, slots=True)
class SlowTransfers:
    """Transfers take ``factor`` times as long as the baseline."""

    direction: Direction
    factor: float
    baseline: Baseline


@dataclass(frozen=True, slots=True)
class CpuStarvation:
    """Fraction of time, 0 to 1, that a rank's main thread waits for a processor; and the median of the other ranks."""

    share: float
    others: float


@dataclass(frozen=True, slots=True)
class Exited:
    """A process ended on its own account."""

    rank: int
    status: ExitStatus | None


@dataclass(frozen=True, slots=True)
class DownMember:
    """A member of an unfinished call whose process is stopped or dead."""

    rank: int
    state: State
    status: ExitStatus | None


@dataclass(frozen=True, slots=True)
class SilentLinks:
    """Links ``(source, destination)`` on which no acknowledgement arrives."""

    links: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class NotBegun:
    """The launcher has started ``rank``, and it has not begun to record.

    Attributes:
        rank: global rank.
        pid: process number; 0 if unknown.
        host: host name.
    """

    rank: int
    pid: int
    host: str


@dataclass(frozen=True, slots=True)
class CallAlone:
    """``waiters`` wait in ``call`` for ranks that have ended in order, and never make it.

    Attributes:
        call: the call.
        waiters: ranks in it.
        ended: ranks that have ended.
    """

    call: CallRef
    waiters: tuple[int, ...]
    ended: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RotatingPauses:
    """Garbage collections at different steps on different ranks: every step waits for somebody.

    Attributes:
        lost_ns: mean time per step that collections at the same step would save.
        step_ns: mean duration of a step.
        steps: number of steps compared.
        collecting: number of these steps in which some rank collects.
    """

    lost_ns: float
    step_ns: float
    steps: int
    collecting: int


@dataclass(frozen=True, slots=True)
class LongStepsNowAndThen:
    """A rank is late in some steps, and the others are not.

    Attributes:
        excess_ns: median excess of its own time in these steps.
        lost_ns: mean loss per step.
        step_ns: median duration of a step.
        slow: number of these steps.
        steps: number of steps compared.
        every: distance between two of them in steps; 0 if it varies.
    """

    excess_ns: float
    lost_ns: float
    step_ns: float
    slow: int
    steps: int
    every: int


@dataclass(frozen=True, slots=True)
class EndsAlike:
    """Processes that have ended in the same way. The first such item of a verdict is the cause, the others follow from it.

    Attributes:
        ranks: their ranks.
        status: exit status; None if unknown.
        error: class of the exception; '' for none.
        text: its message and place, of the first of ``ranks``; '' for none.
        at_ns: time of the first of these ends.
        asked: whether somebody has ended them, such as the launcher after the end of another rank.
    """

    ranks: tuple[int, ...]
    status: ExitStatus | None
    error: str
    text: str
    at_ns: int
    asked: bool


@dataclass(frozen=True, slots=True)
class SlowerThanBefore:
    """Every rank takes longer per step than earlier in the job, with the same calls.

    Attributes:
        excess_ns: by how much the own time per step has grown, median over ranks and steps.
        step_ns: median duration of a step now.
        times: own time now, as a multiple of that before.
        steps: number of newest steps compared.
        before: first and last of the steps that they are compared with.
    """

    excess_ns: float
    step_ns: float
    times: float
    steps: int
    before: tuple[int, int]


Evidence = (
    EndsAlike | NotEntered | Unfinished | CircularWait | CallVariant | LongSteps | SlowLayers | SlowTransfers | CpuStarvation
    | Exited | DownMember | SilentLinks | NotBegun | CallAlone | RotatingPauses | LongStepsNowAndThen
    | SlowerThanBefore
)  # fmt: skip


# ---------------------------------------------------------------- what to look at


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
class CollectTogether:
    """Garbage collections cost time because they are not at the same step on all ranks, or because there are many."""

    ranks: tuple[int, ...]


Hint = (
    OffTrack | OtherOrder | SameSideFirst | OneCallMore | EndedEarly | LooksAtProcess | LooksAtNetwork | CollectTogether
    | Helps | AllSlower
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reach:
    """How a person reaches the job.

    Attributes:
        rings: folders of its rings, as arguments of ``unickpt`` commands; empty if unknown.
        steered: whether ``unickpt hosts`` takes its hosts out.
    """

    rings: tuple[str, ...] = ()
    steered: bool = False


@dataclass(frozen=True, slots=True)
class RankPlaces:
    """Where ranks are.

    Attributes:
        at: innermost frame of the user's own code, otherwise the innermost frame.
        ranks: ranks whose main thread is there.
        waiting: whether they only wait for the ranks at fault.
    """

    at: Frame
    ranks: tuple[int, ...]
    waiting: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """One finding.

    Attributes:
        syndrome: kind.
        ranks: global ranks at fault; of a mismatch, those that differ from the majority.
        since_ns: earliest time that shows it, in nanoseconds on the clock of the snapshot.
        group: communicator of the call in question; None if there is no call.
        op: operation of that call.
        seq: sequence number of that call; 0 if there is no call.
        bytes: size of the tensors that a waiting rank gives to that call; 0 if unknown.
        link: source and destination rank, if a single link is at fault.
        victims: number of ranks that wait because of it.
        confidence: 0 to 1.
        cause: activity of the ranks at fault; None if unknown.
        evidence: observations, the most telling one first.
        state: process state of the first rank at fault, where the fault is in the process.
        at: where that rank's main thread is: the innermost frame of the user's own code; None if unknown.
        waiting: some of the ranks that wait.
        places: where the ranks at fault and some of the waiting ones are.
        next: what to look at; None only for a verdict that is not on a job, as in tests.
        gone_on: ranks at fault that have got through the call in question: they are elsewhere now.
        hosts: hosts of the ranks at fault, each once, as the job names them.
        reach: how a person reaches the job.
    """

    syndrome: Syndrome
    ranks: tuple[int, ...]
    since_ns: int
    group: GroupInfo | None = None
    op: Op | None = None
    seq: int = 0
    bytes: int = 0
    link: tuple[int, int] | None = None
    victims: int = 0
    confidence: float = 1.0
    cause: Cause | None = None
    evidence: tuple[Evidence, ...] = ()
    state: State | None = None
    at: Frame | None = None
    waiting: tuple[int, ...] = ()
    places: tuple[RankPlaces, ...] = ()
    next: Hint | None = None
    gone_on: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    reach: Reach = Reach()

    @property
    def waits_at(self) -> Frame | None:
        """Where most of the waiting ranks are, in the user's own code if that is known; None if unknown."""
        found = [place for place in self.places if place.waiting]
        return max(found, key=lambda place: (place.at.own, len(place.ranks))).at if found else None

    @property
    def key(self) -> str:
        """Identifier of the finding: equal for verdicts of successive looks on the same fault."""
        what = [self.syndrome.value, self.ranks, self.group.name if self.group else "", self.link]
        return hashlib.blake2b(json.dumps(what).encode(), digest_size=8).hexdigest()

    def as_json(self) -> dict[str, Any]:
        """The verdict as JSON types; an item of ``evidence`` has its class name as ``kind``."""
        found: dict[str, Any] = _plain(self)
        found["evidence"] = [{"kind": type(each).__name__, **_plain(each)} for each in self.evidence]
        found["next"] = {"kind": type(self.next).__name__, **_plain(self.next)} if self.next is not None else None
        found["waits_at"] = _plain(self.waits_at)
        found["meaning"] = self.syndrome.meaning
        return found


def _plain(value: Any) -> Any:
    if isinstance(value, Op):
        return value.name.lower()
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value
