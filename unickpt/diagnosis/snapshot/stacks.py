"""Stacks of ranks of this host: those that can answer are asked, of the others the newest kept stack is read."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from unickpt.diagnosis.host import early_stacks, stack_dumps
from unickpt.diagnosis.host.process_state import State
from unickpt.diagnosis.host.stack_dumps import Frame
from unickpt.diagnosis.recording.launched import AbsentRank
from unickpt.diagnosis.snapshot.snapshot import RankSnapshot, Snapshot


def can_answer(one: RankSnapshot) -> bool:
    """Return whether a rank can write its stack."""
    return one.state not in (State.DEAD, State.STOPPED, State.UNKNOWN) and not one.closed


def stacks_of(folder: Path, own: Snapshot, ranks: Iterable[int]) -> dict[int, tuple[Frame, ...]]:
    """Return the innermost frames of ranks of this host; empty if unknown.

    A stack that was written before the newest call of a rank is not used.
    """
    paths = {rank: stack_dumps.path_of(folder, rank) for rank in ranks}
    asked = {own.ranks[rank].pid: path for rank, path in paths.items() if can_answer(own.ranks[rank])}
    answers = stack_dumps.ask_all(asked) if asked else {}
    found: dict[int, tuple[Frame, ...]] = {}
    for rank, path in paths.items():
        calls = own.calls["call_ns"][own.calls["rank"] == rank]
        found[rank] = answers.get(own.ranks[rank].pid, ()) or stack_dumps.kept(path, int(calls.max(initial=0)))
    return found


def with_stacks(snapshot: Snapshot, folders: Iterable[Path], ranks: Collection[int]) -> Snapshot:
    """Return the snapshot of a job with the stacks of some ranks, as far as these folders of rings have them."""
    found: dict[int, tuple[Frame, ...]] = {}
    for folder in folders:
        there = [rank for rank in ranks if rank in snapshot.ranks and stack_dumps.path_of(folder, rank).is_file()]
        found |= stacks_of(folder, snapshot, there)
    known = {rank: dataclasses.replace(snapshot.ranks[rank], stack=stack) for rank, stack in found.items() if stack}
    absent = with_early_stacks({rank: one for rank, one in snapshot.absent.items() if rank in ranks})
    return dataclasses.replace(snapshot, ranks={**snapshot.ranks, **known}, absent={**snapshot.absent, **absent})


def with_early_stacks(absent: Mapping[int, AbsentRank]) -> dict[int, AbsentRank]:
    """Return ranks that have not begun to record with the stacks of those that run on this host and listen."""
    here = [one.pid for one in absent.values() if one.pid and one.host == socket.gethostname() and not one.stack]
    answers = stack_dumps.ask_all({pid: early_stacks.path_of(pid) for pid in here}) if here else {}
    return {rank: dataclasses.replace(one, stack=answers.get(one.pid) or one.stack) for rank, one in absent.items()}
