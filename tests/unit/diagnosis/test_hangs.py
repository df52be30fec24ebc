"""Who is at fault, on made-up rows: what the simulated jobs do not all come to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.diagnosis.agent.made import hung
from unickpt.diagnosis.detectors.device_waits import infer_device_waits
from unickpt.diagnosis.detectors.examine import examine
from unickpt.diagnosis.detectors.hangs import FOLLOWED, hangs
from unickpt.diagnosis.detectors.mismatches import mismatches
from unickpt.diagnosis.detectors.observations import CallVariant, CircularWait
from unickpt.diagnosis.detectors.verdicts import Syndrome, Verdict
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.recording.records import Op
from unickpt.diagnosis.recording.ring_folder import read_folder
from unickpt.diagnosis.snapshot.progress import PROGRESS
from unickpt.diagnosis.snapshot.snapshot import GroupInfo, take_snapshot

PIPELINE = 9


def rows(
    *entries: tuple[Any, ...],
    shapes: dict[int, int] | None = None,
    elements: int | None = None,
    since: dict[int, int] | None = None,
) -> Any:
    """``(rank, comm, entered, blocked)`` of collectives, ``(rank, (source, destination), entered, blocked)`` of pairs."""
    out = []
    for rank, where, entered, blocked in entries:
        pair = where if isinstance(where, tuple) else (-1, -1)
        op = Op.ALL_REDUCE if pair == (-1, -1) else Op.SEND if pair[0] == rank else Op.RECEIVE
        comm = where if pair == (-1, -1) else PIPELINE
        moment, shape = (since or {}).get(rank, 100), (shapes or {}).get(rank, 5)
        count = shape if elements is None else elements
        out.append((rank, comm, *pair, entered, entered - (blocked > 0), blocked, moment, int(op), 2, shape, count, 0))
    return np.array(out, PROGRESS)


def found(entries: Any, members: dict[int, list[int]], before_ns: int = 1_000) -> list[Verdict]:
    named = {comm: GroupInfo(f"{comm}", f"kind {comm}", ()) for comm in [*members, PIPELINE]}
    return hangs(entries, {c: np.array(m) for c, m in members.items()}, named, before_ns=before_ns)


def test_the_rank_that_blocks_most_ranks_of_a_cycle_skipped_a_call() -> None:
    """Stages (0, 1, 2) and (3, 4, 5). Rank 0 has left out an all-reduce: it has sent once more than 1 and 2, and waits for 3,
    which waits for 4 and 5, which wait for what 1 and 2 have not sent, for they wait for 0."""
    entries = rows(
        (0, 1, 4, 0), (1, 1, 5, 5), (2, 1, 5, 5), (3, 2, 4, 4), (4, 2, 3, 0), (5, 2, 3, 0), (0, (3, 0), 1, 1),
        (3, (3, 0), 0, 0), (4, (1, 4), 2, 2), (1, (1, 4), 1, 0), (5, (2, 5), 2, 2), (2, (2, 5), 1, 0),
    )  # fmt: skip
    (verdict,) = found(entries, {1: [0, 1, 2], 2: [3, 4, 5]})
    assert (verdict.syndrome, verdict.ranks, verdict.victims) == (Syndrome.DEADLOCK, (0,), 5)
    assert len(verdict.evidence) == 4


def test_the_fewer_of_two_sides_are_at_fault_and_of_two_equal_ones_both() -> None:
    """Rank 0 is in the group of all, where it waits for the others of group 1, and these for it there."""
    entries = [(0, 0, 8, 8), (1, 1, 3, 3), (2, 1, 3, 3), (3, 0, 8, 8)]
    (verdict,) = found(rows(*entries), {0: [0, 1, 2, 3], 1: [0, 1, 2]})
    assert (verdict.syndrome, verdict.ranks, verdict.victims) == (Syndrome.DEADLOCK, (0,), 3)
    first = verdict.evidence[0]
    assert isinstance(first, CircularWait)
    assert (first.call.op, first.call.seq, first.call.group.name) == (Op.ALL_REDUCE, 8, "0")
    assert (first.waiters, first.awaited) == ((0,), (1, 2))
    (verdict,) = found(rows((0, 0, 8, 8), (1, 1, 3, 3)), {0: [0, 1], 1: [0, 1]})
    assert verdict.ranks == (0, 1)


@pytest.mark.parametrize(("second", "odd"), [(6, 0), (5, 1), (90, 0)])  # 90: of a stage that calls more often
def test_a_rank_that_skipped_a_call_is_found_from_the_others(second: int, odd: int) -> None:
    """Rank 0 waits in its pair's call for rank 1, which waits for it in that of all. Has 0 left out the one, or 1 the other?"""
    entries = [(0, 1, second + 1, second + 1), (1, 1, second, 0), (1, 0, 9, 9), (0, 0, 8, 0)]
    entries += [(2, 2, 6, 0), (3, 2, 6, 0), (2, 0, 9, 9), (3, 0, 9, 9)]
    labels = {0: "world", 1: "pair", 2: "pair"}
    groups = {comm: GroupInfo(f"{comm}", label, ()) for comm, label in labels.items()}
    members = {0: np.arange(4), 1: np.array([0, 1]), 2: np.array([2, 3])}
    (verdict,) = hangs(rows(*entries), members, groups, before_ns=1_000)
    assert (verdict.syndrome, verdict.ranks) == (Syndrome.DEADLOCK, (odd,))


def test_a_rank_that_waits_for_somebody_since_a_moment_ago_is_not_stuck() -> None:
    entries = rows((0, (1, 0), 1, 1), (1, (2, 1), 1, 1), since={0: 100, 1: 900})
    assert found(entries, {}, before_ns=500) == []
    (verdict,) = found(entries, {}, before_ns=1_000)
    assert verdict.ranks == (2,)


def test_of_two_ranks_that_differ_both_are_named_and_of_three_the_odd_one() -> None:
    members = {0: GroupInfo("g", "", ())}
    (verdict,) = mismatches(rows((0, 0, 4, 4), (1, 0, 4, 4), shapes={1: 7}), members)
    assert (verdict.ranks, verdict.confidence) == ((0, 1), 0.5)
    (verdict,) = mismatches(rows((0, 0, 4, 4), (1, 0, 4, 4), (2, 0, 4, 0), shapes={1: 7}), members)
    assert (verdict.ranks, verdict.confidence, verdict.victims) == ((1,), 1.0, 2)
    assert {each.ranks for each in verdict.evidence if isinstance(each, CallVariant)} == {(1,), (0, 2)}
    assert mismatches(rows((0, 0, 4, 0), (1, 0, 4, 0), shapes={1: 7}), members) == []  # nobody waits: both got through
    assert mismatches(rows((0, 0, 4, 4), (1, 0, 3, 0), shapes={1: 7}), members) == []  # another call


def test_another_shape_with_as_many_elements_is_no_mismatch_where_backends_count_elements() -> None:
    """Of DeepSpeed's pipeline: one stage broadcasts ``()`` and the others receive it into ``(1,)``."""
    members = {0: GroupInfo("g", "", ())}
    entries = rows((0, 0, 4, 4), (1, 0, 4, 4), (2, 0, 4, 4), shapes={1: 7}, elements=8)
    assert mismatches(entries, members) == []
    entries["elements"][1] = 0  # not known: the shapes decide
    assert [verdict.ranks for verdict in mismatches(entries, members)] == [(1,)]
    entries["elements"][1] = 9
    assert [verdict.ranks for verdict in mismatches(entries, members)] == [(1,)]
    entries["elements"], entries["op"] = 8, Op.ALL_GATHER  # the members' own shapes may not differ
    assert [verdict.ranks for verdict in mismatches(entries, members)] == [(1,)]


def test_thousands_of_blocked_ranks_are_reported() -> None:
    """Half of a job is stuck; the victims of each are counted to the end for the first ones."""
    world = 4_000
    entries = rows(*[(rank, 0, 5 + rank % 2, 6 if rank % 2 else 0) for rank in range(world)])
    verdicts = found(entries, {0: list(range(world))})
    assert [verdict.ranks[0] for verdict in verdicts] == list(range(0, world, 2))
    assert len(verdicts) > FOLLOWED
    assert {verdict.victims for verdict in verdicts} == {world // 2}


@pytest.mark.parametrize(("native", "later", "waits"), [(1, False, [5, 5, 0]), (0, False, [0, 0, 0]), (1, True, [5, 0, 0])])
def test_a_rank_waits_in_the_newest_call_of_the_reducer_that_a_member_has_not_entered(
    native: int, later: bool, waits: list[int]
) -> None:
    """The reducer of DDP waits in C++, so no wait is recorded; a rank that makes another call since does not wait."""
    known = rows((0, 0, 5, 0), (1, 0, 5, 0), (2, 0, 4, 0), (1, 1, 3, 0), since={0: 100, 1: 100, 2: 90})
    known["ended"][:3], known["native"] = 4, native
    known["call_ns"][3] = 200 if later else 50
    made = infer_device_waits(known, (), {0: np.arange(3), 1: np.arange(3)}, all_stand=False)
    assert [int(made["blocked"][(made["rank"] == rank) & (made["comm"] == 0)][0]) for rank in range(3)] == waits


@pytest.mark.parametrize(("known", "named"), [((2, 3), []), ((1, 2, 3), [(2,)]), ((0, 1, 2, 3), [(2,)])])
def test_equal_sides_of_a_mismatch_are_not_blamed_while_other_members_are_not_known(
    tmp_path: Path, known: tuple[int, ...], named: list[tuple[int, ...]]
) -> None:
    hung(tmp_path, culprit=-1)
    whole = take_snapshot(read_folder(tmp_path))
    table = whole.rows[np.isin(whole.rows["rank"], known)].copy()
    table["elements"] = np.where(table["rank"] == 2, 5, 7)
    table["shape"] = table["elements"]
    seen = replace(whole, rows=table, ranks={rank: whole.ranks[rank] for rank in known})
    assert [verdict.ranks for verdict in examine(seen, after_s=5.0).verdicts] == named


@pytest.mark.parametrize(("since_s", "named"), [(0.2, []), (0.8, [(1, 2)])])
def test_equal_sides_of_a_mismatch_in_which_a_rank_has_died_wait_for_news_of_the_others(
    tmp_path: Path, since_s: float, named: list[tuple[int, ...]]
) -> None:
    hung(tmp_path, culprit=-1, since_s=since_s)
    whole = take_snapshot(read_folder(tmp_path))
    table = whole.rows.copy()
    table["elements"] = table["shape"] = np.where(table["rank"] == 2, 5, 7)
    late = np.isin(table["rank"], (0, 3))
    table["entered"][late], table["blocked"][late] = 2, 0
    dead = replace(whole.ranks[2], state=State.DEAD, heard_ns=whole.now_ns)
    found = examine(replace(whole, rows=table, ranks={**whole.ranks, 2: dead})).verdicts
    assert [verdict.ranks for verdict in found if verdict.syndrome is Syndrome.MISMATCH] == named
