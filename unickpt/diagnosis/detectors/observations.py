"""What detectors have seen: the items of ``Verdict.evidence``. Hints refer to the same calls."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from unickpt.diagnosis.host.process_exits import ExitStatus
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.recording.records import Op
from unickpt.diagnosis.snapshot.snapshot import GroupInfo


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
    """Transfers take ``factor`` times as long as the baseline, the slowest ones.

    Attributes:
        hosts: of source and destination of a link; empty within a host, or if they are not known.
        links: all slow links from the first of these hosts to the second one, as source and destination, the slowest first.
    """

    direction: Direction
    factor: float
    baseline: Baseline
    hosts: tuple[str, ...] = ()
    links: tuple[tuple[int, int], ...] = ()


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
