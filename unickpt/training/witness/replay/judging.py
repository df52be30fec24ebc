"""From the repetitions of some steps to what differs, on which ranks first, and what that means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from unickpt.base.errors import ConfigError
from unickpt.training.witness.replay.records import Phase, Record, Row, Run
from unickpt.training.witness.vote import written_by_program

MOST = 8  # names of tensors of one rank
_Key = tuple[int, Phase, int, str, int]  # step, phase, micro-batch, name, and how often it was there before


class Meaning(str, Enum):
    """What the repetitions say.

    Attributes:
        EQUAL: all bits are equal.
        SDC_COMPUTE: what differs, differs first on one rank, or on ranks of one host of several: suspect its hardware.
        NONDETERMINISTIC: half of the ranks or more compute something else each time: suspect an operator.
        NO_MAJORITY: too few ranks to say whether it is an operator or the hardware.
        INPUT: the script gives the model another input.
        ORIGINAL: all repetitions are equal, and the checkpoint after the steps holds something else.
    """

    EQUAL = "EQUAL"
    SDC_COMPUTE = "SDC_COMPUTE"
    NONDETERMINISTIC = "NONDETERMINISTIC"
    NO_MAJORITY = "NO_MAJORITY"
    INPUT = "INPUT"
    ORIGINAL = "ORIGINAL"


@dataclass(frozen=True, slots=True)
class Place:
    """What differs first on a rank.

    Attributes:
        step: of the optimizer; the loaded one if the ranks hold other values after the load.
        phase: what kind of value it is.
        micro_batch: of the step, from 0; -1 where all of a step counts.
        what: name of the tensor or layer.
        alike: runs that have the same value, numbered from 1: one group for each value, the largest first.
    """

    step: int
    phase: Phase
    micro_batch: int
    what: str
    alike: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class RankDifferences:
    """What differs on a rank.

    Attributes:
        rank: global rank.
        host: its host in the first run.
        first: what differs first, in the order in which this rank has computed it.
        position: number of the first one among the rows of this rank.
        counts: how many values differ, of how many, by phase, in the step of the first one.
        names: tensors or layers of the first one's phase and step that differ, the first ``MOST`` of them.
    """

    rank: int
    host: str
    first: Place
    position: int
    counts: tuple[tuple[Phase, int, int], ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Against:
    """The repetitions beside the checkpoint of the last step, which the original run has saved.

    Attributes:
        reason: why it was not compared, or ''.
        equal: runs that end with its values on all ranks, numbered from 1.
        ranks: what differs in the first run.
        tensors: number of tensors that were compared, over all ranks.
    """

    reason: str = ""
    equal: tuple[int, ...] = ()
    ranks: tuple[RankDifferences, ...] = ()
    tensors: int = 0


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the repetitions say.

    Attributes:
        meaning: what it is.
        step, until: the loaded step, and the last one that was computed.
        runs: number of repetitions.
        world: number of ranks.
        values: number of values that each run has, over all ranks.
        ranks: what differs between the runs, ascending. Empty if they are equal.
        origin: ranks on which it differs first: of the others, what they got from these may be wrong.
        against: the comparison with the checkpoint of ``until``.
        random: ranks whose random generators have other states before the first difference.
        facts: what the runs do not have alike, such as the device of a rank.
        model_parallel: number of ranks that compute one replica of the model together.
    """

    meaning: Meaning
    step: int
    until: int
    runs: int
    world: int
    values: int
    ranks: tuple[RankDifferences, ...]
    origin: tuple[int, ...]
    against: Against
    random: tuple[int, ...] = ()
    facts: tuple[str, ...] = ()
    model_parallel: int = 1

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return self.meaning is Meaning.EQUAL


def judge(runs: Sequence[Run], step: int, until: int, saved: Run | None = None, *, why_not: str = "") -> Judgement:
    """Return what repetitions say.

    Args:
        runs: at least two, of all ranks.
        step, until: the loaded step, and the last one that was computed.
        saved: what the ranks hold after a load of the checkpoint of ``until``; None: it was not compared.
        why_not: why not.

    Raises:
        ConfigError: the runs have other ranks, or a rank has not come to the last step.
    """
    _require_whole(runs, until)
    values = {rank: [_keyed(_known(run[rank].rows)) for run in runs] for rank in sorted(runs[0])}
    every = [_compared(rank, runs[0][rank].host, each) for rank, each in values.items()]
    found = tuple(each for each in every if each is not None)
    against = Against(why_not) if saved is None else _against(runs, saved, until)
    parallel = max(each.model_parallel for each in runs[0].values())
    if found:
        meaning, origin = _meaning(found, {rank: each.host for rank, each in runs[0].items()}, parallel)
    else:
        meaning, origin = Meaning.ORIGINAL if against.ranks else Meaning.EQUAL, ()
    return Judgement(
        meaning, step, until, len(runs), len(runs[0]), sum(len(each[0]) for each in values.values()), found, origin,
        against, _random(runs, found), _other_facts(runs), parallel,
    )  # fmt: skip


def _require_whole(runs: Sequence[Run], until: int) -> None:
    if len(runs) < 2:
        raise ConfigError("there are fewer than two repetitions to compare")
    for number, run in enumerate(runs, 1):
        if set(run) != set(runs[0]):
            raise ConfigError(f"run {number} has {len(run)} ranks, and run 1 has {len(runs[0])}")
        short = [rank for rank, each in run.items() if max((row.step for row in each.rows), default=-1) < until]
        if short:
            raise ConfigError(f"run {number}: rank {', '.join(map(str, short[:8]))} has not come to step {until}")


def _keyed(rows: Iterable[Row]) -> dict[_Key, int]:
    """Return the values by what they are. The order is that of the rows."""
    seen: Counter[tuple[int, Phase, int, str]] = Counter()
    found = {}
    for row in rows:
        name = (row.step, row.phase, row.micro_batch, row.what)
        found[(*name, seen[name])] = row.value
        seen[name] += 1
    return found


def _known(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.phase is not Phase.RANDOM]


def _compared(rank: int, host: str, runs: Sequence[Mapping[_Key, int]]) -> RankDifferences | None:
    """Return what differs between runs of a rank."""
    order = {key: at for at, key in enumerate(dict.fromkeys(key for run in runs for key in run))}
    differ = [key for key in order if len({run.get(key) for run in runs}) > 1]
    if not differ:
        return None
    first = differ[0]
    groups: dict[int | None, list[int]] = {}
    for number, run in enumerate(runs, 1):
        groups.setdefault(run.get(first), []).append(number)
    alike = tuple(sorted(map(tuple, groups.values()), key=lambda each: (-len(each), each)))
    of_step = [key for key in order if key[0] == first[0]]
    wrong = set(differ)
    by_phase = {phase: [key in wrong for key in of_step if key[1] is phase] for phase in Phase}
    counts = tuple((phase, sum(each), len(each)) for phase, each in by_phase.items() if any(each))
    names = tuple(dict.fromkeys(key[3] for key in differ if key[:2] == first[:2]))[:MOST]
    return RankDifferences(rank, host, Place(*first[:4], alike), order[first], counts, names)


def _stage(place: Place) -> int:
    """Return how far values have gone when they differ first: on the rank itself, between ranks, held."""
    return 0 if place.phase.local else 1 if place.phase is Phase.REDUCED else 2


def _meaning(found: Sequence[RankDifferences], hosts: Mapping[int, str], parallel: int) -> tuple[Meaning, tuple[int, ...]]:
    """Return what the differences mean, and the ranks on which they begin.

    What a rank computes by itself tells on which rank it begins. Reduced gradients, and all that follows, differ on all ranks.
    """
    begin = min((each.first.step, _stage(each.first)) for each in found)
    first = [each for each in found if (each.first.step, _stage(each.first)) == begin]
    given = tuple(each.rank for each in first if each.first.phase is Phase.INPUT)
    if given:
        return Meaning.INPUT, given
    if (
        parallel > 1 and begin[1] == 0 and 1 < len(first) <= parallel
    ):  # what one rank computes comes to the others of its replica
        earliest = min((each.first.micro_batch, each.position) for each in first)
        return Meaning.NO_MAJORITY, tuple(each.rank for each in first if (each.first.micro_batch, each.position) == earliest)
    origin = tuple(each.rank for each in first)
    own = {hosts[rank] for rank in origin}
    if len(hosts) == 1:
        return Meaning.NO_MAJORITY, origin
    if len(origin) == 1 or (len(own) == 1 and len(set(hosts.values())) > 1):
        return Meaning.SDC_COMPUTE, origin
    return (Meaning.NONDETERMINISTIC if written_by_program(origin, len(hosts)) else Meaning.NO_MAJORITY), origin


def _against(runs: Sequence[Run], saved: Run, until: int) -> Against:
    """Compare what each run holds after the last step with what the original run has saved."""
    if set(saved) != set(runs[0]):
        return Against(f"its load has {len(saved)} ranks, and the repetitions have {len(runs[0])}")

    def held(record: Record) -> dict[_Key, int]:
        moving = {row.what for each in (record, saved[record.rank]) for row in each.rows if row.moving}
        rows = [row for row in record.rows if row.step == until and row.phase is Phase.HELD and row.what not in moving]
        return _keyed(rows)

    equal: list[int] = []
    shown: tuple[RankDifferences, ...] = ()
    for number, run in enumerate(runs, 1):
        every = [_compared(rank, run[rank].host, [held(run[rank]), held(saved[rank])]) for rank in sorted(run)]
        differing = tuple(each for each in every if each is not None)
        if not differing:
            equal.append(number)
        elif number == 1:
            shown = differing
    inexact = next(filter(None, (each.inexact for each in runs[0].values())), "")
    if inexact and not equal:
        return Against(inexact)
    return Against("", tuple(equal), shown, sum(len(held(each)) for each in saved.values()))


def _random(runs: Sequence[Run], found: Sequence[RankDifferences]) -> tuple[int, ...]:
    """Return the ranks whose random generators differ before the step or the micro-batch of their first difference."""
    ranks = []
    for each in found:
        until = (each.first.step, max(each.first.micro_batch, 0))
        states = [
            _keyed(row for row in run[each.rank].rows if row.phase is Phase.RANDOM and (row.step, row.micro_batch) <= until)
            for run in runs
        ]
        if any(state != states[0] for state in states):
            ranks.append(each.rank)
    return tuple(ranks)


def _other_facts(runs: Sequence[Run]) -> tuple[str, ...]:
    found = []
    for rank in sorted(runs[0]):
        records = [run[rank] for run in runs]
        for name in ("host", *records[0].facts):
            values = [each.host if name == "host" else each.facts.get(name, "") for each in records]
            if len(set(values)) > 1:
                found.append(f"rank {rank}: {name} {', then '.join(dict.fromkeys(values))}")
    return tuple(found[:MOST])
