"""Findings of the detectors, as values. ``unickpt.diagnosis.reports.verdict_text`` renders them as text."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from unickpt.diagnosis.detectors.hints import Hint
from unickpt.diagnosis.detectors.observations import Evidence, SlowTransfers
from unickpt.diagnosis.hardware.events import HostEvent
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


# ---------------------------------------------------------------- what to look at


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
        hardware: what has happened on these hosts at that time, what counts most first.
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
    hardware: tuple[HostEvent, ...] = ()

    @property
    def waits_at(self) -> Frame | None:
        """Where most of the waiting ranks are, in the user's own code if that is known; None if unknown."""
        found = [place for place in self.places if place.waiting]
        return max(found, key=lambda place: (place.at.own, len(place.ranks))).at if found else None

    @property
    def links(self) -> tuple[tuple[int, int], ...]:
        """All links at fault, the worst first; empty if the fault is not in links."""
        others = next((each.links for each in self.evidence if isinstance(each, SlowTransfers)), ())
        return others or (() if self.link is None else (self.link,))

    @property
    def key(self) -> str:
        """Identifier of the finding: equal for verdicts of successive looks on the same fault.

        Of links from one host to another one some may be slow in one look, and others in the next one.
        """
        hosts = next((each.hosts for each in self.evidence if isinstance(each, SlowTransfers) and each.hosts), None)
        what: list[Any] = [self.syndrome.value, self.ranks, self.group.name if self.group else "", self.link]
        if hosts is not None:
            what = [self.syndrome.value, hosts]
        return hashlib.blake2b(json.dumps(what).encode(), digest_size=8).hexdigest()

    def as_json(self) -> dict[str, Any]:
        """The verdict as JSON types; an item of ``evidence`` has its class name as ``kind``."""
        found: dict[str, Any] = _plain(self)
        found["evidence"] = [{"kind": type(each).__name__, **_plain(each)} for each in self.evidence]
        found["next"] = {"kind": type(self.next).__name__, **_plain(self.next)} if self.next is not None else None
        found["waits_at"] = _plain(self.waits_at)
        found["hardware"] = [{**_plain(each), "bearing": each.bearing.value} for each in self.hardware]
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
