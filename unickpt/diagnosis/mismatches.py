"""Members that are in one and the same call of a communicator with another operation, type or shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from unickpt.diagnosis.summaries import Summaries
from unickpt.diagnosis.verdicts import Syndrome, Verdict, some
from unickpt.timing.records import Op


def mismatches(rows: Summaries, names: Mapping[int, str]) -> list[Verdict]:
    """Calls that somebody waits in, and that are not the same for all who have entered them.

    Who differs from most is at fault; where there are no most, all are named.

    Args:
        rows: of all ranks.
        names: of the communicators.
    """
    rows = rows[rows["source"] < 0]
    seq = np.where(rows["blocked"] > 0, rows["blocked"], rows["entered"])  # or it got through
    order = np.lexsort((seq, rows["comm"]))
    rows, seq = rows[order], seq[order]
    if not len(rows):
        return []
    first = np.flatnonzero(np.concatenate([[True], (np.diff(rows["comm"]) != 0) | (np.diff(seq) != 0)]))
    group = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(rows))))
    differs, waits = np.zeros(len(first), bool), np.zeros(len(first), bool)
    for column in ("op", "dtype", "shape"):
        differs[group[rows[column] != rows[column][first][group]]] = True
    waits[group[rows["blocked"] > 0]] = True
    return [_told(rows[group == at], int(seq[first[at]]), names) for at in np.flatnonzero(differs & waits).tolist()]


def _told(rows: Summaries, seq: int, names: Mapping[int, str]) -> Verdict:
    """Of the members that have entered a call."""
    calls = [tuple(what) for what in rows[["op", "dtype", "shape"]].tolist()]
    counts = Counter(calls)
    most = max(counts.values())
    usual = [what for what, count in counts.items() if count == most]
    ranks = rows["rank"].tolist()
    odd = [rank for rank, what in zip(ranks, calls, strict=True) if what not in usual or len(usual) > 1]
    told = [
        f"{_what(*what)} on ranks {some([rank for rank, own in zip(ranks, calls, strict=True) if own == what])}"
        for what, _ in counts.most_common(4)
    ]
    return Verdict(
        Syndrome.MISMATCH, tuple(sorted(odd)), int(rows["call_ns"].max()), names.get(int(rows["comm"][0]), ""), seq,
        victims=len(rows) - len(odd), confidence=1.0 if len(usual) == 1 else 0.5,
        evidence=(f"call {seq} is " + ", and ".join(told),),
    )  # fmt: skip


def _what(op: int, dtype: int, shape: int) -> str:
    return f"{Op(op).name.lower()} (type {dtype}, shape {shape:08x})"
