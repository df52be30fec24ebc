"""``unickpt average``: the mean of several checkpoints of one model."""

from __future__ import annotations

import argparse

from unickpt.base.errors import ConfigError, MismatchError
from unickpt.checkpoint.load.folders import list_tags
from unickpt.checkpoint.storage.base import join
from unickpt.cli.edit_common import check_destination, configure_writing, opened, operate
from unickpt.cli.output import Output
from unickpt.transform.edit.average import Average


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("destination", metavar="DST", help="output directory; an interrupted average into it goes on")
    parser.add_argument(
        "sources", metavar="SRC", nargs="+", help="checkpoints in order, or one save directory with --last; paths or URLs"
    )
    parser.add_argument("--last", type=int, metavar="K", help="average the K newest complete checkpoints of the save directory")
    parser.add_argument(
        "--ema", type=float, metavar="DECAY", help="exponential moving average: m = DECAY * m + (1 - DECAY) * x, in order"
    )
    configure_writing(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Plan the average, then write."""
    check_destination(args.destination)
    sources = args.sources if args.last is None else _newest(args.sources, args.last)
    step = Average(args.ema)
    return operate(step.of([opened(source) for source in sources]), sources, [step], args, out)


def _newest(directories: list[str], count: int) -> list[str]:
    """The ``count`` newest complete checkpoints of a save directory, oldest first."""
    if len(directories) != 1 or count < 2:
        raise ConfigError("--last K needs one save directory, and K of at least 2")
    complete = [tag for tag in list_tags(directories[0]) if tag.complete]
    if len(complete) < count:
        some = ", ".join(tag.tag for tag in complete) or "none"
        raise MismatchError(f"{directories[0]}: {count} complete checkpoints are needed, {len(complete)} are there ({some})")
    return [join(directories[0], tag.tag) for tag in complete[-count:]]
