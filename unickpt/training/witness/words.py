"""Texts of verdicts, made last."""

from __future__ import annotations

from unickpt.training.witness.nonfinite import Cause, NonFinite
from unickpt.training.witness.vote import Kind, Subject, Verdict

_DIFFERS = {
    Kind.SDC_COMPUTE: "computes {what} otherwise than {n} other ranks with the same input",
    Kind.SDC_REPLICA: "holds another value of {what} than {n} other ranks",
    Kind.SDC_AT_REST: "found {what} changed between two steps of the optimizer, and {n} other ranks did not",
    Kind.SDC_UPDATE: "computed the step of {what} otherwise than {n} other ranks",
}
_TOGETHER = "together compute {what} otherwise than {n} other groups of ranks with the same input"
_TWICE = "computed {what} otherwise in the backward pass than in the forward pass"
_NO_MAJORITY = {
    Kind.SDC_COMPUTE: "compute {what} differently",
    Kind.SDC_REPLICA: "hold different values of {what}",
    Kind.SDC_AT_REST: "found {what} changed between two steps of the optimizer",
    Kind.SDC_UPDATE: "computed the step of {what} differently",
}


def when(subject: Subject) -> str:
    """Return the time of a subject, as in ``step 12, micro-batch 0``."""
    return f"step {subject.step}" + ("" if subject.micro_batch is None else f", micro-batch {subject.micro_batch}")


def who(ranks: tuple[int, ...], hosts: tuple[str, ...]) -> str:
    """Return ranks with their hosts, as in ``rank 1 (on a) and rank 3 (on b)``."""
    each = [f"rank {rank} (on {host})" for rank, host in zip(ranks, hosts, strict=True)]
    return " and ".join(filter(None, [", ".join(each[:-1]), each[-1]]))


def text(verdict: Verdict) -> str:
    """Return one sentence for a verdict."""
    subject, them = verdict.subject, who(verdict.ranks, verdict.hosts)
    begin = f"{verdict.kind.value} {when(subject)}: {them}"
    one = len(verdict.ranks) == 1
    if verdict.kind is Kind.NONDETERMINISTIC:
        return f"{begin} {'finds' if one else 'find'} another value of {subject.what} each time"
    if verdict.kind is Kind.NO_MAJORITY:
        said = (_TWICE if subject.twice else _NO_MAJORITY[verdict.check]).format(what=subject.what)
        return f"{begin} {said}; too few others agree to say who is wrong"
    if subject.together:
        return f"{begin} {_TOGETHER.format(what=subject.what, n=verdict.agreeing_ranks)}"
    differs = f"{_TWICE}, and {{n}} other ranks did not" if subject.twice else _DIFFERS[verdict.kind]
    said = differs.format(what=subject.what, n=verdict.agreeing_ranks)
    return f"{begin} {said}" if one else f"{begin} each {said}"


def next_steps(verdict: Verdict) -> str:
    """Return what to do after a verdict."""
    if verdict.kind is Kind.NONDETERMINISTIC:
        return "the check cannot judge this: an operator may be not repeatable. If it is one rank of many, test its host"
    if verdict.kind is Kind.NO_MAJORITY and verdict.check is Kind.SDC_AT_REST:
        return "if the program writes to the data of tensors between two steps, leave out the check rest; otherwise " + _GO_BACK
    if verdict.kind is Kind.NO_MAJORITY and not verdict.subject.twice:
        return _GO_BACK
    return f"test the memory and the GPU of {', '.join(dict.fromkeys(verdict.hosts))}; " + _GO_BACK


_GO_BACK = "go back to a checkpoint that is not newer than the last step that passed"


def nonfinite(found: NonFinite) -> str:
    """Return one sentence for values that are not finite, or far too large."""
    place = found.place
    much = f", {found.times:.1e} times the largest value of the steps before" if found.times else ""
    why = (_WHY_LARGE if found.times else _WHY)[found.cause]
    where = f"layer {place.layer}" if place.layer else "the whole model"
    if place.backward:
        where = f"the gradient of {where}" if place.layer else "the gradient of the loss"
    batch = f"; the micro-batch is in {found.batch}" if found.batch else ""
    begin = f"{found.kind} step {found.step}, micro-batch {place.micro_batch}: rank {found.rank} (on {found.host})"
    return f"{begin}: first in {where}{much} ({why}){batch}"


_WHY = {
    Cause.DATA_OR_MODEL: "DATA_OR_MODEL: other ranks find the same there",
    Cause.HARDWARE: "HARDWARE: a repetition finds finite values",
    Cause.UNDECIDED: "UNDECIDED",
}


_WHY_LARGE = _WHY | {Cause.HARDWARE: "HARDWARE: a repetition finds usual values"}


def next_nonfinite(found: NonFinite) -> str:
    """Return what to do about values that are not finite."""
    if found.cause is Cause.HARDWARE:
        return f"test the memory and the GPU of {found.host}"
    if found.cause is Cause.DATA_OR_MODEL:
        return "look at the input of the micro-batch, and at what the layer computes"
    return "look at the input and the loss of the micro-batch; nobody could repeat it, so it may also be the hardware"
