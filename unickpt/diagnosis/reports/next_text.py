"""The sentence on what to look at: the hint of a verdict in words."""

from __future__ import annotations

from collections.abc import Sequence

from unickpt.diagnosis.detectors.verdicts import (
    CallRef,
    CollectTogether,
    EndedEarly,
    LooksAtProcess,
    Matter,
    OffTrack,
    OneCallMore,
    SameSideFirst,
    Verdict,
)
from unickpt.diagnosis.recording.records import Op
from unickpt.diagnosis.reports.wording import counted, has_or_have

_ORDER = "all ranks of a group must make the same calls in the same order"


def next_text(verdict: Verdict) -> str:
    """Return the sentence, without a final full stop; '' without a hint."""
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
        case LooksAtProcess():
            return _process(verdict.next)
        case CollectTogether():
            return (
                "collect garbage at the same steps on all ranks: gc.disable() at the start and gc.collect() every so many "
                "steps, gc.freeze() once the model is built"
            )
    return ""


def _off_track(hint: OffTrack, verdict: Verdict) -> str:
    here = _calls(hint.ranks, hint.call, verdict)
    there = _calls(hint.others, hint.usual, verdict)
    if hint.left_out == 1:
        why = f"{counted(hint.ranks)} {has_or_have(hint.ranks)} made one {_name(hint.usual)} fewer"
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


def _process(hint: LooksAtProcess) -> str:
    process = f"process {hint.pid}" if hint.pid else "the process"
    match hint.matter:
        case Matter.STOPPED:
            return (
                f"{process} on {hint.host} is stopped: find who stopped it (a debugger, a scheduler), or run kill -CONT "
                f"{hint.pid}"
            )
        case Matter.KILLED:
            return (
                f"{process} on {hint.host} was killed: look in the log of the kernel (dmesg) for the out-of-memory killer, and "
                "in the limits of the container"
            )
        case Matter.NO_DATA:
            return f"rank {hint.rank} waits for its data loader: look at its workers, storage and network on {hint.host}"
        case Matter.NOT_BEGUN:
            look = f", or look with py-spy dump --pid {hint.pid} on {hint.host}" if hint.pid else ""
            return (
                f"rank {hint.rank} has not come to the call that begins timing, such as deepspeed.initialize: look at what it "
                f"does before, such as the load of its model or data{look}"
            )
        case Matter.STARVED:
            return (
                f"another program uses the processors of {process} on {hint.host}: look with top, and at the limits of the "
                "container"
            )


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
