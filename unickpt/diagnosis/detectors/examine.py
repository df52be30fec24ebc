"""Run all detectors on a snapshot of a job."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from unickpt.diagnosis.detectors.device_waits import infer_device_waits
from unickpt.diagnosis.detectors.ended import calls_of_ended, ends_now
from unickpt.diagnosis.detectors.failed_jobs import failed_job
from unickpt.diagnosis.detectors.hangs import deadline_s, hangs
from unickpt.diagnosis.detectors.hardware import hardware_hint, narrowed, with_hardware
from unickpt.diagnosis.detectors.mismatches import mismatches
from unickpt.diagnosis.detectors.next_steps import hint_of
from unickpt.diagnosis.detectors.observations import CallAlone, CallVariant, DownMember, Exited, NotBegun, SilentLinks
from unickpt.diagnosis.detectors.places import SLOW, gone_on, hosts_of, waiting_ranks, with_places
from unickpt.diagnosis.detectors.slowness import slowness
from unickpt.diagnosis.detectors.tcp_links import LinkHistory, Links, links_of, stuck_links
from unickpt.diagnosis.detectors.verdicts import Cause, Reach, Syndrome, Verdict
from unickpt.diagnosis.detectors.waits import Groups
from unickpt.diagnosis.host.process_exits import TOGETHER_S, ExitStatus
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.recording.records import ITEMSIZES, Phase
from unickpt.diagnosis.snapshot.progress import PROGRESS, ProgressTable
from unickpt.diagnosis.snapshot.snapshot import Calls, Snapshot

STANDING = 3.0  # deadlines without any call after which the network is at fault
_LONG = (Phase.CHECKPOINT, Phase.EVALUATION, Phase.DATA)
WRITING_S = 600.0  # that others may wait for a rank that saves or evaluates, or loads weights before its first call

TOGETHER_NS = int(TOGETHER_S * 1e9)
_UNKNOWN = Reach()
YOUNG_NS = 600_000_000  # age of a call that members on other hosts may have entered since; less than between two last looks
AT_ONCE_NS = 5_000_000  # between ends of processes that are independent of each other


@dataclass(frozen=True, slots=True)
class Examination:
    """Result of a look at a job.

    Attributes:
        verdicts: findings.
        deadline_s: seconds that a call was allowed to take.
        end: how the job has ended, if it has, and not in order.
    """

    verdicts: list[Verdict]
    deadline_s: float
    end: Sequence[Verdict] = ()

    def with_end(self) -> Examination:
        """Return the same with the verdict on the end of the job as the last one."""
        return dataclasses.replace(self, verdicts=[*self.verdicts, *self.end], end=())


def examine(
    snapshot: Snapshot,
    *,
    after_s: float | None = None,
    usual: LinkHistory | None = None,
    reach: Reach = _UNKNOWN,
    ends: bool = False,
) -> Examination:
    """Find what is wrong with a job at the time of a snapshot.

    Args:
        snapshot: all known ranks of the job.
        after_s: seconds that a call may take; default: derived from the job's own calls and steps.
        usual: past of the job's links, if the caller has watched the job from its beginning.
        reach: how a person reaches the job.
        ends: whether the launcher ends the job, because ranks have failed.
    """
    if len(snapshot.steps):  # others have made steps with them, so these ranks are not timed
        snapshot = dataclasses.replace(snapshot, absent={})
    limit_s = deadline_s(snapshot.steps, [snapshot.longest_wait_ns] * len(snapshot.ranks)) if after_s is None else after_s
    links = links_of(snapshot.windows)
    slow = slowness(snapshot, links, usual)  # in a hanging job, too: the history of the links goes on
    verdicts = _hangs(snapshot, links, limit_s, patient=after_s is None) or slow
    explained = any(isinstance(item, CallAlone) for verdict in verdicts for item in verdict.evidence)
    end = [
        _complete(verdict, snapshot, reach)
        for verdict in failed_job(snapshot, ends=ends)
        if verdict.ranks or not explained  # that a call for ended ranks fails is no news
    ]
    return Examination([_complete(verdict, snapshot, reach) for verdict in verdicts], limit_s, end)


def _complete(verdict: Verdict, snapshot: Snapshot, reach: Reach) -> Verdict:
    verdict = dataclasses.replace(_with_cause(verdict, snapshot), hosts=hosts_of(verdict, snapshot), reach=reach)
    verdict = narrowed(verdict, snapshot)
    waiting = waiting_ranks(verdict, snapshot) if verdict.syndrome not in SLOW else ()
    verdict = with_hardware(with_places(dataclasses.replace(verdict, waiting=waiting), snapshot), snapshot)
    hint, passed = hardware_hint(verdict, snapshot) or hint_of(verdict, snapshot), gone_on(verdict, snapshot)
    return dataclasses.replace(verdict, next=hint, gone_on=passed)


def _hangs(snapshot: Snapshot, links: Links, limit_s: float, *, patient: bool) -> list[Verdict]:
    members = {number: group.members() for number, group in enumerate(snapshot.groups)}
    groups = dict(enumerate(snapshot.groups))
    on_device = {number for number, group in groups.items() if group.on_device}
    rows = infer_device_waits(snapshot.rows, on_device, members, all_stand=_all_stand(snapshot, STANDING * limit_s))
    died = _died_first(snapshot)
    lost = all(snapshot.ranks[rank].failed for rank in died)  # no rank ended but those whose calls failed
    found = calls_of_ended(rows, members, groups, snapshot) if lost else []
    found = (
        found
        or _died_of_a_mismatch(rows, died, groups, snapshot)
        or [
            verdict
            for verdict in (hangs(rows, members, groups, before_ns=snapshot.now_ns, gone=died) if died else [])
            if verdict.syndrome is Syndrome.NON_COMMUNICATION_HANG and died.issuperset(verdict.ranks)
        ]
    )  # no deadline is needed for dead ranks
    found = found or _crashed(snapshot, died)
    if not found:
        before_ns = snapshot.now_ns - int(limit_s * 1e9)
        gone = frozenset(rank for rank, one in snapshot.ranks.items() if one.state is State.DEAD)
        all_gone = len(gone) == len(snapshot.ranks)  # the job has ended
        gone = frozenset() if all_gone else gone
        found = hangs(rows, members, groups, before_ns=before_ns, gone=gone, passed=_passed(rows, snapshot.calls))
        found = [_with_absent(verdict, snapshot) for verdict in found]
    found = [_by_state(verdict, snapshot) for verdict in found]
    # a rank of which nothing is known may be in any call
    known = {*snapshot.ranks, *snapshot.absent}
    found = [verdict for verdict in found if known.issuperset(verdict.ranks) and not _undecided(verdict, snapshot, known)]
    return [_with_link(verdict, links) for verdict in found if not (patient and _may_take_long(verdict, snapshot))]


def _undecided(verdict: Verdict, snapshot: Snapshot, known: set[int]) -> bool:
    """Return whether the sides of a mismatch are equal, and members decide of which nothing is known, or nothing new.

    An agent that does not reach that of rank 0's host, as at the end of a round, knows its own ranks alone. And where a rank
    has died in the call, this look comes at once, and the snapshots of other hosts are older.
    """
    if verdict.syndrome is not Syndrome.MISMATCH or verdict.confidence == 1.0 or verdict.group is None:
        return False
    members = set(verdict.group.members().tolist())
    entered = {rank for item in verdict.evidence if isinstance(item, CallVariant) for rank in item.ranks}
    young = snapshot.now_ns - verdict.since_ns < YOUNG_NS
    return not known >= members or (young and not entered >= members)


def _with_absent(verdict: Verdict, snapshot: Snapshot) -> Verdict:
    """Say of ranks at fault that were started and record nothing that it is so."""
    absent = [NotBegun(rank, one.pid, one.host) for rank in verdict.ranks if (one := snapshot.absent.get(rank)) is not None]
    return dataclasses.replace(verdict, evidence=(*absent, *verdict.evidence)) if absent else verdict


def _died_of_a_mismatch(rows: ProgressTable, died: frozenset[int], groups: Groups, snapshot: Snapshot) -> list[Verdict]:
    """Return verdicts on calls in which ranks died, and that differ between the members: gloo aborts such a process."""
    at = _key(rows["comm"], np.where(rows["blocked"] > 0, rows["blocked"], rows["entered"]))
    inside = (rows["blocked"] > 0) & (rows["source"] < 0) & np.isin(rows["rank"], list(died))
    found = mismatches(rows[np.isin(at, at[inside])], groups)
    aborted = [rank for rank in died if (status := snapshot.ranks[rank].exit) and status.signal == signal.SIGABRT]
    if found or not aborted:
        return found
    return [
        verdict
        for verdict in mismatches(_maybe_aborted_in(rows, at, aborted, snapshot.calls), groups)
        if not (verdict.group and verdict.group.on_device) and _of_other_sizes(verdict)
    ]


def _maybe_aborted_in(rows: ProgressTable, at: npt.NDArray[np.int64], aborted: list[int], calls: Calls) -> ProgressTable:
    """Return rows of the calls in which aborted ranks may have been although they did not wait in them.

    Gloo aborts a process in a thread of its own: in any call that the rank has begun, while it and the others wait in an
    earlier one, or before its ring holds the call.
    """
    together = calls["source"] < 0
    key = _key(calls["comm"], calls["seq"])
    begun = calls[together & np.isin(key, key[together & (calls["end_ns"] == 0) & np.isin(calls["rank"], aborted)])]
    found = np.zeros(len(begun), PROGRESS)
    found["source"] = found["destination"] = -1
    for name in ("rank", "comm", "call_ns", "op", "dtype", "shape"):
        found[name] = begun[name]
    found["entered"], found["blocked"] = begun["seq"], np.where(begun["end_ns"] == 0, begun["seq"], 0)
    found["elements"] = _elements(begun)
    over = rows[(rows["source"] < 0) & (rows["entered"] == rows["ended"]) & np.isin(rows["rank"], aborted)]
    return np.concatenate([found, rows[np.isin(at, _key(over["comm"], over["entered"] + 1))]])


def _elements(calls: Calls) -> npt.NDArray[Any]:
    """Return how many elements the larger side of each call has."""
    found: npt.NDArray[Any] = calls["bytes"] // np.maximum(ITEMSIZES[np.minimum(calls["dtype"], len(ITEMSIZES) - 1)], 1)
    return found


def _of_other_sizes(verdict: Verdict) -> bool:
    """Return whether the members call other operations, or give another number of bytes; not only another shape of as many."""
    variants = [each for each in verdict.evidence if isinstance(each, CallVariant)]
    return len({(each.op, each.dtype, each.elements) for each in variants}) > 1


def _key(comm: npt.NDArray[Any], seq: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return one number for each call of a communicator."""
    return comm.astype(np.int64) << 40 | seq.astype(np.int64)


def _passed(rows: ProgressTable, calls: Calls) -> ProgressTable:
    """Return rows of ranks that got through a call in which others wait."""
    rows = rows[rows["source"] < 0]
    waited = rows[rows["blocked"] > 0]
    if not len(waited):
        return rows[:0]
    sought = np.unique(_key(waited["comm"], waited["blocked"]))
    over = calls[(calls["source"] < 0) & (calls["end_ns"] > 0) & np.isin(_key(calls["comm"], calls["seq"]), sought)]
    stand = set(zip(*(rows[name].tolist() for name in ("rank", "comm", "entered")), strict=True))  # already covered by the rows
    over = over[[each not in stand for each in over[["rank", "comm", "seq"]].tolist()]] if len(over) else over
    out = np.zeros(len(over), PROGRESS)
    out["source"] = out["destination"] = -1
    out["entered"] = out["ended"] = over["seq"]
    for name in ("rank", "comm", "call_ns", "op", "dtype", "shape"):
        out[name] = over[name]
    out["elements"] = _elements(over)
    return out


def _all_stand(snapshot: Snapshot, for_s: float) -> bool:
    """Return whether no rank has made a call for ``for_s`` seconds and none is in a phase without a time limit."""
    if not len(snapshot.rows) or any(one.phase in _LONG or one.closed for one in snapshot.ranks.values()):
        return False
    return bool(snapshot.now_ns - int(snapshot.rows["call_ns"].max()) > for_s * 1e9)


def _died_first(snapshot: Snapshot) -> frozenset[int]:
    """Return ranks whose processes crashed before the others ended; none if the whole job was ended from outside.

    A launcher ends the other ranks when one rank ends. Ranks that ended without such a request are at fault, if that is known.
    A rank whose newest call raised ended because of another one, if there is one without such a call. A process that ends by an
    exception closes its ring; its exit status tells.
    """
    died = {
        rank: one.heard_ns
        for rank, one in snapshot.ranks.items()
        if one.state is State.DEAD and (not one.closed or (one.exit is not None and not one.exit.sound))
    }
    first = min(died.values(), default=0)
    soon = {rank for rank, heard_ns in died.items() if heard_ns - first < TOGETHER_NS / 2}
    soon = {rank for rank in soon if not snapshot.ranks[rank].failed} or soon
    by_itself = {rank for rank in soon if _unasked(snapshot.ranks[rank].exit)}  # their end is known exactly
    earliest = min((died[rank] for rank in by_itself), default=0)
    by_itself = {rank for rank in by_itself if died[rank] - earliest < AT_ONCE_NS}
    if len(died) == len(snapshot.ranks) and max(died.values(), default=0) - first < TOGETHER_NS:
        asked = any((status := snapshot.ranks[rank].exit) is not None and status.asked for rank in died)
        followed = any(snapshot.ranks[rank].failed for rank in died) and not any(
            snapshot.ranks[rank].failed for rank in by_itself
        )
        return frozenset(by_itself if asked or followed else ())
    return frozenset(by_itself or soon)


def _crashed(snapshot: Snapshot, died: frozenset[int]) -> list[Verdict]:
    """Return a verdict on ranks that crashed before another rank waits for them.

    The end of a rank whose call failed is not judged while others may have ended before it.
    """
    ranks = sorted(rank for rank in died if (status := snapshot.ranks[rank].exit) and _unasked(status) and not status.sound)
    if ends_now(snapshot):
        ranks = [rank for rank in ranks if not snapshot.ranks[rank].failed]
    if not ranks:
        return []
    since_ns = min(snapshot.ranks[rank].heard_ns for rank in ranks)
    evidence = tuple(Exited(rank, snapshot.ranks[rank].exit) for rank in ranks)
    others = len(snapshot.ranks) - len(ranks)
    return [Verdict(Syndrome.NON_COMMUNICATION_HANG, tuple(ranks), since_ns, victims=others, evidence=evidence)]


def _unasked(status: ExitStatus | None) -> bool:
    """Return whether a process is known to have ended by itself."""
    return status is not None and not status.asked


def _by_state(verdict: Verdict, snapshot: Snapshot) -> Verdict:
    """Blame the members of an unfinished call whose processes are stopped or dead."""
    if verdict.syndrome is not Syndrome.COMMUNICATION_HANG:
        return verdict
    inside = verdict.group.members().tolist() if verdict.group is not None else []
    members = verdict.link or inside or verdict.ranks
    still = {rank: snapshot.ranks[rank] for rank in members if rank in snapshot.ranks}
    still = {rank: one for rank, one in still.items() if one.state in (State.STOPPED, State.DEAD)}
    if not still or len(still) == len(members):
        return verdict
    down = tuple(DownMember(rank, one.state, one.exit) for rank, one in still.items())
    return dataclasses.replace(
        verdict, syndrome=Syndrome.NON_COMMUNICATION_HANG, ranks=tuple(still), link=None,
        evidence=(*down, *verdict.evidence), victims=len(set(verdict.ranks) - set(still)),
    )  # fmt: skip


def _with_link(verdict: Verdict, links: Links) -> Verdict:
    """Blame the links between the members of an unfinished call on which no acknowledgement arrives."""
    if verdict.syndrome is not Syndrome.COMMUNICATION_HANG or verdict.link is not None:
        return verdict
    stuck = [link for link in stuck_links(links) if set(link) <= set(verdict.ranks)]
    if not stuck:
        return verdict
    ranks = tuple(sorted({rank for link in stuck for rank in link}))
    return dataclasses.replace(
        verdict, ranks=ranks, link=stuck[0] if len({frozenset(link) for link in stuck}) == 1 else None, confidence=1.0,
        evidence=(*verdict.evidence, SilentLinks(tuple(stuck))),
    )  # fmt: skip


def _with_cause(verdict: Verdict, snapshot: Snapshot) -> Verdict:
    """Return the verdict with a cause: the phase of the ranks at fault, or of the ranks that wait for them."""
    if verdict.cause or verdict.syndrome is Syndrome.FAILED:
        return verdict
    if verdict.syndrome in (Syndrome.COMMUNICATION_HANG, Syndrome.COMMUNICATION_SLOW):
        return dataclasses.replace(verdict, cause=Cause.COMMUNICATION)
    phases = {rank: one.phase for rank, one in snapshot.ranks.items()} | dict.fromkeys(snapshot.absent, int(Phase.UNKNOWN))
    waiting = set(snapshot.rows["rank"][snapshot.rows["blocked"] > 0].tolist()) - set(verdict.ranks)
    if any(phases[rank] == Phase.CHECKPOINT for rank in verdict.ranks) or (
        waiting and all(phases[rank] == Phase.CHECKPOINT for rank in waiting)
    ):
        return dataclasses.replace(verdict, cause=Cause.CHECKPOINT)
    if verdict.syndrome in (Syndrome.MISMATCH, Syndrome.DEADLOCK) or snapshot.absent.keys() & set(verdict.ranks):
        return verdict
    data = any(phases[rank] == Phase.DATA for rank in verdict.ranks)
    return dataclasses.replace(verdict, cause=Cause.DATA if data else Cause.COMPUTE)


def _may_take_long(verdict: Verdict, snapshot: Snapshot) -> bool:
    """Return whether all ranks at fault save, evaluate or have not begun, and live, and have not done so for too long."""
    if verdict.syndrome is not Syndrome.NON_COMMUNICATION_HANG or snapshot.now_ns - verdict.since_ns > WRITING_S * 1e9:
        return False
    down = (State.DEAD, State.STOPPED)
    absent = [one for rank in verdict.ranks if (one := snapshot.absent.get(rank)) is not None]
    if any(not one.pid or one.state in down for one in absent):
        return False
    ranks = [snapshot.ranks[rank] for rank in verdict.ranks if rank not in snapshot.absent]
    return all(rank.phase in (Phase.CHECKPOINT, Phase.EVALUATION) and rank.state not in down for rank in ranks)
