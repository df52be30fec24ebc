"""From the values of several ranks, which should be equal, to a verdict. Texts are in ``words``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

AGREEING = 2  # other hosts that blame one


class Kind(str, Enum):
    """What a verdict says.

    Attributes:
        SDC_COMPUTE: a rank computes a layer or a gradient otherwise than others with the same input.
        SDC_REPLICA: a rank holds another value of a tensor than the others that hold copies.
        SDC_AT_REST: a tensor changed between two steps of the optimizer.
        SDC_UPDATE: a rank's step of the optimizer has another result than its repetition by others.
        NONDETERMINISTIC: a rank's repetitions differ among themselves, so the check cannot judge.
        NO_MAJORITY: values differ, and fewer than two others agree against one.
    """

    SDC_COMPUTE = "SDC_COMPUTE"
    SDC_REPLICA = "SDC_REPLICA"
    SDC_AT_REST = "SDC_AT_REST"
    SDC_UPDATE = "SDC_UPDATE"
    NONDETERMINISTIC = "NONDETERMINISTIC"
    NO_MAJORITY = "NO_MAJORITY"


@dataclass(frozen=True, slots=True)
class Subject:
    """What is voted on.

    Attributes:
        what: name of a tensor or a layer.
        step: optimizer step, from 1.
        micro_batch: of the step, from 0; None where all of a step counts.
        twice: a rank compares with what it has computed itself before.
        together: ranks compute parts of the same layers, so one of them may be wrong for all.
    """

    what: str
    step: int
    micro_batch: int | None = None
    twice: bool = False
    together: bool = False


@dataclass(frozen=True, slots=True)
class Ballot:
    """The value of one rank, or of several that compute something together.

    Attributes:
        rank: global rank.
        host: its host.
        values: hashes: one, or those of several repetitions by this rank.
        beside: other ranks that computed it together with this one, with their hosts.
    """

    rank: int
    host: str
    values: tuple[int, ...]
    beside: tuple[tuple[int, str], ...] = ()

    @property
    def hosts(self) -> set[str]:
        """The hosts of all of them."""
        return {self.host, *(host for _, host in self.beside)}

    @property
    def steady(self) -> bool:
        """Whether all repetitions gave the same."""
        return len(set(self.values)) == 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the votes say.

    Attributes:
        kind: what it is.
        check: the suspicion that was voted on: ``kind`` itself, if there is a majority.
        subject: what, and when.
        ranks: ranks whose value is wrong; of NO_MAJORITY, those with different values; of NONDETERMINISTIC, those whose
            repetitions differ. Ascending.
        hosts: their hosts, in the same order.
        agreeing_ranks: number of ranks that agree, or of groups of ranks that compute together.
        blamed: those of ``hosts`` that at least two other hosts contradict in agreement.
    """

    kind: Kind
    check: Kind
    subject: Subject
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    agreeing_ranks: int = 0
    blamed: tuple[str, ...] = ()


def vote(check: Kind, subject: Subject, ballots: Sequence[Ballot]) -> Verdict | None:
    """Return the verdict of the ranks' values; None if all are equal.

    A rank is named only if more than half of all, so at least two others, have one other value. Its host is blamed only if two
    of these are on two other hosts. Of ranks that compute together it is blamed only if all of them are on one host.
    """
    ballots = sorted(ballots, key=lambda each: each.rank)
    unsteady = [each for each in ballots if not each.steady]
    if unsteady:
        return _verdict(Kind.NONDETERMINISTIC, check, subject, unsteady)
    counts = Counter(each.values[0] for each in ballots)
    if len(counts) < 2:
        return None
    (value, number), *_ = counts.most_common(1)
    if 2 * number <= len(ballots):  # a majority of different values has at least two
        return _verdict(Kind.NO_MAJORITY, check, subject, ballots)
    others = [each for each in ballots if each.values[0] != value]
    agreeing = [each.hosts for each in ballots if each.values[0] == value]
    alone = [each for each in others if len(each.hosts) == 1]
    blamed = tuple(sorted({each.host for each in alone if _other_hosts(agreeing, each.host) >= AGREEING}))
    return _verdict(check, check, subject, others, number, blamed)


def _other_hosts(agreeing: Sequence[set[str]], host: str) -> int:
    """Return on how many hosts those are that agree, apart from one. Each counts once, wherever its ranks are."""
    return len({min(hosts) for hosts in agreeing if host not in hosts})


def written_by_program(changed: Collection[int], ranks: int) -> bool:
    """Return whether the program wrote to what changed between two steps: it did on half of the ranks or more, on several.

    Args:
        changed: ranks.
        ranks: number of those where it could have changed.
    """
    return len(changed) > 1 and 2 * len(changed) >= ranks


def changed_at_rest(subject: Subject, ballots: Sequence[Ballot], *, changed: Sequence[int], ranks: int) -> Verdict | None:
    """Return the verdict about a tensor that changed on some ranks between two steps; None if it is the program's doing.

    If it changed on half of the ranks or more, and on several, the program wrote to it. A rank that changed is named if two
    others that hold the same part did not: what the program writes may depend on the values.

    Args:
        subject: the tensor, and the step after which it changed.
        ballots: of the ranks that hold the same part. Their values do not count.
        changed: all ranks on which it changed, whatever part they hold.
        ranks: number of ranks of the job.
    """
    told = [Ballot(each.rank, each.host, (int(each.rank in changed),)) for each in ballots]
    own = [each for each in told if each.values[0]]
    if not own or written_by_program(changed, ranks) or written_by_program([each.rank for each in own], len(told)):
        return None
    verdict = vote(Kind.SDC_AT_REST, subject, told)
    if verdict is not None and verdict.kind is Kind.SDC_AT_REST:
        return verdict
    return _verdict(Kind.NO_MAJORITY, Kind.SDC_AT_REST, subject, own)


def differing_from_itself(
    subject: Subject, ballots: Sequence[Ballot], differing: Collection[int], *, together: bool = False
) -> Verdict:
    """Return the verdict about what ranks computed twice with two results. No host is blamed: nobody else repeated it.

    Args:
        subject: what they computed.
        ballots: of the ranks that computed something twice. Their values do not count.
        differing: ranks with two results, fewer than half.
        together: they computed it together, so one of them may have changed it for all.
    """
    told = [Ballot(each.rank, each.host, (int(each.rank in differing),)) for each in ballots]
    verdict = None if together else vote(Kind.SDC_COMPUTE, subject, told)
    if verdict is not None and verdict.kind is Kind.SDC_COMPUTE:
        return replace(verdict, blamed=())
    return _verdict(Kind.NO_MAJORITY, Kind.SDC_COMPUTE, subject, [each for each in told if each.values[0]])


def serious(verdicts: Iterable[Verdict]) -> Verdict | None:
    """Return the verdict that says that numbers are wrong: one that blames a host, if there is one."""
    found = [each for each in verdicts if each.kind is not Kind.NONDETERMINISTIC]
    return next((each for each in found if each.blamed), found[0] if found else None)


def _verdict(
    kind: Kind,
    check: Kind,
    subject: Subject,
    of: Sequence[Ballot],
    agreeing_ranks: int = 0,
    blamed: tuple[str, ...] = (),
) -> Verdict:
    every = [told for each in of for told in ((each.rank, each.host), *each.beside)]
    ranks, hosts = tuple(rank for rank, _ in every), tuple(host for _, host in every)
    return Verdict(kind, check, subject, ranks, hosts, agreeing_ranks, blamed)
