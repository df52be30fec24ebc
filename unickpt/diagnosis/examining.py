"""From a view of a job to verdicts, and from verdicts to what a person reads."""

from __future__ import annotations

import dataclasses
import datetime
from dataclasses import dataclass

import numpy as np

from unickpt.diagnosis.deadlines import deadline_s
from unickpt.diagnosis.hangs import hangs
from unickpt.diagnosis.links import slow_links
from unickpt.diagnosis.presumed import presumed
from unickpt.diagnosis.stragglers import stragglers
from unickpt.diagnosis.summaries import SUMMARY, Summaries
from unickpt.diagnosis.transfers import transfers_of
from unickpt.diagnosis.transport import Links, Usual, links_of, stuck_links
from unickpt.diagnosis.verdicts import Syndrome, Verdict
from unickpt.diagnosis.view import WARM_UP, Calls, RankView, View
from unickpt.timing.endings import TOGETHER_S
from unickpt.timing.processes import State
from unickpt.timing.records import Phase

STANDING = 3.0  # deadlines that all ranks make no call for until it is the network
_LONG = (Phase.CHECKPOINT, Phase.EVALUATION, Phase.DATA)
WRITING_S = 600.0  # that a rank may be in a save, or in an evaluation, while others wait for it

STARVED, CROWDED_FOR_NS = 0.5, 5_000_000_000  # of its time for so long, and it is slow for that alone
CROWDED, CROWDED_TIMES = 0.15, 2.0  # of its time, and of what is usual, that a rank wants for a processor and is starved
LATE, LATE_OF = 6, 8  # steps of the newest in which a rank was late, so that links tell nothing
TOGETHER_NS = int(TOGETHER_S * 1e9)
AT_ONCE_NS = 5_000_000  # between the ends of processes of which none has died of another's
ASKED = ("SIGTERM", "SIGINT", "SIGHUP")  # what a process ends by that somebody has asked to


@dataclass(frozen=True, slots=True)
class Examination:
    """Attributes: verdicts, a line for a person to each, and the seconds that a call was allowed to take."""

    verdicts: list[Verdict]
    lines: list[str]
    deadline_s: float


def examine(view: View, *, after_s: float | None = None, usual: Usual | None = None) -> Examination:
    """What is wrong with a job at the moment of the view.

    Args:
        view: of all its ranks, or of those that are known.
        after_s: how long a call may take; by what the job's own calls and steps have taken, if not given.
        usual: what the job's links have taken so far, if somebody has looked at it from its beginning.
    """
    limit_s = deadline_s(view.steps, [view.longest_wait_ns] * len(view.ranks)) if after_s is None else after_s
    links = links_of(view.windows)
    hosts = {rank: one.host for rank, one in view.ranks.items()}
    wanting = _wanting(view)
    # where one is late, acknowledgements have nothing to go with, and wait, too
    late = bool(wanting or stragglers(view.steps, last=LATE_OF, fewest=LATE))
    starved = _starved(view)
    judged = links[~np.isin(links["source"], starved) & ~np.isin(links["destination"], starved)]
    slow = usual.slow(judged, view.now_ns, hosts) if usual is not None and not late else []
    if usual is not None and late:
        usual.forget()
    verdicts = [_with_link(verdict, links) for verdict in _hangs(view, limit_s, patient=after_s is None)]
    if not verdicts:
        verdicts = [*slow, *(stragglers(view.steps) or wanting)]
        kernel = len(view.windows) > 0  # it tells of the connections themselves
        if not verdicts and not late and not kernel and _in_motion(view):
            verdicts = slow_links(transfers_of(view.calls))
    verdicts = [_with_cause(verdict, view) for verdict in verdicts]
    return Examination(verdicts, [told(verdict, view) for verdict in verdicts], limit_s)


def _in_motion(view: View) -> bool:
    """Training has made steps that say something of its links: not the first, which allocate and compile."""
    return max((one.step for one in view.ranks.values()), default=0) >= WARM_UP + LATE_OF


def _starved(view: View) -> list[int]:
    """Ranks that want for a processor much more than the others do: whatever goes to or from them is slow for that."""
    crowded = {rank: one.crowded for rank, one in view.ranks.items()}
    usual = float(np.median(list(crowded.values()))) if crowded else 0.0
    return [rank for rank, share in crowded.items() if share > max(CROWDED, CROWDED_TIMES * usual)]


def _wanting(view: View) -> list[Verdict]:
    """The one rank that wants for a processor most of the time, if the others do not."""
    starved = [rank for rank in _starved(view) if view.ranks[rank].crowded > STARVED]
    if len(starved) != 1 or not _in_motion(view):
        return []
    (rank,) = starved
    others = float(np.median([one.crowded for number, one in view.ranks.items() if number != rank]))
    told = (
        f"rank {rank} waits for a processor {view.ranks[rank].crowded:.0%} of the time, the others {others:.0%}: something "
        "else takes it; cause: compute"
    )
    since_ns, victims = view.now_ns - CROWDED_FOR_NS, len(view.ranks) - 1
    return [Verdict(Syndrome.NON_COMMUNICATION_SLOW, (rank,), since_ns, victims=victims, cause="compute", evidence=(told,))]


def _hangs(view: View, limit_s: float, *, patient: bool) -> list[Verdict]:
    members = {number: group.members() for number, group in enumerate(view.groups)}
    names = {number: group.told() for number, group in enumerate(view.groups)}
    rows = presumed(view.rows, _on_device(view), members, all_stand=_all_stand(view, STANDING * limit_s))
    died = _died_first(view)
    found = [
        verdict
        for verdict in (hangs(rows, members, names, before_ns=view.now_ns, gone=died) if died else [])
        if verdict.syndrome is Syndrome.NON_COMMUNICATION_HANG and died.issuperset(verdict.ranks)
    ]  # nobody has to wait for what the dead will do
    found = found or _fallen(view, died)
    if not found:
        before_ns = view.now_ns - int(limit_s * 1e9)
        gone = frozenset(rank for rank, one in view.ranks.items() if one.state is State.DEAD)
        all_gone = len(gone) == len(view.ranks)  # after the end of the job, that tells nothing
        gone = frozenset() if all_gone else gone
        found = hangs(rows, members, names, before_ns=before_ns, gone=gone, passed=_passed(rows, view.calls))
    found = [_by_state(verdict, view) for verdict in found]
    # a rank that nobody knows may be in any call: of it nothing can be told here
    found = [verdict for verdict in found if all(rank in view.ranks for rank in verdict.ranks)]
    return [verdict for verdict in found if not (patient and _takes_its_time(verdict, view))]


def _passed(rows: Summaries, calls: Calls) -> Summaries:
    """Calls that some wait in, of those that have got through them."""
    waited = rows[(rows["blocked"] > 0) & (rows["source"] < 0)]
    if not len(waited):
        return rows[:0]
    sought = np.unique(waited["comm"].astype(np.int64) << 40 | waited["blocked"].astype(np.int64))
    keys = calls["comm"].astype(np.int64) << 40 | calls["seq"].astype(np.int64)
    over = calls[(calls["source"] < 0) & (calls["end_ns"] > 0) & np.isin(keys, sought)]
    stand = set(zip(*(rows[name].tolist() for name in ("rank", "comm", "entered")), strict=True))  # of these, the rows tell it
    over = over[[each not in stand for each in over[["rank", "comm", "seq"]].tolist()]] if len(over) else over
    out = np.zeros(len(over), SUMMARY)
    out["source"] = out["destination"] = -1
    out["entered"] = out["ended"] = over["seq"]
    for name in ("rank", "comm", "call_ns", "op", "dtype", "shape"):
        out[name] = over[name]
    return out


def _on_device(view: View) -> set[int]:
    return {number for number, group in enumerate(view.groups) if group.on_device}


def _all_stand(view: View, for_s: float) -> bool:
    """No rank has made a call for so long, and none is at something that takes as long as it takes."""
    if not len(view.rows) or any(one.phase in _LONG or one.closed for one in view.ranks.values()):
        return False
    return bool(view.now_ns - int(view.rows["call_ns"].max()) > for_s * 1e9)


def _died_first(view: View) -> frozenset[int]:
    """Ranks whose processes have ended without order before the others did; none if somebody has ended all of them.

    A launcher that sees one end asks the others to, and may do so at once: whoever was not asked counts, if that is known.
    """
    died = {rank: one.heard_ns for rank, one in view.ranks.items() if one.state is State.DEAD and not one.closed}
    first = min(died.values(), default=0)
    soon = {rank for rank, heard_ns in died.items() if heard_ns - first < TOGETHER_NS / 2}
    by_itself = {rank for rank in soon if view.ranks[rank].ended not in ("", *ASKED)}  # of these, when is known exactly
    earliest = min((died[rank] for rank in by_itself), default=0)
    by_itself = {rank for rank in by_itself if died[rank] - earliest < AT_ONCE_NS}
    if len(died) == len(view.ranks) and max(died.values(), default=0) - first < TOGETHER_NS:
        asked = any(view.ranks[rank].ended in ASKED for rank in died)
        return frozenset(by_itself if asked else ())
    return frozenset(by_itself or soon)


def _fallen(view: View, died: frozenset[int]) -> list[Verdict]:
    """Ranks that have ended by themselves and for no good, before anybody came to wait for them."""
    ranks = sorted(rank for rank in died if view.ranks[rank].ended not in ("", "exit code 0", *ASKED))
    if not ranks:
        return []
    since_ns = min(view.ranks[rank].heard_ns for rank in ranks)
    told = ", ".join(f"rank {rank} has ended ({view.ranks[rank].ended})" for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    others = len(view.ranks) - len(ranks)
    return [
        Verdict(
            Syndrome.NON_COMMUNICATION_HANG, tuple(ranks), since_ns, victims=others, confidence=1.0, evidence=(told + more,)
        )
    ]


def _by_state(verdict: Verdict, view: View) -> Verdict:
    """Of a call that all have entered and that does not end, the members whose processes are stopped or gone."""
    if verdict.syndrome is not Syndrome.COMMUNICATION_HANG:
        return verdict
    inside = [group.members().tolist() for group in view.groups if group.told() == verdict.communicator]
    members = verdict.link or (inside[0] if inside else verdict.ranks)
    still = {rank: view.ranks[rank] for rank in members if rank in view.ranks}
    still = {rank: one for rank, one in still.items() if one.state in (State.STOPPED, State.DEAD)}
    if not still or len(still) == len(members):
        return verdict
    told = "; ".join(f"rank {rank} is {one.condition}" for rank, one in still.items())
    return dataclasses.replace(
        verdict, syndrome=Syndrome.NON_COMMUNICATION_HANG, ranks=tuple(still), link=None,
        evidence=(f"{told}; {verdict.evidence[0]}", *verdict.evidence[1:]), victims=len(set(verdict.ranks) - set(still)),
    )  # fmt: skip


def _with_link(verdict: Verdict, links: Links) -> Verdict:
    """Of a call that all have entered, the links between its ranks on which nothing comes back."""
    if verdict.syndrome is not Syndrome.COMMUNICATION_HANG or verdict.link is not None:
        return verdict
    stuck = [link for link in stuck_links(links) if set(link) <= set(verdict.ranks)]
    if not stuck:
        return verdict
    told = "nothing comes back " + ", ".join(f"from rank {there} to rank {here}" for here, there in stuck[:4])
    more = f" and on {len(stuck) - 4} more links" if len(stuck) > 4 else ""
    ranks = tuple(sorted({rank for link in stuck for rank in link}))
    return dataclasses.replace(
        verdict, ranks=ranks, link=stuck[0] if len({frozenset(link) for link in stuck}) == 1 else None, confidence=1.0,
        evidence=(*verdict.evidence, told + more),
    )  # fmt: skip


def _with_cause(verdict: Verdict, view: View) -> Verdict:
    """What the ranks in question, or those that wait for them, are at."""
    if verdict.cause:
        return verdict
    if verdict.syndrome in (Syndrome.COMMUNICATION_HANG, Syndrome.COMMUNICATION_SLOW):
        return dataclasses.replace(verdict, cause="communication")
    phases = {rank: one.phase for rank, one in view.ranks.items()}
    waiting = set(view.rows["rank"][view.rows["blocked"] > 0].tolist()) - set(verdict.ranks)
    if any(phases[rank] == Phase.CHECKPOINT for rank in verdict.ranks) or (
        waiting and all(phases[rank] == Phase.CHECKPOINT for rank in waiting)
    ):
        return dataclasses.replace(verdict, cause="checkpoint")
    if verdict.syndrome in (Syndrome.MISMATCH, Syndrome.DEADLOCK):
        return verdict
    data = any(phases[rank] == Phase.DATA for rank in verdict.ranks)
    return dataclasses.replace(verdict, cause="data" if data else "compute")


def _takes_its_time(verdict: Verdict, view: View) -> bool:
    """It is in a phase that takes as long as it takes: one rank writes, or evaluates, and the others wait for it."""
    if verdict.syndrome is not Syndrome.NON_COMMUNICATION_HANG or view.now_ns - verdict.since_ns > WRITING_S * 1e9:
        return False
    ranks = [view.ranks[rank] for rank in verdict.ranks]
    return all(
        rank.phase in (Phase.CHECKPOINT, Phase.EVALUATION) and rank.state not in (State.DEAD, State.STOPPED) for rank in ranks
    )


def told(verdict: Verdict, view: View) -> str:
    """One line for the log."""
    first = verdict.evidence[0] if verdict.evidence else ""
    if verdict.syndrome is Syndrome.NON_COMMUNICATION_SLOW:
        return f"{first} since {_clock(verdict)}; {_doing(verdict.ranks[0], view)}"
    if verdict.syndrome is Syndrome.COMMUNICATION_SLOW:
        return f"{verdict.syndrome.value}: {first}"
    where = ", in a checkpoint" if verdict.cause == "checkpoint" else ""
    waiting = f"{verdict.victims} rank{'s' if verdict.victims != 1 else ''} wait{'s' if verdict.victims == 1 else ''}"
    if verdict.syndrome is Syndrome.NON_COMMUNICATION_HANG:
        return f"{first} since {_clock(verdict)}{where}, {waiting} in all; {_doing(verdict.ranks[0], view)}"
    more = "".join(f"; {sentence}" for sentence in verdict.evidence[1:])
    return f"{verdict.syndrome.value}: {first} since {_clock(verdict)}{where}, {waiting}{more}"


def _clock(verdict: Verdict) -> str:
    try:
        return datetime.datetime.fromtimestamp(verdict.since_ns / 1e9).strftime("%H:%M:%S")
    except (ValueError, OverflowError, OSError):  # rings are not trusted
        return "an impossible time"


def _doing(rank: int, view: View) -> str:
    """What the rank itself is seen to do."""
    one = view.ranks.get(rank)
    if one is None:
        return f"nothing is known of rank {rank}"
    where = f" ({one.place})" if one.place else ""
    who = f"process {one.pid} on {one.host}{where} is {one.condition}, in step {one.step} ({_phase(one)})"
    if rank in _starved(view):
        who = f"{who}, and has waited for a processor {one.crowded:.0%} of its time"
    stack = f"; its main thread is in {one.stack}" if one.stack else ""
    if not one.last:
        return f"{who}; no call of it has ended{stack}"
    return f"{who}; last ended: {one.last}, {(view.now_ns - one.last_ns) / 1e9:.1f} s ago{stack}"


def _phase(one: RankView) -> str:
    try:
        return "waiting for data" if one.phase == Phase.DATA else Phase(one.phase).name.lower()
    except ValueError:
        return "unknown"
