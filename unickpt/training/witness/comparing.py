"""Compares what ranks hold, and votes. Every rank of those that compare comes to the same verdicts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from unickpt.training.witness.agreeing import Circle, Ranks
from unickpt.training.witness.held import MOST_STATES, Snapshot, Stepped, repeated
from unickpt.training.witness.vote import Ballot, Kind, Subject, Verdict, changed_at_rest, vote, written_by_program

REPEATS = 3
MOST = 8  # tensors of one check whose verdicts are made
Changed = tuple[str, tuple[int, ...]]  # name of a tensor, and the ranks that hold the same values, if there are several


def compare_replicas(snapshot: Snapshot, stepped: Sequence[Stepped], circle: Circle) -> list[Verdict]:
    """Return the verdicts about copies that differ. Every rank of the circle calls it.

    Of copies that differ, each rank takes the hashes three times more before it votes.

    Args:
        snapshot: of this rank.
        stepped: parameters of the optimizer.
        circle: those that compare, and what.
    """
    ranks = circle.ranks
    every = ranks.gather(snapshot.columns(circle.positions))
    row = {rank: at for at, rank in enumerate(ranks.ranks)}
    suspects = [
        (column, group)
        for column in range(every.shape[1])
        for group in circle.copies[column // 2]
        if len(_present(column, [int(every[row[rank], column]) for rank in group])) > 1
    ][:MOST]
    if not suspects:
        return []
    own = [repeated(stepped[circle.positions[column // 2]], column % 2, REPEATS) for column, _ in suspects]
    again = ranks.gather(torch.tensor(own, dtype=torch.int64, device="cpu"))
    verdicts = []
    for number, (column, group) in enumerate(suspects):
        values = {rank: (int(every[row[rank], column]), *again[row[rank], number].tolist()) for rank in group}
        verdicts.append(_verdict(stepped[circle.positions[column // 2]], column % 2, snapshot.step, values, ranks))
    return [each for each in verdicts if each is not None]


def _present(column: int, values: Sequence[int]) -> set[int]:
    """Return the different values. A rank without states, such as of a divided optimizer, has none to compare."""
    return {value for value in values if value or column % 2 == 0}


def _verdict(stepped: Stepped, has_states: int, step: int, values: dict[int, tuple[int, ...]], ranks: Ranks) -> Verdict | None:
    alone = {rank: each[1 + REPEATS :] for rank, each in values.items() if each[0] or not has_states}
    differing = [at for at in range(has_states, 1 + MOST_STATES * has_states) if len({each[at] for each in alone.values()}) > 1]
    what = ", ".join(stepped.numbered(at) for at in differing) or stepped.called("states" if has_states else "")
    ballots = [Ballot(rank, ranks.host_of(rank), values[rank][: 1 + REPEATS]) for rank in alone]
    return vote(Kind.SDC_REPLICA, Subject(what, step), ballots)


def compare_at_rest(changed: Sequence[Changed], step: int, ranks: Ranks) -> list[Verdict]:
    """Return the verdicts about tensors that changed since a step. Every rank calls it.

    Args:
        changed: those on this rank.
        step: just after which the tensors were as they should be.
        ranks: of the job.
    """
    without = sum(not copies for _, copies in changed)
    counts = ranks.gather(torch.tensor([len(changed), without], device="cpu"))
    if not bool(counts.any()):
        return []
    first = ranks.gather_objects([what for what, _ in changed[:MOST]])
    chosen = sorted({what for of_rank in first for what in of_rank})[:MOST]
    own = dict(changed)  # of what others name, too: each rank's first tensors are different ones
    every = ranks.gather_objects([(what, own[what]) for what in chosen if what in own])
    alone = {rank for rank, count in zip(ranks.ranks, counts[:, 1].tolist(), strict=True) if count}
    hosts = dict(zip(ranks.ranks, ranks.hosts, strict=True))
    return verdicts_at_rest(dict(zip(ranks.ranks, every, strict=True)), step, hosts, alone)


def verdicts_at_rest(
    found: Mapping[int, Sequence[Changed]], step: int, hosts: Mapping[int, str], alone: Collection[int]
) -> list[Verdict]:
    """Return the verdicts about tensors that changed.

    Args:
        found: those of each rank, of the same few tensors.
        step: as above.
        hosts: of all ranks of the job.
        alone: ranks on which something changed of which there is no copy.
    """
    on: dict[str, dict[int, tuple[int, ...]]] = {}
    for rank, changed in found.items():
        for what, copies in changed:
            on.setdefault(what, {})[rank] = copies
    program = written_by_program(alone, len(hosts))
    verdicts = []
    for what in sorted(on):
        groups = sorted({copies for copies in on[what].values() if copies})
        own = [(rank,) for rank, copies in on[what].items() if not copies and not program]
        for group in (*groups, *own):
            ballots = [Ballot(rank, hosts[rank], ()) for rank in group]
            verdicts.append(changed_at_rest(Subject(what, step), ballots, changed=sorted(on[what]), ranks=len(hosts)))
    return [each for each in verdicts if each is not None]
