"""The end of a job whose ranks have all ended, and not in order: the first cause, and what followed from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from unickpt.base.failure_kinds import FailureKind, FailureRule, Remedy, rule_for
from unickpt.diagnosis.detectors.hints import Helps
from unickpt.diagnosis.detectors.observations import EndsAlike
from unickpt.diagnosis.detectors.verdicts import Syndrome, Verdict
from unickpt.diagnosis.host.process_exits import TOGETHER_S, ExitStatus
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.snapshot.snapshot import RankSnapshot, Snapshot

_FOLLOW = (FailureKind.CONNECTION, FailureKind.ASKED)


def failed_job(snapshot: Snapshot, *, ends: bool = False) -> list[Verdict]:
    """Return the verdict on a job that has ended; empty if it runs, has ended in order, or was ended from outside.

    The cause is the earliest end that is not the consequence of another one. Without such an end, no rank is at fault.

    Args:
        snapshot: the job.
        ends: whether its launcher ends it, also if some ranks still live.
    """
    ranks = {rank: one for rank, one in snapshot.ranks.items() if one.state is State.DEAD}
    if not ranks or (not ends and (snapshot.absent or len(ranks) < len(snapshot.ranks))):
        return []
    rules = {rank: _rule(one) for rank, one in ranks.items()}
    bad = {rank: rule for rank, rule in rules.items() if rule is not None}
    first = min((ranks[rank].heard_ns for rank in bad), default=0)
    asked_first = all(bad[rank].kind is FailureKind.ASKED for rank in bad if ranks[rank].heard_ns == first)
    causes = [rank for rank, rule in bad.items() if rule.kind not in _FOLLOW]
    if _killed_together(snapshot.ranks):
        return []
    if asked_first:  # a launcher kills what does not end: that is no fault
        causes = [rank for rank in causes if ranks[rank].failure is not None]
    from_outside = asked_first or all(rule.kind is FailureKind.ASKED for rule in bad.values())
    if not causes and (from_outside or len(ranks) < len(snapshot.ranks)):
        return []
    first_ns = {rank: _at_ns(one) for rank, one in ranks.items()}
    cause = min(causes, key=lambda rank: first_ns[rank], default=None)
    alike = _alike(ranks, first_ns, cause)
    hint = None if cause is None else Helps(cause, ranks[cause].host, bad[cause].kind, bad[cause].remedy)
    at_fault = alike[0].ranks if cause is not None else ()
    return [
        Verdict(
            Syndrome.FAILED, at_fault, min(each.at_ns for each in alike),
            evidence=tuple(alike), next=hint, confidence=1.0 if cause is not None else 0.5,
        )
    ]  # fmt: skip


def _killed_together(ranks: Mapping[int, RankSnapshot]) -> bool:
    """Return whether all ranks were killed at once, as by the end of a container."""
    killed = [one.heard_ns for one in ranks.values() if one.exit is not None and one.exit.signal_name == "SIGKILL"]
    return 1 < len(killed) == len(ranks) and max(killed) - min(killed) < TOGETHER_S * 1e9


def _rule(one: RankSnapshot) -> FailureRule | None:
    """Return what kind of failure the end of a rank is; None if it has ended in order, or nothing is known."""
    if one.failure is not None:
        return FailureRule("", "", one.failure.kind, one.failure.remedy)
    status = one.exit
    if status is None:
        return FailureRule("", "", FailureKind.UNKNOWN, Remedy.RESTART) if one.raised else None
    if status.sound:
        return None
    if status.signal or status.asked:
        return rule_for((status.signal_name or "SIGTERM",), "")
    return FailureRule("", "", FailureKind.CONNECTION if one.failed else FailureKind.UNKNOWN, Remedy.RESTART)


def _at_ns(one: RankSnapshot) -> int:
    """Return when a rank has failed: an exception is earlier than the end of its process."""
    return min(one.failure.at_ns, one.heard_ns) if one.failure is not None and one.failure.at_ns else one.heard_ns


def _alike(ranks: Mapping[int, RankSnapshot], at_ns: Mapping[int, int], cause: int | None) -> list[EndsAlike]:
    """Return the ends, those of one kind together: the cause first, then by time. Ends in order are left out."""
    found: dict[tuple[bool, ExitStatus | None, str, str], list[int]] = defaultdict(list)
    like = _how(ranks[cause]) if cause is not None else None
    for rank in sorted(ranks, key=lambda rank: at_ns[rank]):
        one = ranks[rank]
        if one.ended_in_order:
            continue
        how = _how(one)
        found[(how == like, *how)].append(rank)
    ends = [
        EndsAlike(
            tuple(sorted(alike)), status, error, _text(ranks[alike[0]]), at_ns[alike[0]],
            status is not None and status.asked,
        )
        for (_, status, error, _), alike in found.items()
    ]  # fmt: skip
    first = {tuple(sorted(alike)) for (is_cause, *_), alike in found.items() if is_cause}
    return sorted(ends, key=lambda each: (each.ranks not in first, each.at_ns))


def _how(one: RankSnapshot) -> tuple[ExitStatus | None, str, str]:
    failure = one.failure
    return one.exit, failure.error if failure is not None else "", failure.signature if failure is not None else ""


def _text(one: RankSnapshot) -> str:
    return one.failure.text if one.failure is not None else ""
