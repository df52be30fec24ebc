"""Compares what all ranks hold, and votes. Every rank comes to the same verdicts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_unickpt.witnessing.agreeing import Ranks
from torch_unickpt.witnessing.held import MOST_STATES, Snapshot, Stepped, repeated
from unickpt.training.witness.vote import Ballot, Kind, Subject, Verdict, changed_at_rest, vote

REPEATS = 3
MOST = 8  # tensors of one check whose verdicts are made


def compare_replicas(
    snapshot: Snapshot, stepped: Sequence[Stepped], copies: Sequence[Sequence[tuple[int, ...]]], ranks: Ranks
) -> list[Verdict]:
    """Return the verdicts about copies that differ. Every rank calls it.

    Of copies that differ, each rank takes the hashes three times more before it votes.

    Args:
        snapshot: of this rank.
        stepped: parameters of the optimizer.
        copies: ranks with the same part, for each part, of each parameter.
        ranks: those that compare.
    """
    every = ranks.gather(snapshot.columns(len(stepped)))
    row = {rank: at for at, rank in enumerate(ranks.ranks)}
    suspects = [
        (column, group)
        for column in range(every.shape[1])
        for group in copies[column // 2]
        if len(_present(column, [int(every[row[rank], column]) for rank in group])) > 1
    ][:MOST]
    if not suspects:
        return []
    own = [repeated(stepped[column // 2], column % 2, REPEATS) for column, _ in suspects]
    again = ranks.gather(torch.tensor(own, dtype=torch.int64))
    verdicts = []
    for number, (column, group) in enumerate(suspects):
        values = {rank: (int(every[row[rank], column]), *again[row[rank], number].tolist()) for rank in group}
        verdicts.append(_verdict(stepped[column // 2], column % 2, snapshot.step, values, ranks))
    return [each for each in verdicts if each is not None]


def _present(column: int, values: Sequence[int]) -> set[int]:
    """Return the different values. A rank without states, such as of a divided optimizer, has none to compare."""
    return {value for value in values if value or column % 2 == 0}


def _verdict(stepped: Stepped, has_states: int, step: int, values: dict[int, tuple[int, ...]], ranks: Ranks) -> Verdict | None:
    alone = {rank: each[1 + REPEATS :] for rank, each in values.items() if each[0] or not has_states}
    differing = [at for at in range(has_states, 1 + MOST_STATES * has_states) if len({each[at] for each in alone.values()}) > 1]
    what = ", ".join(stepped.numbered(at) for at in differing) or stepped.called("states" if has_states else "")
    ballots = [Ballot(rank, _host(ranks, rank), values[rank][: 1 + REPEATS]) for rank in alone]
    return vote(Kind.SDC_REPLICA, Subject(what, step), ballots)


def compare_at_rest(
    snapshot: Snapshot, stepped: Sequence[Stepped], copies: Sequence[Sequence[tuple[int, ...]]], ranks: Ranks
) -> tuple[list[Verdict], int]:
    """Return the verdicts about tensors that changed since a step, and how many were not compared. Every rank calls it.

    Args:
        snapshot: of this rank, just after the step.
        stepped, copies, ranks: as above.
    """
    changed, left_out = snapshot.changed(stepped)
    own = [at * (1 + MOST_STATES) + min(number, MOST_STATES) for at, number in changed[:MOST]]
    every = ranks.gather(torch.tensor([*own, *[-1] * (MOST - len(own))], dtype=torch.int64)).tolist()
    on: dict[int, list[int]] = {}
    for rank, codes in zip(ranks.ranks, every, strict=True):
        for code in codes:
            on.setdefault(code, []).append(rank)
    on.pop(-1, None)
    verdicts = []
    for code in sorted(on)[:MOST]:
        at, number = divmod(code, 1 + MOST_STATES)
        subject = Subject(stepped[at].numbered(number), snapshot.step)
        alone = [(rank,) for rank in on[code] if not any(rank in group for group in copies[at])]
        for group in (*copies[at], *alone):
            ballots = [Ballot(rank, _host(ranks, rank), ()) for rank in group]
            verdicts.append(changed_at_rest(subject, ballots, changed=on[code], ranks=len(ranks.ranks)))
    return [each for each in verdicts if each is not None], left_out


def _host(ranks: Ranks, rank: int) -> str:
    return ranks.hosts[ranks.ranks.index(rank)]
