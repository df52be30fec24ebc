"""``unickpt whatif TRACE.parquet``: the slowdown of a trace of ByteDance's straggler analysis, by its own definitions."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from unickpt.base.errors import FormatError
from unickpt.cli.exit_codes import SOUND
from unickpt.cli.output import Output
from unickpt.planning.replay.parquet_traces import SUFFIX, read_operations
from unickpt.planning.replay.stragglers import SlowdownShare, Stragglers, find_stragglers

JSON_SCHEMA = 1
_SHOWN = 8  # rows of a table
_SMALLEST = 1.0005  # slowdown that is shown


def is_trace(places: list[str]) -> bool:
    """Return whether the arguments name such a trace."""
    return any(place.endswith(SUFFIX) for place in places)


def run(args: argparse.Namespace, out: Output) -> int:
    """Analyse and print.

    Raises:
        FormatError: there are other places, or questions that these traces do not answer.
    """
    if len(args.places) > 1:
        raise FormatError(f"one {SUFFIX} file is a whole job; {len(args.places)} places are given")
    changes = ("without_rank", "rank_like_peers", "link", "hide", "link_speed", "microbatches", "chunks", "order")
    asked = [f"--{name.replace('_', '-')}" for name in changes if getattr(args, name)]
    if asked:
        raise FormatError(f"a {SUFFIX} file has no records of unickpt, so {' and '.join(asked)} cannot be predicted from it")
    found = find_stragglers(read_operations(Path(args.places[0]), args.meta, args.steps))
    if args.json:
        out.json({"schema": JSON_SCHEMA, **found.as_json()})
    else:
        _tell(found, out)
    return SOUND


def _tell(found: Stragglers, out: Output) -> None:
    out.line(
        f"{len(found.steps)} steps of {found.ranks} workers: {found.step_s:.3f} s a step, replayed {found.replayed_s:.3f} s"
    )
    out.line(
        f"slowdown {found.slowdown:.3f}: with the mean of each kind of computation and the median of each kind of transfer, a "
        f"step takes {found.ideal_s:.3f} s"
    )
    ranks = ", ".join(map(str, found.worst_ranks))
    out.line(
        f"the worst workers ({ranks}) explain {_share(found.worst)} of the slowdown, the last stage {_share(found.last_stage)}"
    )
    _table("operation", found.by_kind, out)
    _table("place in the data-parallel group", found.by_replica, out)
    _table("pipeline stage", found.by_stage, out)
    _table("worker", found.by_rank, out)


def _share(share: SlowdownShare) -> str:
    return f"{share.removed:.1%}"


def _table(title: str, slowdowns: Mapping[int, float] | Mapping[str, float], out: Output) -> None:
    ordered = sorted(((str(name), slowdown) for name, slowdown in slowdowns.items()), key=lambda each: -each[1])
    shown = [each for each in ordered[:_SHOWN] if each[1] >= _SMALLEST]
    rows = [(name, f"{slowdown:.3f}") for name, slowdown in shown]
    if len(ordered) > len(rows):
        rows.append(
            (f"{len(ordered) - len(rows)} {'others' if rows else 'in all'}", f"below {_SMALLEST:.4f}" if not rows else "")
        )
    out.table(title, ("name", "slowdown by it alone"), rows)
