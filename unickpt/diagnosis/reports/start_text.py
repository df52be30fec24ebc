"""What is said of ranks that others wait for at the start of a job, before there is a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unickpt.diagnosis.detectors.places import ranks_at
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.host.stack_dumps import place_of
from unickpt.diagnosis.recording.launched import AbsentRank
from unickpt.diagnosis.reports.verdict_text import pending
from unickpt.diagnosis.reports.wording import call_text, clock_time, counted, is_or_are
from unickpt.diagnosis.snapshot.snapshot import Snapshot

TOLD_AFTER_S = 10.0  # that others have waited; the agent looks once a second
MOST = 3  # ranks with their process
_SILENT = " has not said where it is for some seconds: it is stopped, or in a call that does not let Python run"


def start_notices(snapshot: Snapshot, *, whole: bool = True) -> dict[str, tuple[str, str]]:
    """Return sentences on ranks that have not begun to record and that others wait for, with what to do next, by key.

    A rank may take long to load, so this is no verdict, and nothing is done. Once the job makes steps there is none.

    Args:
        snapshot: of the job.
        whole: whether all hosts that have begun are in the snapshot; otherwise ranks of others are not known.
    """
    if len(snapshot.steps):
        return {}
    found = {}
    for call in pending(snapshot):
        absent = [rank for rank in call.missing if rank in snapshot.absent]
        unknown = [rank for rank in call.missing if whole and rank not in snapshot.absent and rank not in snapshot.ranks]
        if snapshot.now_ns - call.since_ns < TOLD_AFTER_S * 1e9 or not (absent or unknown):
            continue
        what = call_text(call.ref(dict(enumerate(snapshot.groups))))
        parts = [f"{counted(call.waiters, 'wait')} since {clock_time(call.since_ns)} in {what} for {counted(call.missing)}"]
        parts += [_of_absent(rank, snapshot.absent[rank]) for rank in absent[:MOST]]
        if unknown:
            parts.append(f"no host has told of {counted(unknown)}")
        waiting = ranks_at(call.waiters, snapshot, waiting=True)
        parts += [f"{counted(each.ranks)} {is_or_are(each.ranks)} at {each.at.file}:{each.at.line}" for each in waiting[:1]]
        found[f"start {what} {call.missing}"] = "; ".join(parts), _next([snapshot.absent[rank] for rank in absent], unknown)
    return found


def waiting_text(
    waits: str,
    since_ns: int,
    waiters: Sequence[int],
    absent: Mapping[int, AbsentRank],
    elsewhere: Mapping[int, str],
    unknown: Mapping[int, str],
    store: str,
) -> tuple[str, str]:
    """Return a sentence on ranks that have not come to a call in which others wait before anything is recorded, and what to do.

    Args:
        waits: the call.
        since_ns: since when, on the wall clock.
        waiters: ranks that wait in it.
        absent: ranks that have not come, as far as they are known.
        elsewhere: other calls, in which some of them wait.
        unknown: ranks of which nothing is known, with the name of their host, or ''.
        store: address of the store of rank 0, if that is not open; ''.
    """
    missing = sorted({*absent, *unknown})
    parts = [f"{counted(waiters, 'wait')} since {clock_time(since_ns)} in {waits} for {counted(missing)}"]
    if store:
        parts.append(f"nothing listens at {store}, where rank 0 opens the store of the job")
    for rank in [each for each in missing if each in absent][:MOST]:
        one, call = absent[rank], elsewhere.get(rank, "")
        process = f"process {one.pid} on {one.host}" if one.pid else f"no process of it is seen on {one.host}"
        state = f" is {one.state.value}" if one.state is not State.UNKNOWN else _SILENT if one.pid else ""
        at = place_of(one.stack)
        where = f", at {at.file}:{at.line} ({at.function})" if at else ""
        parts.append(f"rank {rank} {f'waits in {call}' if call else 'has not come there'}: {process}{state}{where}")
    for host in sorted(set(unknown.values())):
        ranks = [rank for rank, name in unknown.items() if name == host]
        parts.append(f"{host} has told nothing of {counted(ranks)}" if host else f"no host has told of {counted(ranks)}")
    found = [absent[rank] for rank in missing if rank in absent and rank not in elsewhere] or list(absent.values())
    hosts = sorted({host for host in unknown.values() if host})
    if not found and hosts:
        return "; ".join(parts), f"look at the log of the launcher on {', '.join(hosts[:MOST])}"
    return "; ".join(parts), _next(found, list(unknown))


def _of_absent(rank: int, one: AbsentRank) -> str:
    at = place_of(one.stack)
    process = f"process {one.pid} on {one.host} is {one.state.value}" if one.pid else f"no process of it is seen on {one.host}"
    return f"rank {rank} has not begun to record: {process}" + (f", at {at.file}:{at.line} ({at.function})" if at else "")


def _next(absent: list[AbsentRank], unknown: list[int]) -> str:
    first = next((one for one in absent if one.pid), None)
    if first is not None and first.state is State.STOPPED:
        return f"type on {first.host}: kill -CONT {first.pid}, and look who has stopped it: a debugger, or a scheduler"
    if first is not None and first.state is State.STUCK:
        return f"type on {first.host}: cat /proc/{first.pid}/stack, as root; a file system or a device does not answer"
    if first is not None:
        at = place_of(first.stack)
        look = f"look at {at.file}:{at.line}" if at else f"type on {first.host}: py-spy dump --pid {first.pid}"
        return f"it may still load data or weights, download or compile; if it stays so, {look}"
    if absent:
        return f"look for the end of the worker in its log on {absent[0].host}"
    return f"look whether the launcher of {counted(unknown)} has started them, and at its log"
