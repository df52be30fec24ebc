"""Arguments of ``unickpt whatif``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from unickpt.cli.parsers.common import numbers, positive, steps, written_as

EXAMPLE = "unickpt whatif rings/host0 rings/host1 --without-rank 3"


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
        "--steps",
        type=steps,
        metavar="A:B",
        help="first and last step of the window (default: the newest 20, or up to 64 if those take another time on average)",
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
