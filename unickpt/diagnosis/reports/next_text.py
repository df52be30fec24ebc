"""The sentence on what to look at: the hint of a verdict in words."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from unickpt.base.failure_kinds import FailureKind, Remedy
from unickpt.diagnosis.detectors.hints import (
    AllSlower,
    CollectTogether,
    EndedEarly,
    Helps,
    LooksAtHardware,
    LooksAtNetwork,
    LooksAtProcess,
    Matter,
    OffTrack,
    OneCallMore,
    OtherOrder,
    SameSideFirst,
)
from unickpt.diagnosis.detectors.observations import CallRef
from unickpt.diagnosis.detectors.verdicts import Verdict
from unickpt.diagnosis.recording.records import Op
from unickpt.diagnosis.reports.hardware_text import hardware_command, hardware_next
from unickpt.diagnosis.reports.wording import counted, has_or_have

_ORDER = "all ranks of a group must make the same calls in the same order"


def next_text(verdict: Verdict) -> str:
    """Return the sentence, without a final full stop; '' without a hint. It ends with the command, if there is one."""
    what, command = _what(verdict), command_of(verdict)
    return "; ".join(filter(None, [what, command and f"type{_on(verdict)}: {command}"]))


def command_of(verdict: Verdict) -> str:
    """Return the command for a shell that shows or does most; '' if reading the code is what helps."""
    hint, reach = verdict.next, verdict.reach
    match hint:
        case LooksAtProcess(rank, pid, host, matter):
            return _of_process(rank, pid, host, matter, verdict)
        case LooksAtNetwork(hosts, _, slow):
            if slow and verdict.link is not None and reach.rings:
                return f"unickpt whatif {shlex.join(reach.rings)} --link {verdict.link[0]}-{verdict.link[1]}"
            return f"ping -c 5 {shlex.quote(hosts[-1])}" if len(hosts) > 1 else ""
        case LooksAtHardware():
            return hardware_command(hint, steered=reach.steered)
        case Helps(_, host, _, remedy):
            return f"unickpt hosts park {shlex.quote(host)}" if remedy is Remedy.EVICT and reach.steered else ""
        case AllSlower(_, first, last):
            return f"unickpt whatif {shlex.join(reach.rings)} --steps {first}:{last}" if reach.rings else ""
        case CollectTogether():
            return f"unickpt whatif {shlex.join(reach.rings)}" if reach.rings else ""
    return ""


def _of_process(rank: int, pid: int, host: str, matter: Matter, verdict: Verdict) -> str:
    reach = verdict.reach
    if matter is Matter.STOPPED:
        return f"kill -CONT {pid}"
    if matter is Matter.KILLED:
        return "dmesg -T | grep -i -e 'out of memory' -e 'killed process' | tail"
    if matter is Matter.STARVED:
        return "top -b -n 1 -o %CPU | head -n 20"
    if matter in (Matter.BUSY, Matter.STUCK) and reach.steered:
        return f"unickpt hosts park {shlex.quote(host)}"
    if matter is Matter.STUCK:
        return "dmesg -T | tail -n 50"
    if matter in (Matter.SLOW, Matter.LATE):
        return f"unickpt whatif {shlex.join(reach.rings)} --without-rank {rank}" if reach.rings else ""
    return f"py-spy dump --pid {pid}" if pid and matter is not Matter.FAILED else ""


def _on(verdict: Verdict) -> str:
    """Where a command is typed: ' on node02'. What ``unickpt`` does is typed where the job's records are."""
    if command_of(verdict).startswith("unickpt "):
        return ""
    if isinstance(verdict.next, LooksAtProcess | LooksAtHardware):
        return f" on {verdict.next.host}"
    return f" on {verdict.next.hosts[0]}" if isinstance(verdict.next, LooksAtNetwork) and verdict.next.hosts else ""


def _what(verdict: Verdict) -> str:
    match verdict.next:
        case OneCallMore(ranks, call, others):
            return (
                f"{_calls(ranks, call, verdict)} once more than {counted(others)}, which {has_or_have(others)} ended: look for "
                f"a condition on the rank, or an early return, around it; {_ORDER}"
            )
        case EndedEarly(ranks, call, others):
            return (
                f"{counted(ranks)} {has_or_have(ranks)} ended in order, and {_calls(others, call, verdict)} once more: look "
                f"for fewer batches or an early return on {counted(ranks)}"
            )
        case SameSideFirst(ranks, op):
            first, then = ("send", "receive") if op is Op.SEND else ("receive", "send")
            where = _at(ranks, verdict)
            both = "both ranks" if len(ranks) == 2 else "all ranks"
            return (
                f"{both} {_listed(ranks)} {first} first{where}: let one of them {then} first, or issue both calls together "
                "(torch.distributed.batch_isend_irecv)"
            )
        case OffTrack():
            return _off_track(verdict.next, verdict)
        case OtherOrder(ranks):
            return f"compare the code paths{_places(verdict)}: {counted(ranks, 'differ')} from the others, and {_ORDER}"
        case LooksAtProcess():
            return _process(verdict.next, verdict)
        case LooksAtNetwork():
            return _network(verdict.next)
        case LooksAtHardware():
            return hardware_next(verdict.next, steered=verdict.reach.steered)
        case AllSlower(hosts):
            return (
                f"look at what {'the hosts' if len(hosts) > 1 else 'the ranks'} share: clocks, power and temperature of the "
                "devices (nvidia-smi -q -d PERFORMANCE,CLOCK), limits of the containers, storage, and what the program does "
                "since then, such as longer sequences; see what takes the time"
            )
        case Helps():
            return _helps(verdict.next, verdict)
        case CollectTogether():
            return (
                "collect garbage at the same steps on all ranks: gc.disable() at the start and gc.collect() every so many "
                "steps, gc.freeze() once the model is built"
            )
    return ""


_HELP = {
    FailureKind.PROGRAM: "mend the program",
    FailureKind.MEMORY: "ask for less memory: a smaller micro-batch, recomputation of activations, or more ranks",
    FailureKind.DEVICE: "the device has failed: look in the log of the kernel (dmesg, Xid)",
    FailureKind.CONNECTION: "a connection was lost: look at the other end",
    FailureKind.STORAGE: "the storage has failed: look for room, permissions and errors of the file system",
    FailureKind.KILLED: "it was killed: look for the out-of-memory killer in the log of the kernel (dmesg), and at the "
    "limits of the container",
    FailureKind.UNKNOWN: "look at its error, above this line in the log",
}
_ALL_KILLED = (
    "several ranks were killed at the same time: look at who ended the job (a person, the scheduler, a limit of memory of the "
    "whole container), and at the verdicts before this one"
)
_DO = {
    Remedy.STOP: "a restart meets the same error",
    Remedy.RESTART: "then start the job again; it goes on from its newest checkpoint",
    Remedy.EVICT: "start the job again without this host",
}


def _helps(hint: Helps, verdict: Verdict) -> str:
    at = f" at {verdict.at.file}:{verdict.at.line} ({verdict.at.function})" if verdict.at is not None else ""
    what = _HELP.get(hint.kind, _HELP[FailureKind.UNKNOWN])
    if hint.kind is FailureKind.KILLED and len(verdict.ranks) > 1:
        what = _ALL_KILLED
    return f"rank {hint.rank} on {hint.host}{at}: {what}; {_DO[hint.remedy]}"


def _places(verdict: Verdict) -> str:
    found = dict.fromkeys(f"{place.at.file}:{place.at.line}" for place in verdict.places)
    return f" at {' and '.join(list(found)[:4])}" if found else ""


def _network(hint: LooksAtNetwork) -> str:
    where = f"between {' and '.join(hint.hosts[:4])}" if len(hint.hosts) > 1 else f"of {(*hint.hosts, 'the hosts')[0]}"
    if hint.slow:
        return f"look at the links {where}: errors and speed of the network cards, cables, and what else sends there"
    return (
        f"look at the network {where}: cables, network cards, firewall; with NCCL, NCCL_DEBUG=INFO in the next start shows the "
        "connections"
    )


def _off_track(hint: OffTrack, verdict: Verdict) -> str:
    here = _calls(hint.ranks, hint.call, verdict)
    there = _calls(hint.others, hint.usual, verdict)
    fewer = "one" if hint.of - hint.made <= 1 else str(hint.of - hint.made)
    count = f": {hint.made} of {hint.of} since step {hint.since_step}" if hint.of else ""
    left_out = f"{counted(hint.ranks)} {has_or_have(hint.ranks)} made {fewer} {_name(hint.usual)} fewer{count}"
    if hint.alone:
        verb = "makes" if len(hint.ranks) == 1 else "make"
        why = (
            f"{counted(hint.ranks)} {verb} a call that this group has not made before: let every rank of the group make it, or "
            "none"
        )
        why += f". If all ranks come to this call later, {left_out}" if hint.made else ""
    elif hint.made or hint.left_out == 1:
        why = left_out
    elif hint.left_out:
        why = f"{counted(hint.ranks)} {has_or_have(hint.ranks)} left out {hint.left_out} calls from this {_name(hint.usual)} on"
    elif hint.as_before:
        verb = "makes" if len(hint.ranks) == 1 else "make"
        why = (
            f"earlier steps have that {_name(hint.usual)} here, so {counted(hint.ranks)} left it out, or {verb} the "
            f"{_name(hint.call)} alone"
        )
    else:
        why = _ORDER
    passed = set(hint.ranks) & set(verdict.gone_on)
    return f"{here} where {there}: {why}" + (f" ({counted(sorted(passed))} got through that call)" if passed else "")


def _process(hint: LooksAtProcess, verdict: Verdict) -> str:
    process = f"process {hint.pid}" if hint.pid else "the process"
    at = f" at {verdict.at.file}:{verdict.at.line} ({verdict.at.function})" if verdict.at is not None else ""
    match hint.matter:
        case Matter.STOPPED:
            return f"{process} on {hint.host} is stopped: find who stopped it (a debugger, a scheduler), or let it go on"
        case Matter.KILLED:
            return (
                f"{process} on {hint.host} was killed: look in the log of the kernel for the out-of-memory killer, and in the "
                "limits of the container"
            )
        case Matter.FAILED:
            return f"rank {hint.rank} has failed: its error is above this line in the log of {hint.host}"
        case Matter.NO_DATA:
            return f"rank {hint.rank} waits for its data loader: look at its workers, storage and network on {hint.host}"
        case Matter.NOT_BEGUN:
            return (
                f"rank {hint.rank} has not come to the call that begins timing, such as deepspeed.initialize: look at what it "
                "does before, such as the load of its model or data"
            )
        case Matter.STARVED:
            return (
                f"another program uses the processors of {process} on {hint.host}: look at it, and at the limits of the "
                "container"
            )
        case Matter.STUCK:
            return (
                f"{process} on {hint.host} waits in the kernel, for a disk, a file server or a driver, and cannot be killed: "
                "look in the log of the kernel"
            )
        case Matter.SAVES:
            return f"rank {hint.rank} saves{at}: look at its storage; if only one rank saves, the others must not wait"
        case Matter.BUSY:
            park = ". If the code is right, take the host out" if verdict.reach.steered else ""
            return f"the others wait for rank {hint.rank}: look at what it does{at}{park}"
        case Matter.LATE:
            return (
                f"look for what runs at that interval on {hint.host} or on rank {hint.rank} alone: logging, an evaluation, a "
                "scheduled job; see what the job would gain"
            )
        case Matter.SLOW:
            out = f"; unickpt hosts park {shlex.quote(hint.host)} takes the host out" if verdict.reach.steered else ""
            what = f"rank {hint.rank} on {hint.host} takes longer in code of its own{at}"
            return f"{what}: look there; see what the job would gain{out}"


def _calls(ranks: Sequence[int], call: CallRef, verdict: Verdict) -> str:
    return f"{counted(ranks, 'call')} {_name(call)}{_at(ranks, verdict)}"


def _name(call: CallRef) -> str:
    return call.op.name.lower()


def _at(ranks: Sequence[int], verdict: Verdict) -> str:
    """Where ranks are: ' at x.py:40'; '' if unknown."""
    there = set(ranks) - set(verdict.gone_on)
    found = {f"{place.at.file}:{place.at.line}" for place in verdict.places if there & set(place.ranks)}
    return f" at {' and '.join(sorted(found)[:4])}" if found else ""


def _listed(ranks: Sequence[int]) -> str:
    *most, last = map(str, ranks[:8])
    return f"{', '.join(most)} and {last}" if most else last
