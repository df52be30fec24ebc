"""Verdicts as text: for each a machine-readable line and a sentence.

Text is made here and nowhere else. Names of groups and hosts come from rings and from other hosts and may hold anything;
``unickpt.base.logs.printable`` escapes the sentence where it is printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unickpt.diagnosis.detectors.device_waits import infer_device_waits
from unickpt.diagnosis.detectors.observations import (
    Baseline,
    CallAlone,
    CallVariant,
    CircularWait,
    CpuStarvation,
    Direction,
    DownMember,
    EndsAlike,
    Evidence,
    Exited,
    LongSteps,
    LongStepsNowAndThen,
    NotBegun,
    NotEntered,
    RotatingPauses,
    SilentLinks,
    SlowerThanBefore,
    SlowLayers,
    SlowTransfers,
    Unfinished,
)
from unickpt.diagnosis.detectors.places import ranks_at
from unickpt.diagnosis.detectors.slowness import starved_ranks
from unickpt.diagnosis.detectors.verdicts import Cause, RankPlaces, Syndrome, Verdict
from unickpt.diagnosis.detectors.waits import PendingCall, calls_waited_in
from unickpt.diagnosis.host.process_exits import ExitStatus
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.recording.launched import AbsentRank
from unickpt.diagnosis.recording.records import DTYPES, Phase
from unickpt.diagnosis.reports.hardware_text import event_text, timed_text
from unickpt.diagnosis.reports.next_text import command_of, next_text
from unickpt.diagnosis.reports.verdict_line import VerdictLine, exit_text
from unickpt.diagnosis.reports.wording import MOST_NAMED, call_text, clock_time, counted, has_or_have, is_or_are
from unickpt.diagnosis.snapshot.snapshot import Snapshot

SHORTEST_S = 2.0  # shorter waits are usual


@dataclass(frozen=True, slots=True)
class VerdictText:
    """One verdict as text.

    Attributes:
        line: machine-readable line (``verdict_line``).
        sentence: sentence for a person, without a final full stop.
        next: sentence on what to look at, which ends with the command; '' if that is not known.
        command: the command alone; '' if there is none.
        since: time of the first sign in ISO 8601, with the offset of the zone; '' if unknown.
    """

    line: str
    sentence: str
    next: str = ""
    command: str = ""
    since: str = ""

    def as_json(self) -> dict[str, str]:
        """The texts as members of a verdict in JSON."""
        return {
            "line": self.line, "sentence": self.sentence, "next_text": self.next, "command": self.command, "since": self.since,
        }  # fmt: skip


def render(verdict: Verdict, snapshot: Snapshot) -> VerdictText:
    """Render one verdict on a snapshot."""
    sentence = "; ".join([_found(verdict, snapshot), *_places(verdict), *_hardware(verdict)])
    line = VerdictLine.of(verdict)
    return VerdictText(str(line), sentence, next_text(verdict), command_of(verdict), line.since)


def render_all(verdicts: Sequence[Verdict], snapshot: Snapshot) -> list[VerdictText]:
    """Render the verdicts on a snapshot."""
    return [render(verdict, snapshot) for verdict in verdicts]


def as_json(verdicts: Sequence[Verdict], texts: Sequence[VerdictText]) -> list[dict[str, Any]]:
    """Return verdicts with their texts as JSON types."""
    return [one_as_json(verdict, text) for verdict, text in zip(verdicts, texts, strict=True)]


def one_as_json(verdict: Verdict, text: VerdictText) -> dict[str, Any]:
    """Return one verdict with its texts as JSON types."""
    found = verdict.as_json()
    found["hardware"] = [
        {**fields, "text": event_text(event)} for fields, event in zip(found["hardware"], verdict.hardware, strict=True)
    ]
    return {**found, **text.as_json()}


def _hardware(verdict: Verdict) -> list[str]:
    """Say what has happened to the hardware of the hosts at fault."""
    if not verdict.hardware:
        return []
    where = " and ".join(verdict.hosts[:2]) + (" and others" if len(verdict.hosts) > 2 else "")
    return [f"on {where}: {', '.join(map(timed_text, verdict.hardware))}"]


def render_waits(snapshot: Snapshot) -> list[str]:
    """Return what is no verdict yet, for a person who asks.

    That is a line for each call in which ranks have waited for some seconds, and one on ranks that have not begun. It says
    which of the awaited ranks do what may take long, and where the ranks are if the snapshot has stacks.
    """
    lines = []
    for call in pending(snapshot):
        waited_s = (snapshot.now_ns - call.since_ns) / 1e9
        missing = f" for {counted(call.missing)}" if call.missing else ""
        what = f"{counted(call.waiters, 'wait')} in {call_text(call.ref(dict(enumerate(snapshot.groups))))}{missing}"
        there = [*ranks_at(call.waiters, snapshot, waiting=True), *ranks_at(call.missing, snapshot, waiting=False)]
        lines.append("; ".join([f"{what}, so far {waited_s:.0f} s", *_long_phases(call, snapshot), *map(_place, there)]))
    for rank, absent in sorted(snapshot.absent.items()):
        process = _absent(absent) if absent.pid else f"on {absent.host}"
        lines.append(f"rank {rank} has not begun to record; {process}")
    return lines[:MOST_NAMED]


_LONG = {int(Phase.EVALUATION): "evaluates", int(Phase.CHECKPOINT): "saves", int(Phase.DATA): "waits for data"}


def _long_phases(call: PendingCall, snapshot: Snapshot) -> list[str]:
    """Say of ranks that others wait for what they do, where it may take long."""
    known = [(rank, one) for rank in call.missing if (one := snapshot.ranks.get(rank)) is not None and one.phase in _LONG]
    return [f"rank {rank} on {one.host} {_LONG[one.phase]}, in step {one.step}" for rank, one in known[:MOST_NAMED]]


def pending(snapshot: Snapshot) -> list[PendingCall]:
    """Return the calls in which ranks have waited for some seconds."""
    members = {number: group.members() for number, group in enumerate(snapshot.groups)}
    gone = frozenset(rank for rank, one in snapshot.ranks.items() if one.state is State.DEAD)
    on_device = {number for number, group in enumerate(snapshot.groups) if group.on_device}
    rows = infer_device_waits(snapshot.rows, on_device, members, all_stand=False)
    found = calls_waited_in(rows, members, gone)
    return [call for call in found if snapshot.now_ns - call.since_ns >= SHORTEST_S * 1e9]


def _places(verdict: Verdict) -> list[str]:
    """Say where the ranks are. Of one process the whole stack is said elsewhere."""
    if verdict.evidence and isinstance(verdict.evidence[0], RotatingPauses | SlowerThanBefore):
        return []  # no place explains what all ranks lose
    whole = verdict.syndrome in (Syndrome.NON_COMMUNICATION_HANG, Syndrome.NON_COMMUNICATION_SLOW)
    shown = [place for place in verdict.places if place.waiting or not whole or verdict.ranks[0] not in place.ranks]
    return [_place(each) for each in shown]


def _place(each: RankPlaces) -> str:
    return f"{counted(each.ranks)} {is_or_are(each.ranks)} at {each.at.file}:{each.at.line} ({each.at.function})"


def _found(verdict: Verdict, snapshot: Snapshot) -> str:
    if verdict.syndrome is Syndrome.FAILED:
        return _failed(verdict)
    facts = _evidence(verdict)
    first = _ended_first(verdict, snapshot) or (facts[0] if facts else verdict.syndrome.value)
    if verdict.syndrome is Syndrome.COMMUNICATION_SLOW:
        return f"{verdict.syndrome.value}: {first}, since {clock_time(verdict.since_ns)}"
    since = f" since {clock_time(verdict.since_ns)}"
    if verdict.syndrome is Syndrome.NON_COMMUNICATION_SLOW:
        of_job = isinstance(verdict.evidence[0], RotatingPauses | SlowerThanBefore) if verdict.evidence else False
        about = [] if of_job else [_process(verdict.ranks[0], snapshot)]
        return "; ".join([f"{first}{since}", *facts[1:], *about])
    where = ", in a checkpoint" if verdict.cause is Cause.CHECKPOINT else ""
    waiting = f"{verdict.victims} {'rank waits' if verdict.victims == 1 else 'ranks wait'}"
    if verdict.syndrome is Syndrome.NON_COMMUNICATION_HANG:
        there = [each.waiting for each in verdict.evidence[:1] if isinstance(each, NotEntered)]
        total = "" if there == [verdict.victims] else f", {waiting} in total"
        return f"{first}{since}{where}{total}; {_process(verdict.ranks[0], snapshot)}"
    named = f"{verdict.syndrome.value} ({verdict.syndrome.meaning})"
    waiting = f", {waiting}" if verdict.victims else ""
    return "; ".join([f"{named}: {first}{since}{where}{waiting}", *facts[1:]])


def _ended_first(verdict: Verdict, snapshot: Snapshot) -> str:
    """Say that a rank has ended, which may have entered the call of the others; '' if it lives."""
    missing = verdict.evidence[0] if verdict.evidence else None
    if not isinstance(missing, NotEntered) or missing.rank not in snapshot.ranks:
        return ""
    one, wait = snapshot.ranks[missing.rank], "waits" if missing.waiting == 1 else "wait"
    if one.state is not State.DEAD:
        return ""
    how = f" ({exit_text(one.exit)})" if one.exit is not None else ""
    return f"rank {missing.rank} has ended{how}; {missing.waiting} {wait} for it in {call_text(missing.call)}"


def _failed(verdict: Verdict) -> str:
    """Say how a job ended: the cause, and what followed from it."""
    first, *others = [each for each in verdict.evidence if isinstance(each, EndsAlike)]
    followed = "; ".join(f"{counted(each.ranks)}: {_end(each)}" for each in others[:MOST_NAMED])
    if not verdict.ranks:
        all_of_them = "; ".join(filter(None, [f"{counted(first.ranks)}: {_end(first)}", followed]))
        return f"the job has failed, and no rank shows a cause of its own: {all_of_them}"
    where = f" on {', '.join(verdict.hosts[:MOST_NAMED])}" if verdict.hosts else ""
    order = "first " if others else ""
    cause = f"the job has failed: {order}{counted(first.ranks)}{where} at {clock_time(first.at_ns)}: {_end(first)}"
    return f"{cause}; as a consequence {followed}" if followed else cause


def _end(each: EndsAlike) -> str:
    how = exit_text(each.status)
    by = ", asked to end by the launcher or a person" if each.asked else ""
    return (f"{each.text} ({how})" if each.text and how else each.text or how or "unknown") + by


# ---------------------------------------------------------------- evidence


def _evidence(verdict: Verdict) -> list[str]:
    """Return clauses, of which the first stands before the time."""
    exited = [each for each in verdict.evidence if isinstance(each, Exited)]
    if exited:
        named = ", ".join(f"rank {each.rank} has ended ({exit_text(each.status)})" for each in exited[:MOST_NAMED])
        return [named + (f" and {len(exited) - MOST_NAMED} more" if len(exited) > MOST_NAMED else "")]
    variants = [each for each in verdict.evidence if isinstance(each, CallVariant)]
    if variants:
        return [f"call {verdict.seq} is " + ", and ".join(map(_variant, variants))]
    down = [each for each in verdict.evidence if isinstance(each, DownMember)]
    rest = [_clause(each, verdict) for each in verdict.evidence if not isinstance(each, DownMember)]
    if down:
        states = "; ".join(f"rank {each.rank} is {_condition(each.state, each.status)}" for each in down)
        return ["; ".join([states, *rest[:1]]), *rest[1:]]
    return rest


def _clause(item: Evidence, verdict: Verdict) -> str:
    match item:
        case NotEntered(rank, call, waiting):
            return f"rank {rank} has not entered {call_text(call)}; {waiting} {'waits' if waiting == 1 else 'wait'} there"
        case Unfinished(call, waiters):
            return f"all members have entered {call_text(call)}, and it does not end on {counted(waiters)}"
        case CircularWait(call, waiters, awaited, opposite):
            if any(isinstance(each, CircularWait) and each.call == opposite for each in verdict.evidence):
                opposite = None  # it is said by itself
            back = f"; the other way round: {call_text(opposite)}" if opposite is not None else ""
            return f"{counted(waiters, 'wait')} in {call_text(call)} for {counted(awaited)}{back}"
        case LongSteps(excess_ns, step_ns, peers, steps, share):
            return (
                f"rank {verdict.ranks[0]} takes {excess_ns / 1e6:.1f} ms longer than the {peers} that make the same calls, in "
                f"{share:.0%} of {steps} steps of {step_ns / 1e6:.0f} ms; cause: {_cause(verdict)}"
            )
        case SlowLayers(took_s, expected_s, others):
            rest = f"; those of the other ranks take {others:.1f} times as long" if others else ""
            cause = f"; cause: {_cause(verdict)}" if item is verdict.evidence[0] else ""
            return (
                f"the layers of rank {verdict.ranks[0]} take {took_s * 1e3:.1f} ms of each step, {took_s / expected_s:.1f} "
                f"times as long as in earlier jobs on such a device{rest}{cause}"
            )
        case CpuStarvation(share, others):
            return (
                f"rank {verdict.ranks[0]} waits for a processor {share:.0%} of the time, the others {others:.0%}: another "
                f"process takes it; cause: {_cause(verdict)}"
            )
        case SlowTransfers(direction, factor, baseline, hosts, links):
            than = "as on other links" if baseline is Baseline.OTHER_LINKS else "per byte as before"
            than = f"{factor:.1f} times as long {than}"
            if direction is not Direction.LINK or verdict.link is None:
                return f"all that rank {verdict.ranks[0]} {direction.value} takes up to {than}"
            link = f"from rank {verdict.link[0]} to rank {verdict.link[1]}"
            if len(links) > 1:
                return f"{len(links)} links from {hosts[0]} to {hosts[1]}, such as {link}, take up to {than}"
            return f"{link} takes {than}"
        case SilentLinks(links):
            named = ", ".join(f"from rank {there} to rank {here}" for here, there in links[:4])
            return f"no acknowledgement arrives {named}" + (f" and on {len(links) - 4} more links" if len(links) > 4 else "")
        case NotBegun(rank, pid, host):
            return f"rank {rank} has not begun to record (process {pid or 'unknown'} on {host})"
        case CallAlone(call, waiters, ended):
            whom = "it" if len(ended) == 1 else "them"
            return (
                f"{counted(ended)} {has_or_have(ended)} ended, and {counted(waiters, 'wait')} for {whom} in {call_text(call)}"
            )
        case RotatingPauses(lost_ns, step_ns, steps, collecting):
            return (
                f"{counted(verdict.ranks, 'collect')} garbage at different steps, in {collecting} of {steps} steps: every rank "
                f"waits for each of them, which costs {lost_ns / 1e6:.1f} ms of each step of {step_ns / 1e6:.0f} ms"
            )
        case LongStepsNowAndThen(excess_ns, lost_ns, step_ns, slow, steps, every):
            often = f"every {every} steps" if every else "now and then"
            return (
                f"{counted(verdict.ranks, 'take')} {excess_ns / 1e6:.0f} ms longer than the others {often}, in {slow} of "
                f"{steps} steps; that costs {lost_ns / 1e6:.1f} ms of each step of {step_ns / 1e6:.0f} ms on average; cause: "
                f"{_cause(verdict)}"
            )
        case SlowerThanBefore(excess_ns, step_ns, times, steps, before):
            return (
                f"every rank takes {excess_ns / 1e6:.0f} ms longer in each of the newest {steps} steps of "
                f"{step_ns / 1e6:.0f} ms than in steps {before[0]} to {before[1]}, {times:.1f} times its own time, with the "
                f"same calls; cause: {_cause(verdict)}"
            )
        case _:
            return ""


def _cause(verdict: Verdict) -> str:
    return verdict.cause.value if verdict.cause is not None else "unknown"


def _variant(item: CallVariant) -> str:
    if not item.elements and not item.dtype and not item.shape:
        return f"{item.op.name.lower()} on {counted(item.ranks)}"
    dtype = DTYPES[item.dtype - 1] if 0 < item.dtype <= len(DTYPES) else "no type"
    elements = f"{item.elements:,} elements, " if item.elements else ""
    return f"{item.op.name.lower()} ({elements}{dtype}, shape #{item.shape:08x}) on {counted(item.ranks)}"


# ---------------------------------------------------------------- processes


def _condition(state: State, status: ExitStatus | None) -> str:
    return f"{state.value} ({exit_text(status)})" if status is not None else state.value


def _process(rank: int, snapshot: Snapshot) -> str:
    """Describe what the process of a rank does."""
    one = snapshot.ranks.get(rank)
    if one is None:
        absent = snapshot.absent.get(rank)
        return _absent(absent) if absent is not None and absent.pid else f"nothing is known of rank {rank}"
    place = " ".join(f"{axis} {at}" for axis, at in one.coordinates)
    where = f" ({place})" if place else ""
    condition = _condition(one.state, one.exit)
    parts = [f"process {one.pid} on {one.host}{where} is {condition}, in step {one.step}{_phase(one.phase)}"]
    if rank in starved_ranks(snapshot):
        parts[0] += f", and has waited for a processor {one.cpu_wait:.0%} of its time"
    if one.failure is not None:
        parts.append(f"it has raised {one.failure.text}")
    if one.last is None:
        parts.append("no call of it has ended")
    else:
        call = f"{one.last.op.name.lower()} #{one.last.seq} of its {one.last.label} group"
        parts.append(f"last ended: {call}, {(snapshot.now_ns - one.last.end_ns) / 1e9:.1f} s ago")
    if one.stack:
        frames = " < ".join(f"{frame.function} ({frame.file}:{frame.line})" for frame in one.stack)
        parts.append(f"its main thread {'was' if one.state is State.DEAD else 'is'} in {frames}")
    return "; ".join(parts)


def _absent(absent: AbsentRank) -> str:
    return f"process {absent.pid} on {absent.host} is {absent.state.value}"


def _phase(phase: int) -> str:
    """The phase in parentheses; '' if it is unknown."""
    try:
        known = Phase(phase)
    except ValueError:  # rings are not trusted
        return ""
    if known is Phase.UNKNOWN:
        return ""
    return " (waiting for data)" if known is Phase.DATA else f" ({known.name.lower()})"
