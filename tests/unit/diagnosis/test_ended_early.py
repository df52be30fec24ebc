"""Calls that wait for ranks that have ended in order: which side is at fault."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.diagnosis.agent.made import S, call, ring
from unickpt.diagnosis.detectors.examine import examine
from unickpt.diagnosis.detectors.hints import EndedEarly, OneCallMore
from unickpt.diagnosis.detectors.verdicts import Syndrome, Verdict
from unickpt.diagnosis.host.process_exits import ExitStatus
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.recording.rank_ranges import progressions
from unickpt.diagnosis.recording.records import Op, Phase
from unickpt.diagnosis.recording.ring_folder import read_folder
from unickpt.diagnosis.snapshot.snapshot import take_snapshot


def verdicts(folder: Path, waiting: Collection[int], ended: Collection[int]) -> list[Verdict]:
    """Return the verdicts on four ranks, some of which have waited in call 3 for three seconds, too short for a hang."""
    now = time.monotonic_ns()
    for rank in range(4):
        made = ring(folder, rank)
        for number in (1, 2):
            call(made, number, now - 13 * S, now - 12 * S)
        if rank in waiting:
            call(made, 3, now - 3 * S, 0)
        made.state(heartbeat_ns=now, step=20, newest=3, phase=int(Phase.BACKWARD))
    seen = take_snapshot(read_folder(folder))
    over = {rank: replace(seen.ranks[rank], closed=True, exit=ExitStatus()) for rank in ended}
    return list(examine(replace(seen, ranks={**seen.ranks, **over})).verdicts)


@pytest.mark.parametrize(
    ("waiting", "ended", "at_fault", "next_step"),
    [((0, 1, 3), (2,), (2,), EndedEarly), ((0,), (1, 2, 3), (0,), OneCallMore), ((0, 1), (2, 3), (0, 1), OneCallMore)],
    ids=["one has ended early", "one makes a call too many", "two of each, and no earlier step shows the order"],
)
def test_the_smaller_side_is_at_fault(
    tmp_path: Path, waiting: tuple[int, ...], ended: tuple[int, ...], at_fault: tuple[int, ...], next_step: type
) -> None:
    (found,) = verdicts(tmp_path, waiting, ended)
    assert (found.syndrome, found.ranks, found.victims) == (Syndrome.MISMATCH, at_fault, len(waiting))
    assert isinstance(found.next, next_step)


@pytest.mark.parametrize("known", [True, False], ids=["all ends are known", "the others are about to end"])
def test_the_end_of_a_rank_whose_call_failed_because_the_others_had_ended_is_no_second_verdict(
    tmp_path: Path, known: bool
) -> None:
    """As after a barrier of rank 0 alone, when the connections of the others close."""
    now = time.monotonic_ns()
    for rank in range(4):
        made = ring(tmp_path, rank)
        call(made, 1, now - 13 * S, now - 12 * S)
        if rank == 0:
            call(made, 2, now - 3 * S, 0)
        made.state(heartbeat_ns=now, step=20, newest=2, phase=int(Phase.BACKWARD))
    seen = take_snapshot(read_folder(tmp_path))
    end = ExitStatus() if known else None
    state = State.DEAD if known else State.RUNNING
    ranks = {rank: replace(one, closed=True, exit=end, state=state) for rank, one in seen.ranks.items()}
    ranks[0] = replace(ranks[0], exit=ExitStatus(0, 1), state=State.DEAD, failed=True, raised=True)
    found = examine(replace(seen, ranks=ranks))
    said = [(each.syndrome, each.ranks) for each in found.verdicts]
    assert (said, found.end) == ([(Syndrome.MISMATCH, (0,))] if known else [], [])


def test_of_several_calls_that_wait_for_one_rank_that_with_most_waiters_is_named(tmp_path: Path) -> None:
    """Ranks 0 and 1 wait in a call of all, rank 3 in a call of its own group with rank 2, which has ended."""
    now = time.monotonic_ns()
    for rank in range(4):
        made = ring(tmp_path, rank)
        for number in (1, 2):
            call(made, number, now - 13 * S, now - 12 * S)
        if rank in (0, 1):
            call(made, 3, now - 3 * S, 0)
        if rank == 3:
            call(made, 3, now - 13 * S, now - 12 * S)
            made.list_communicator({"name": "pair", "label": "", "backend": "gloo", "ranks": progressions([2, 3])})
            made.put(4, now - 3 * S, 0, now - 3 * S, 0, 1, 8, 8, 1, int(Op.ALL_REDUCE), 2, 0, 0, 0, -1, 0, 20, 7)
        made.state(heartbeat_ns=now, step=20, newest=4, phase=int(Phase.BACKWARD))
    seen = take_snapshot(read_folder(tmp_path))
    over = {2: replace(seen.ranks[2], closed=True, exit=ExitStatus())}
    (found,) = examine(replace(seen, ranks={**seen.ranks, **over})).verdicts
    assert (found.ranks, found.victims, found.seq) == ((2,), 2, 3)


@pytest.mark.parametrize(
    ("waiting", "ended"), [((0, 1), (2,)), ((0, 1, 3), ()), ((), (2,))], ids=["one more may come", "none", "nobody waits"]
)
def test_a_call_that_may_still_end_is_not_judged(tmp_path: Path, waiting: tuple[int, ...], ended: tuple[int, ...]) -> None:
    assert verdicts(tmp_path, waiting, ended) == []
