"""``unickpt whatif``: replay the records of a job, and price its ranks, hosts, links, stages, groups and causes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from unickpt.cli import whatif_stragglers
from unickpt.cli.exit_codes import SOUND
from unickpt.cli.output import Output, human_ms
from unickpt.planning.replay.price import SMALLEST, Questions, WhatIf, analyse
from unickpt.planning.replay.sources import read_trace

JSON_SCHEMA = 1
_SHOWN = 16  # rows of a table


def run(args: argparse.Namespace, out: Output) -> int:
    """Replay and print."""
    if whatif_stragglers.is_trace(args.places):
        return whatif_stragglers.run(args, out)
    questions = Questions(
        tuple(args.without_rank), tuple(args.rank_like_peers), tuple(args.link), tuple(args.hide), tuple(args.link_speed),
        tuple(args.microbatches), tuple(args.chunks), tuple(args.order),
    )  # fmt: skip
    found = analyse(read_trace(args.places), args.steps, questions)
    if args.json:
        out.json({"schema": JSON_SCHEMA, **found.as_json()})
    else:
        _tell(found, out)
    return SOUND


def _tell(found: WhatIf, out: Output) -> None:
    first, last = found.steps
    out.line(f"steps {first} to {last} of {found.ranks} ranks: {human_ms(found.step_s)} a step")
    out.line(f"replayed: {human_ms(found.replayed_s)}; every figure below is +- {human_ms(found.error_s)}")
    out.line(
        f"slowdown {found.slowdown:.3f}: with ranks like their peers, transfers like their class and no pauses a step takes "
        f"{human_ms(found.ideal_s)}"
    )
    _table("cause", found.by_cause, found, out)
    notes = dict.fromkeys(found.without_peers, " (compared with other stages)")
    _table("rank", {f"{rank}{notes.get(rank, '')}": seconds for rank, seconds in found.by_rank.items()}, found, out)
    _table("host", found.by_host, found, out)
    _table("pipeline stage", {str(stage): seconds for stage, seconds in found.by_stage.items()}, found, out)
    _table("link", found.by_link, found, out)
    _table("group", found.by_group, found, out)
    _table("communication that computation could hide, at most", found.exposed, found, out)
    _table("the same by operation and size", found.exposed_operations, found, out)
    rows = [
        (each.question, human_ms(each.step_s), human_ms(each.gain_s), f"+- {human_ms(each.error_s)}") for each in found.answers
    ]
    if rows:
        out.table("what if", ("change", "step", "gain", "error"), rows)


def _table(title: str, prices: Mapping[str, float], found: WhatIf, out: Output) -> None:
    """Print the prices of one kind, the largest first. Prices within the error are combined."""
    ordered = sorted(prices.items(), key=lambda each: -each[1])
    shown = [each for each in ordered[:_SHOWN] if each[1] > max(found.error_s, SMALLEST * found.step_s)]
    rows = [(name, human_ms(seconds), f"{seconds / found.step_s:.1%}") for name, seconds in shown]
    left = len(ordered) - len(shown)
    if left:
        rows.append((f"{left} {'others' if rows else 'in all'}", "", "nothing beyond the error"))
    if ordered:
        out.table(title, ("name", "time", "of a step"), rows)
