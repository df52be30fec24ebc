"""From the history of a job to its rounds, downtime by cause, and effective training time. Pure.

Effective training time is training seconds divided by wall seconds (ByteRobust's ETTR). Training counts from the moment when
the job passes the furthest step of earlier rounds, up to its last step. Everything between the last step of a round and that
moment in a later round is downtime, and belongs to what ended the round:

    stalled    from the last step to the end of the round: the fault, its detection, the deadline of the policy
    regrouping from the end to the start of the next workers: they stop, the hosts meet again, or too few are there
    starting   from there to the first step: imports, process groups, the load of the checkpoint, the first step
    repeating  from there until the furthest step is passed: work since the last checkpoint
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from unickpt.steering.state.history import HistoryEntry, Kind

START = "start of the job"
PARTS = ("training", "repeating", "starting", "regrouping", "stalled")
MOST_ROUNDS, MOST_ORDERS = 2000, 500  # that a page shows


@dataclasses.dataclass(frozen=True, slots=True)
class RoundTimes:
    """One round whose workers could start. All times in seconds since the epoch.

    Attributes:
        epoch: round.
        hosts: members by rank.
        world: number of workers; 0 if unknown.
        opened_s: when its members were chosen.
        running_s: when its workers could start.
        first_s: when its first step was seen; ``ended_s`` if it made none; ``running_s`` if steps are unknown in this job.
        passed_s: when it passed the furthest step of earlier rounds; ``ended_s`` if it did not.
        last_s: when its last step was seen.
        ended_s: when it ended, or the end of the history.
        furthest: furthest step of earlier rounds; -1 in the first.
        step: its last step; 0 if unknown.
        cause: what ended it: the row of an order, ``PERSON``, or an ``Ending``; '' while it runs.
        text: the same in words.
    """

    epoch: tuple[int, int]
    hosts: tuple[str, ...]
    world: int
    opened_s: float
    running_s: float
    first_s: float
    passed_s: float
    last_s: float
    ended_s: float
    furthest: int
    step: int
    cause: str
    text: str

    @property
    def training_s(self) -> float:
        """Seconds of steps that no earlier round has made."""
        return max(0.0, self.last_s - self.passed_s)


@dataclasses.dataclass(frozen=True, slots=True)
class Downtime:
    """Time without training that one event has cost.

    Attributes:
        cause: as in ``RoundTimes``, or ``START``.
        text: in words.
        begin_s: since when.
        stalled_s, regrouping_s, starting_s, repeating_s: its parts, in seconds. See the module.
        repaired: whether training went on after it.
    """

    cause: str
    text: str
    begin_s: float
    stalled_s: float = 0.0
    regrouping_s: float = 0.0
    starting_s: float = 0.0
    repeating_s: float = 0.0
    repaired: bool = False

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.stalled_s + self.regrouping_s + self.starting_s + self.repeating_s


@dataclasses.dataclass(frozen=True, slots=True)
class JobTimes:
    """A job.

    Attributes:
        begin_s, end_s: first and last entry of the history.
        steps_known: whether the history has steps, which it has in timed jobs.
        rounds: its rounds, in order.
        downtimes: its downtimes, in order.
        orders: its orders.
        closed: why there are no more rounds; '' while there are.
        finished: whether the program ended with success.
    """

    begin_s: float
    end_s: float
    steps_known: bool
    rounds: tuple[RoundTimes, ...]
    downtimes: tuple[Downtime, ...]
    orders: tuple[HistoryEntry, ...]
    closed: str = ""
    finished: bool = False

    @property
    def wall_s(self) -> float:
        """Seconds from begin to end."""
        return self.end_s - self.begin_s

    @property
    def training_s(self) -> float:
        """Seconds of training."""
        return sum(each.training_s for each in self.rounds)

    @property
    def effective(self) -> float:
        """Training seconds divided by wall seconds."""
        return self.training_s / self.wall_s if self.wall_s > 0 else 0.0

    def by_cause(self) -> dict[str, tuple[int, float]]:
        """Return for each cause the number of downtimes and their seconds, the largest first."""
        sums: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        for each in self.downtimes:
            count, seconds = sums[each.cause]
            sums[each.cause] = count + 1, seconds + each.seconds
        return dict(sorted(sums.items(), key=lambda item: -item[1][1]))


def job_times(history: Sequence[HistoryEntry]) -> JobTimes:
    """Return the times of a job.

    Args:
        history: entries by time, as from ``history.merged``.
    """
    if not history:
        return JobTimes(0.0, 0.0, False, (), (), ())
    begin_s, end_s = history[0].at_s, history[-1].at_s
    steps_known = any(entry.step and entry.moved_s for entry in history)
    closed = next((entry for entry in history if entry.kind is Kind.CLOSED), None)
    if closed is not None:
        end_s = closed.at_s
    rounds = tuple(_rounds(history, closed, end_s, steps_known))
    orders = tuple(entry for entry in history if entry.kind is Kind.ORDER)
    return JobTimes(
        begin_s,
        end_s,
        steps_known,
        rounds,
        tuple(_downtimes(rounds, begin_s, end_s, closed)),
        orders,
        closed.text if closed is not None else "",
        closed is not None and closed.finished,
    )


def _rounds(
    history: Sequence[HistoryEntry], closed: HistoryEntry | None, end_s: float, steps_known: bool
) -> Iterator[RoundTimes]:
    of_round: dict[tuple[int, int], list[HistoryEntry]] = defaultdict(list)
    for entry in history:
        of_round[entry.epoch].append(entry)
    for epoch, entries in sorted(of_round.items()):
        kinds = {entry.kind: entry for entry in entries if entry.kind not in (Kind.STEP, Kind.ALIVE, Kind.ORDER)}
        running = kinds.get(Kind.RUNNING)
        if running is None:
            continue
        ended = kinds.get(Kind.ENDED) or (closed if closed is not None and closed.epoch == epoch else None)
        until_s = min(max(running.at_s, ended.at_s if ended is not None else end_s), end_s)
        furthest = max(entry.furthest for entry in entries)
        moves = sorted((entry.moved_s, entry.step) for entry in entries if entry.step and entry.moved_s)
        last_step = max((step for _, step in moves), default=0)
        first_s = moves[0][0] if moves else until_s if steps_known else running.at_s
        passed_s = min((at_s for at_s, step in moves if step > furthest), default=until_s if steps_known else running.at_s)
        last_s = min((at_s for at_s, step in moves if step == last_step), default=until_s)
        if ended is None or ended.finished:
            last_s = until_s  # it trains, or its last act was to end
        cause, text = _cause(entries, ended)
        first_s, passed_s, last_s = (min(max(at_s, running.at_s), until_s) for at_s in (first_s, passed_s, last_s))
        world, opened = max(entry.world for entry in entries), kinds.get(Kind.OPENED, running)
        yield RoundTimes(
            epoch, running.hosts, world, opened.at_s, running.at_s, first_s, passed_s, last_s, until_s, furthest, last_step,
            cause, text,
        )  # fmt: skip


def _cause(entries: Sequence[HistoryEntry], ended: HistoryEntry | None) -> tuple[str, str]:
    """Return why a round ended. An order that was executed says more than the end that it caused."""
    if ended is None:
        return "", ""
    if ended.finished:
        return "finished", ended.text
    ordered = [each for each in entries if each.kind is Kind.ORDER and each.action in ("park", "restart", "stop")]
    return (ordered[-1].cause, ordered[-1].text) if ordered else (ended.cause or "closed", ended.text)


def _downtimes(rounds: Sequence[RoundTimes], begin_s: float, end_s: float, closed: HistoryEntry | None) -> Iterator[Downtime]:
    """Return the downtimes. A round that makes no progress adds to the downtime before it."""
    now = Downtime(START, "", begin_s)
    left_s = begin_s  # end of the round before
    for each in rounds:
        now = dataclasses.replace(
            now,
            regrouping_s=now.regrouping_s + max(0.0, each.running_s - left_s),
            starting_s=now.starting_s + each.first_s - each.running_s,
            repeating_s=now.repeating_s + max(0.0, min(each.passed_s, max(each.last_s, each.first_s)) - each.first_s),
        )
        left_s = each.ended_s
        stalled_s = max(0.0, each.ended_s - max(each.last_s, each.first_s))
        if each.passed_s < each.ended_s:
            yield dataclasses.replace(now, repaired=True)
            now = Downtime(each.cause, each.text, each.last_s, stalled_s)
        else:
            now = dataclasses.replace(now, stalled_s=now.stalled_s + stalled_s)
    over = closed is not None and closed.finished
    if rounds and (rounds[-1].cause and not over):  # no round has come after it
        now = dataclasses.replace(now, regrouping_s=now.regrouping_s + max(0.0, end_s - left_s))
    if now.seconds > 0:
        yield now


# ---------------------------------------------------------------- for a page


def as_json(job: JobTimes) -> dict[str, Any]:
    """Return the times as JSON types for the report: seconds since the begin of the job; long lists are cut."""
    rounds = job.rounds[-MOST_ROUNDS:]
    return {
        "begin_ms": job.begin_s * 1e3, "wall_s": job.wall_s, "training_s": job.training_s, "effective": job.effective,
        "steps_known": job.steps_known, "closed": job.closed, "finished": job.finished, "in_all": len(job.rounds),
        "parts": list(PARTS),
        "rounds": [
            {
                "round": f"{each.epoch[0]}.{each.epoch[1]}", "hosts": list(each.hosts[:64]), "count": len(each.hosts),
                "world": each.world, "step": each.step, "furthest": each.furthest, "cause": each.cause, "text": each.text,
                **{
                    name: getattr(each, name) - job.begin_s
                    for name in ("running_s", "first_s", "passed_s", "last_s", "ended_s")
                },
            }
            for each in rounds
        ],
        "causes": [[cause, count, seconds] for cause, (count, seconds) in job.by_cause().items()],
        "downtimes": [
            [each.begin_s - job.begin_s, each.cause, each.stalled_s, each.regrouping_s, each.starting_s, each.repeating_s]
            for each in job.downtimes[-MOST_ROUNDS:]
        ],
        "orders": [[each.at_s - job.begin_s, each.action, each.text] for each in job.orders[-MOST_ORDERS:]],
    }  # fmt: skip
