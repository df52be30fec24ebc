"""``unickpt whatif``: replay the records of a job, and price its ranks, hosts, links, stages, groups and causes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from unickpt.cli import whatif_stragglers
from unickpt.cli.arguments import numbers, positive, steps, written_as
from unickpt.cli.exit_codes import SOUND
from unickpt.cli.output import Output, human_ms
from unickpt.planning.replay.price import SMALLEST, Questions, WhatIf, analyse
from unickpt.planning.replay.sources import read_trace

JSON_SCHEMA = 1
_SHOWN = 16  # rows of a table


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "places",
        metavar="DIR-or-ADDRESS",
        nargs="+",
        help="folders with the ring files of a job, one per host; or http://... of the job's agent, or DIR/agent; or one "
        "TRACE.parquet of ByteDance's straggler analysis, for its slowdown by the definitions of that analysis",
    )
    parser.add_argument(
        "--steps", type=steps, metavar="A:B", help="first and last step of the window (default: the newest 20 steps)"
    )
    parser.add_argument(
        "--without-rank", type=int, action="append", default=[], metavar="R",
        help="predict a step in which rank R never lets others wait; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--rank-like-peers", type=int, action="append", default=[], metavar="R",
        help="predict a step in which rank R is as fast as the ranks with its role; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--link", type=_link, action="append", default=[], metavar="A-B",
        help="predict a step in which transfers between ranks A and B take as long as others of their size; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--hide", action="append", default=[], metavar="GROUP",
        help="predict a step in which computation hides all communication of a kind of group, such as 'data parallel'; may be "
        "repeated",
    )  # fmt: skip
    parser.add_argument(
        "--link-speed", type=_speed, action="append", default=[], metavar="LINK=FACTOR",
        help="predict a step in which a link is FACTOR times as fast; LINK is two ranks, such as 3-7, or a kind of group; "
        "may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--microbatches", type=positive, action="append", default=[], metavar="N",
        help="predict a step of a 1F1B pipeline with N microbatches, each like those measured; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--chunks", type=positive, action="append", default=[], metavar="N",
        help="predict a step of a 1F1B pipeline with N chunks of each stage, in Megatron's interleaved schedule; may be "
        "repeated",
    )  # fmt: skip
    parser.add_argument(
        "--order", type=_order, action="append", default=[], metavar="R,R,...",
        help="predict a step in which ranks exchange their places: for each rank, the one whose place it takes; may be "
        "repeated",
    )  # fmt: skip
    parser.add_argument(
        "--meta",
        type=Path,
        metavar="META.yaml",
        help="description of the job of a TRACE.parquet. Other sizes than those of the trace are an error",
    )
    parser.add_argument("--json", action="store_true", help="the result as one JSON document")


def _two(text: str) -> tuple[int, ...] | None:
    return numbers(text) if len(set(numbers(text))) == 2 else None


_link = written_as(r"\d+-\d+", "are not two ranks, such as 3-7", _two)
_order = written_as(r"\d+(,\d+)+", "is not a list of ranks, such as 0,2,1,3", numbers)


def _speed(text: str) -> tuple[tuple[int, ...] | str, float]:
    name, _, factor = text.rpartition("=")
    try:
        speed = float(factor)
    except ValueError:
        speed = 0.0
    if not name or not 0 < speed < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not LINK=FACTOR with a positive factor, such as 3-7=2")
    return (_link(name) if re.fullmatch(r"\d+-\d+", name) else name), speed


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
