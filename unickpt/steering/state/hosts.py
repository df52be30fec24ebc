"""Table of the hosts of a job, for a person and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unickpt.base.logs import printable
from unickpt.steering.state.admission import waits_for
from unickpt.steering.state.membership import Membership, Standing, natural, rank_in_round, ranks_of, standing

HEADER = ("host", "rank", "ranks", "state", "since", "reason")


@dataclass(frozen=True, slots=True)
class HostRow:
    """One host.

    Attributes:
        host: name.
        rank: rank of the host in the round; None if it is not a member.
        ranks: ranks of its workers in the job; empty if it is not a member, or if they are unknown.
        state: what it does.
        since_s: seconds since the state began; None if unknown.
        reason: why it is parked, or what a spare waits for; ''.
    """

    host: str
    rank: int | None
    ranks: range
    state: Standing
    since_s: float | None
    reason: str

    def as_json(self) -> dict[str, Any]:
        """The row as JSON types."""
        return {**asdict(self), "ranks": list(self.ranks), "state": self.state.value}


def host_rows(state: Membership, now_s: float) -> list[HostRow]:
    """Return a row for every known host: members by rank, then the others by name."""
    names = {*state.hosts, *state.parked, *(name for name in state.losses if name not in state.hosts)}
    rows = [_row(state, name, now_s) for name in sorted(names, key=natural)]
    return sorted(rows, key=lambda row: (row.rank is None, row.rank or 0))


def _row(state: Membership, name: str, now_s: float) -> HostRow:
    host, parking, does = state.hosts.get(name), state.parked.get(name), standing(state, name)
    rank = rank_in_round(state, name, host.incarnation) if host is not None else -1
    began_s = None if host is None else host.arrived_s
    if parking is not None:
        began_s = parking.since_s
    elif does is Standing.RUNNING and state.round is not None:
        began_s = state.round.since_s
    since_s = None if began_s is None else max(0.0, now_s - began_s)
    reason = parking.reason if parking is not None else waits_for(state, name, now_s) if does is Standing.SPARE else ""
    return HostRow(name, rank if rank >= 0 else None, ranks_of(state, name), does, since_s, reason)


def _span(ranks: range) -> str:
    return "-" if not ranks else str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def table(rows: Sequence[HostRow]) -> str:
    """Return the rows as text in columns."""
    lines = [
        HEADER,
        *(
            (
                row.host, "-" if row.rank is None else str(row.rank), _span(row.ranks), row.state.value,
                "-" if row.since_s is None else f"{row.since_s:.0f} s", row.reason,
            )
            for row in rows
        ),
    ]  # fmt: skip
    plain = [[printable(cell) for cell in line] for line in lines]
    widths = [max(len(line[column]) for line in plain) for column in range(len(HEADER))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in plain)
