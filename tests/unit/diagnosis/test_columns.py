"""One pass over the records of several ranks gives what a loop over ranks and records gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from unickpt.diagnosis.recording.records import RECORD, Flag, Op, Phase, Records
from unickpt.diagnosis.snapshot.columns import columns_of, largest, newest_places
from unickpt.diagnosis.snapshot.progress import PROGRESS, progress_of_ranks
from unickpt.diagnosis.snapshot.steps import STEP, steps_of_ranks

LENGTH = 1_000_000  # of a step, ns


def _record(number: int, op: Op, **values: Any) -> Any:
    row = np.zeros((), RECORD)
    row["begun"] = row["written"] = number
    row["op"], row["peer"], row["elements_in"] = int(op), -1, number % 7
    for name, value in values.items():
        row[name] = value
    return row


def random_rank(random: np.random.Generator, begin_ns: int, steps: int, *, pairs: bool, device: bool) -> Records:
    """Return what a rank records: the oldest record may be in the middle of a step, and the newest calls have not ended."""
    rows: list[Any] = []
    seq: dict[tuple[int, int, int], int] = {}
    flags = int(Flag.TIMED_ON_DEVICE | Flag.DEVICE_TIMES) if device else 0
    for step in range(1, steps + 1):
        at_ns = begin_ns + step * LENGTH
        for call_ns in np.sort(random.integers(0, LENGTH * 9 // 10, random.integers(0, 9))).tolist():
            op = Op(random.choice([Op.ALL_REDUCE, Op.BARRIER, Op.DATA, Op.GARBAGE, *([Op.SEND, Op.RECEIVE] if pairs else [])]))
            comm, peer = int(random.integers(0, 3)), int(random.integers(0, 3)) if op in (Op.SEND, Op.RECEIVE) else -1
            key = comm, op if peer >= 0 else 0, peer
            seq[key] = seq.get(key, 0) + 1
            last = step == steps and random.random() < 0.5 and op <= Op.RECEIVE
            wait = random.choice([0, call_ns, call_ns + 10])
            rows.append(
                _record(
                    len(rows) + 1, op, comm=comm, peer=peer, seq=seq[key], step=step, call_ns=at_ns + call_ns,
                    start_ns=at_ns + call_ns, wait_ns=at_ns + wait if wait else 0,
                    end_ns=0 if last else at_ns + call_ns + int(random.integers(20, LENGTH // 5)),
                    phase=int(random.choice([Phase.BACKWARD, Phase.BACKWARD, Phase.CHECKPOINT])),
                    flags=(flags & ~int(Flag.DEVICE_TIMES) if random.random() < 0.03 else flags) if op <= Op.RECEIVE else 0,
                )
            )  # fmt: skip
        if step < steps or random.random() < 0.5:
            times = {"call_ns": at_ns, "wait_ns": 0, "end_ns": at_ns + LENGTH}
            rows.append(_record(len(rows) + 1, Op.STEP, step=step, flags=flags, **times))
    found = np.array(rows, RECORD)
    return found[random.integers(0, max(len(found) // 3, 1)) :]


def steps_by_loop(rank: int, records: Records, offset_ns: int, *, device: bool) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for mark in records[records["op"] == Op.STEP]:
        begin, end = int(mark["call_ns"]), int(mark["end_ns"])
        oldest = records[0]
        of_step = [each for each in records if each["op"] <= Op.RECEIVE and each["step"] == mark["step"]]
        if device and (mark["step"] <= oldest["step"] or any(not each["flags"] & Flag.DEVICE_TIMES for each in of_step)):
            continue
        if not device and begin < (oldest["end_ns"] if oldest["op"] >= Op.STEP else oldest["call_ns"]):
            continue
        within = [each for each in records if each["step"] == mark["step"]] if device else [
            each for each in records if begin <= each["call_ns"] < end
        ]  # fmt: skip
        waits = sorted(
            (max(int(each["wait_ns"]), begin), min(int(each["end_ns"]), end))
            for each in records
            if each["op"] <= Op.RECEIVE and each["wait_ns"] > 0 and each["end_ns"] > 0
        )
        waited, until = 0, begin
        for a, b in waits:
            waited += max(b - max(a, until), 0)
            until = max(until, b)
        of = {
            op: sum(int(each["end_ns"] - each["call_ns"]) for each in within if each["op"] == op)
            for op in (Op.DATA, Op.GARBAGE)
        }
        aside = any(each["phase"] in (Phase.CHECKPOINT, Phase.EVALUATION) for each in within)
        calls = sum(each["op"] <= Op.RECEIVE for each in within)
        times = begin + offset_ns, end + offset_ns, end - begin - waited, of[Op.DATA], of[Op.GARBAGE]
        found.append((rank, int(mark["step"]), *times, aside, calls))
    return found


def progress_by_loop(rank: int, records: Records, offset_ns: int) -> set[tuple[Any, ...]]:
    calls = [each for each in records if each["op"] <= Op.RECEIVE]
    waits = [each for each in calls if each["end_ns"] == 0 and each["wait_ns"] > 0]
    inside = max(waits, key=lambda each: each["wait_ns"], default=None)
    if inside is not None and any(each["call_ns"] > inside["wait_ns"] for each in calls):
        inside = None
    rows: dict[tuple[int, int, int], list[Any]] = {}
    for each in calls:
        peer = int(each["peer"])
        ends = {Op.SEND: (rank, peer), Op.RECEIVE: (peer, rank)}.get(Op(each["op"]), (-1, -1))
        rows.setdefault((int(each["comm"]), *ends), []).append(each)
    if any(each["op"] >= Op.SEND for each in calls):  # a rank may send to itself
        split: dict[Any, list[Any]] = {}
        for key, made in rows.items():
            for each in made:
                split.setdefault((*key, each["op"] == Op.RECEIVE), []).append(each)
        rows = split
    found = set()
    for key, made in rows.items():
        last = made[-1]
        within = inside is not None and any(each is inside for each in made)
        shown = inside if within and inside is not None else last
        ended = max((int(each["seq"]) for each in made if each["end_ns"] > 0), default=0)
        blocked, at_ns = int(shown["seq"]) if within else 0, int(shown["call_ns"]) + offset_ns
        found.add((rank, *key[:3], int(last["seq"]), ended, blocked, at_ns, int(shown["op"])))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_steps_and_progress_of_all_ranks(seed: int) -> None:
    random = np.random.default_rng(seed)
    pairs = bool(seed % 3 == 0)
    numbers = random.permutation(9)[: random.integers(1, 6)].tolist()
    device = {rank: bool(seed % 4 == 1 or (seed % 4 == 2 and rank % 2)) for rank in numbers}
    begins = random.integers(1, 1 << 60, len(numbers)).tolist()  # clocks of hosts that are up for years, and of others
    records = {
        rank: random_rank(random, begin_ns, int(random.integers(0, 7)), pairs=pairs, device=device[rank])
        for rank, begin_ns in zip(numbers, begins, strict=True)
    }
    offsets = random.integers(-1000, 1000, len(numbers))
    columns = columns_of(records)
    steps = steps_of_ranks(columns, offsets)
    expected = [
        row
        for at, (rank, part) in enumerate(records.items())
        for row in steps_by_loop(rank, part, int(offsets[at]), device=device[rank] and bool((part["flags"] > 0).any()))
    ]
    shown = [name for name in STEP.names or () if name != "calls"]
    assert steps[shown].tolist() == [row[:-1] for row in expected]
    # a hash of calls is not compared with that of a loop: equal for equal calls, 0 without any
    assert [bool(each) for each in steps["calls"].tolist()] == [row[-1] > 0 for row in expected]
    newest = steps_of_ranks(columns, offsets, newest=2)
    assert newest.tolist() == [
        row for rank in numbers for row in [each for each in steps.tolist() if each[0] == rank][-2:]
    ]  # fmt: skip

    made = columns.where(columns["op"] <= Op.RECEIVE)
    progress = progress_of_ranks(made, made["comm"].astype(np.int32), offsets)
    names = ["rank", "comm", "source", "destination", "entered", "ended", "blocked", "call_ns", "op"]
    assert set(progress[names].tolist()) == {
        row for at, (rank, part) in enumerate(records.items()) for row in progress_by_loop(rank, part, int(offsets[at]))
    }
    assert progress["rank"].tolist() == sorted(progress["rank"].tolist(), key=numbers.index)
    assert progress.dtype == PROGRESS


def test_the_first_largest_value_and_the_newest_places_of_each_rank() -> None:
    at = np.array([0, 0, 0, 2, 2, 2, 2])
    assert largest(at, np.array([1, 3, 3, 5, -4, 5, 2]), 4).tolist() == [1, -1, 3, -1]
    assert newest_places(at, 2, 4).tolist() == [1, 2, 5, 6]
    assert len(newest_places(at[:0], 2, 4)) == 0


def test_times_of_a_rank_with_damaged_records_do_not_touch_those_of_others() -> None:
    random = np.random.default_rng(1)
    sound = random_rank(random, 1 << 50, 6, pairs=False, device=False)
    alone = steps_of_ranks(columns_of({1: sound}), np.zeros(1, np.int64))
    damaged = random_rank(random, 1 << 50, 6, pairs=False, device=False)
    for name in ("call_ns", "wait_ns", "end_ns"):
        damaged[name] = random.integers(-(1 << 63), (1 << 63) - 1, len(damaged))
    beside = steps_of_ranks(columns_of({0: damaged, 1: sound, 2: damaged}), np.zeros(3, np.int64))
    assert beside[beside["rank"] == 1].tolist() == alone.tolist()
