"""From findings to orders: a pure function. ``Row`` is the table of the policy; docs/guides/steering-policy.md has it.

Telling is not acting. A finding names a rank after seconds, and the rank may be rank 0 that evaluates alone, uploads, compiles
or saves for minutes. An order to take a host out therefore needs a deadline of its own, and a process that does not move.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from unickpt.base.options.steering import SteeringOptions
from unickpt.diagnosis.detectors.hardware import Weight
from unickpt.diagnosis.detectors.observations import (
    DownMember,
    Exited,
    LongSteps,
    LongStepsNowAndThen,
    RotatingPauses,
    SlowerThanBefore,
)
from unickpt.diagnosis.detectors.verdicts import Cause, Syndrome, Verdict
from unickpt.diagnosis.host.process_state import State
from unickpt.steering.state.membership import NEVER_S, JobPhase, Membership
from unickpt.steering.state.orders import Action, Order


class Fault(enum.Enum):
    """Kind of a finding, the most certain one first."""

    DEAD = "dead"
    WRONG = "wrong numbers"
    STOPPED = "stopped"
    HUNG = "hung"
    MISMATCH = "mismatch"
    DEADLOCK = "deadlock"
    DEAD_LINK = "dead link"
    NETWORK = "network"
    SLOW = "slow"
    SLOW_LINK = "slow link"


class Row(enum.Enum):
    """Rows of the policy. The name is the reason of an order; the value is what is done."""

    DEAD_OUT = "a rank is dead: its host is out"
    STOPPED_OUT = "a process is stopped: its host is out"
    HUNG_OUT = "a rank hangs by its own doing: its host is out"
    BROKEN_OUT = "hardware of a host has failed, and its rank is dead, hangs or is slow: it is out until a person admits it"
    WITNESS_OUT = "a host has wrong numbers, as two others agree: it is out until a person admits it"
    WITNESS = "numbers differ, and nobody can say whose are wrong: restart in place"
    AT_FAULT_BUT_NEEDED = "without the host too few hosts are left: restart in place"
    COMMON = "more than half of the hosts are blamed: restart in place, because the cause is none of them"
    PROGRAM = "mismatched calls or a deadlock: restart in place"
    NETWORK = "a call does not end, and no rank or link is at fault: restart in place"
    LINK_CHECK = "a link is slow or dead: check both ends before one is blamed"
    LINK_OUT = "a link is dead and the check blames one end: its host is out"
    SLOW_OUT = "a host is slow, eviction is allowed, and it pays: it is out"
    NO_PROGRESS = "restarts have not helped: stop, with the reason"


@dataclass(frozen=True, slots=True)
class Finding:
    """What the policy must know about a verdict.

    Attributes:
        fault: kind.
        hosts: hosts of the ranks at fault; of a link its two ends.
        age_s: seconds for which it has been so.
        still_s: seconds in which nothing has moved in the processes of the ranks at fault (``movement.still_s``); 0 if unknown.
        same_place_s: seconds in which their main threads were in the same functions (``movement.same_place_s``); 0 if unknown.
        at_work: whether the ranks save a checkpoint, or wait for data, which may take any time; or collect garbage, or are late
            in some steps only, which is the program's and no host's.
        gain: fraction of a step's time that the job would gain without the hosts, 0 to 1.
        blamed: of a link, the end that a pairwise check has blamed; '' if it has not been checked.
        ranks: ranks at fault.
        text: the finding in words, for the log.
        hardware: what the hardware says about the hosts.
    """

    fault: Fault
    hosts: tuple[str, ...]
    age_s: float
    still_s: float = 0.0
    same_place_s: float = 0.0
    at_work: bool = False
    gain: float = 0.0
    blamed: str = ""
    text: str = ""
    ranks: tuple[int, ...] = ()
    hardware: Weight = Weight.UNKNOWN


@dataclass(frozen=True, slots=True)
class History:
    """Past of the job.

    Attributes:
        longest_pause_s: longest time that ranks have waited for one another and then gone on.
        fruitless: rounds in a row in which the job has not passed the step that it had reached before.
        evictions: how often each host has been taken out.
        checked: links, as sorted pairs of hosts, that are being checked or have been.
    """

    longest_pause_s: float = 0.0
    fruitless: int = 0
    evictions: Mapping[str, int] = field(default_factory=dict)
    checked: frozenset[tuple[str, ...]] = frozenset()


def finding_of(
    verdict: Verdict, hosts: Mapping[int, str], now_ns: int, *, still: float = 0.0, same_place: float = 0.0, blamed: str = "",
    text: str = "", predicted: float | None = None, hardware: Weight = Weight.UNKNOWN,
) -> Finding:  # fmt: skip
    """Return what the policy must know about a verdict.

    Args:
        verdict: finding of the detectors.
        hosts: host of every rank.
        now_ns: time of the snapshot, in nanoseconds on its clock.
        still: seconds without movement of the ranks at fault, the least of them.
        same_place: seconds in which they were in the same functions, the least of them.
        blamed: result of the check of a link.
        text: the verdict in words.
        hardware: what the hardware says about the hosts.
        predicted: gain that a replay of the records predicts; None: the excess of the ranks' steps is the gain.
    """
    ranks = verdict.link if verdict.link is not None else verdict.ranks
    found = tuple(dict.fromkeys(hosts[rank] for rank in ranks if rank in hosts))
    gain = predicted
    if gain is None:
        gain = max((item.excess_ns / item.step_ns for item in verdict.evidence if isinstance(item, LongSteps)), default=0.0)
    return Finding(
        fault=_fault(verdict), hosts=found, age_s=max(0.0, (now_ns - verdict.since_ns) / 1e9), still_s=still,
        same_place_s=same_place, ranks=verdict.ranks if verdict.link is None else (),
        at_work=_at_work(verdict), gain=min(gain, 1.0), blamed=blamed, text=text, hardware=hardware,
    )  # fmt: skip


def _at_work(verdict: Verdict) -> bool:
    of_program = any(isinstance(item, (LongStepsNowAndThen, RotatingPauses, SlowerThanBefore)) for item in verdict.evidence)
    return of_program or verdict.cause in (Cause.CHECKPOINT, Cause.DATA, Cause.GARBAGE)


def _fault(verdict: Verdict) -> Fault:
    if verdict.syndrome is Syndrome.MISMATCH:
        return Fault.MISMATCH
    if verdict.syndrome is Syndrome.DEADLOCK:
        return Fault.DEADLOCK
    if verdict.syndrome in (Syndrome.COMMUNICATION_SLOW, Syndrome.NON_COMMUNICATION_SLOW):
        return Fault.SLOW if verdict.link is None else Fault.SLOW_LINK
    down = [item.state for item in verdict.evidence if isinstance(item, DownMember) and item.rank in verdict.ranks]
    if State.DEAD in (verdict.state, *down) or any(
        isinstance(item, Exited) and item.rank in verdict.ranks for item in verdict.evidence
    ):
        return Fault.DEAD
    if State.STOPPED in (verdict.state, *down):
        return Fault.STOPPED
    if verdict.syndrome is Syndrome.NON_COMMUNICATION_HANG:
        return Fault.HUNG
    return Fault.NETWORK if verdict.link is None else Fault.DEAD_LINK


def decide(findings: Iterable[Finding], history: History, state: Membership, options: SteeringOptions) -> list[Order]:
    """Return what is to be done now. At most one order changes the membership: its effect must be seen before the next one.

    Args:
        findings: what is wrong with the running round.
        history: past of the job.
        state: the membership.
        options: thresholds.

    Returns:
        Orders whose reason is the name of a row and whose evidence is the text of the finding. Empty while no round runs.
    """
    if state.closed or state.phase is not JobPhase.RUNNING or state.round is None:
        return []
    members = {name for name, _ in state.round.members}
    order = list(Fault)
    orders: list[Order] = []
    for finding in sorted(findings, key=lambda each: order.index(each.fault)):
        if members.issuperset(finding.hosts):
            orders += _orders(finding, history, state, options)
            if orders and orders[-1].action is not Action.CHECK:
                break
    return orders


def _orders(finding: Finding, history: History, state: Membership, options: SteeringOptions) -> list[Order]:
    fault, age_s = finding.fault, finding.age_s
    broken, factor = finding.hardware is Weight.PRESENT, _factor(finding, options)
    pause_s = 0.0 if broken else options.pause_factor * history.longest_pause_s
    hangs = age_s >= max(options.hang_seconds * factor, pause_s)
    if broken and fault in (Fault.HUNG, Fault.NETWORK) and hangs and finding.hosts:
        return _out(Row.BROKEN_OUT, finding, finding.hosts, history, state, options)
    if broken and fault is Fault.DEAD and age_s >= options.dead_seconds * factor:
        return _out(Row.BROKEN_OUT, finding, finding.hosts, history, state, options)
    if fault is Fault.DEAD and age_s >= options.dead_seconds:
        return _out(Row.DEAD_OUT, finding, finding.hosts, history, state, options)
    if fault is Fault.WRONG:
        if finding.hosts:
            return _out(Row.WITNESS_OUT, finding, finding.hosts, history, state, options)
        return _restart(Row.WITNESS, finding, history, options)
    if fault is Fault.STOPPED and age_s >= options.stopped_seconds:
        return _out(Row.STOPPED_OUT, finding, finding.hosts, history, state, options)
    if fault is Fault.HUNG and hangs and _stands(finding, options) and not finding.at_work:
        return _out(Row.HUNG_OUT, finding, finding.hosts, history, state, options)
    if fault in (Fault.MISMATCH, Fault.DEADLOCK):
        return _restart(Row.PROGRAM, finding, history, options)
    if fault is Fault.NETWORK and hangs:
        return _restart(Row.NETWORK, finding, history, options)
    if fault in (Fault.DEAD_LINK, Fault.SLOW_LINK):
        return _link(finding, hangs, history, state, options)
    return _slow(finding, finding.hosts, history, state, options) if fault is Fault.SLOW else []


def _stands(finding: Finding, options: SteeringOptions) -> bool:
    loop_s = options.loop_seconds * max(_factor(finding, options), 1.0)
    return finding.still_s >= options.still_seconds or finding.same_place_s >= loop_s


def _factor(finding: Finding, options: SteeringOptions) -> float:
    """Return by what the deadlines of a finding are multiplied: less with broken hardware, more without any sign of it."""
    return {Weight.PRESENT: options.broken_factor, Weight.ABSENT: options.sound_factor}.get(finding.hardware, 1.0)


def _link(finding: Finding, hangs: bool, history: History, state: Membership, options: SteeringOptions) -> list[Order]:
    ends = tuple(sorted(finding.hosts))
    if len(ends) == 1:  # a link within a host
        finding = replace(finding, blamed=ends[0])
        if finding.fault is Fault.DEAD_LINK and not hangs:
            return []
    if not finding.blamed:
        if len(ends) == 2 and ends not in history.checked:
            return [Order(Action.CHECK, ends, Row.LINK_CHECK.name, finding.text)]
        return _restart(Row.NETWORK, finding, history, options) if finding.fault is Fault.DEAD_LINK and hangs else []
    if finding.fault is Fault.DEAD_LINK:
        return _out(Row.LINK_OUT, finding, (finding.blamed,), history, state, options)
    return _slow(finding, (finding.blamed,), history, state, options)


def _slow(
    finding: Finding, hosts: tuple[str, ...], history: History, state: Membership, options: SteeringOptions
) -> list[Order]:
    lasts = finding.age_s >= options.slow_seconds * _factor(finding, options)
    if options.slow != "evict" or not lasts or finding.at_work or state.round is None:
        return []
    now, later = len(state.round.members), state.limits.size(len(_usable(state) - set(hosts)))
    pays = later == now or finding.gain > (now - later) / now
    row = Row.BROKEN_OUT if finding.hardware is Weight.PRESENT else Row.SLOW_OUT
    return _out(row, finding, hosts, history, state, options) if later and pays else []


def _usable(state: Membership) -> set[str]:
    return {name for name in state.hosts if name not in state.parked}


def _out(
    row: Row, finding: Finding, hosts: tuple[str, ...], history: History, state: Membership, options: SteeringOptions
) -> list[Order]:
    """Take hosts out, unless too many are blamed or too few would be left."""
    members = len(state.round.members) if state.round is not None else 0
    if not hosts:
        return []
    if len(hosts) > max(1, members // 2) and row is not Row.DEAD_OUT:
        return _restart(Row.COMMON, finding, history, options)
    if not state.limits.size(len(_usable(state) - set(hosts))):
        return _restart(Row.AT_FAULT_BUT_NEEDED, finding, history, options)
    times = max(history.evictions.get(host, 0) for host in hosts)
    stays = finding.hardware is Weight.PRESENT or row is Row.WITNESS_OUT
    for_s = NEVER_S if stays else state.limits.out_for_s(times)
    return [Order(Action.PARK, hosts, row.name, finding.text, for_s, _to_kill(finding))]


def _restart(row: Row, finding: Finding, history: History, options: SteeringOptions) -> list[Order]:
    if history.fruitless >= options.retries:
        why = f"{history.fruitless} restarts without progress; {row.name}: {finding.text}"
        return [Order(Action.STOP, (), Row.NO_PROGRESS.name, why)]
    return [Order(Action.RESTART, (), row.name, finding.text, ranks=_to_kill(finding))]


def _to_kill(finding: Finding) -> tuple[int, ...]:
    """Return ranks that may not react to SIGTERM. All others may use the time that torchrun gives them to finish a save."""
    hangs = finding.fault in (Fault.STOPPED, Fault.HUNG)
    return finding.ranks if hangs or (finding.fault is Fault.NETWORK and finding.hardware is Weight.PRESENT) else ()
