"""``unickpt average``: the mean of several checkpoints of one model."""

from __future__ import annotations

import argparse

from unickpt.base.errors import ConfigError, MismatchError
from unickpt.checkpoint.load.folders import list_tags
from unickpt.checkpoint.storage.base import join
from unickpt.cli.edit_common import check_destination, opened, operate
from unickpt.cli.output import Output
from unickpt.transform.edit.average import Average


def run(args: argparse.Namespace, out: Output) -> int:
    """Plan the average, then write."""
    check_destination(args.destination)
    sources = args.sources if args.last is None else _newest(args.sources, args.last)
    step = Average(args.ema)
    table = step.of([opened(source) for source in sources])
    found = operate(table, sources, [step], args, Output.for_lines(out, as_json=args.json))
    if args.json:
        out.json(found.as_json())
    return found.code


def _newest(directories: list[str], count: int) -> list[str]:
    """The ``count`` newest complete checkpoints of a save directory, oldest first."""
    if len(directories) != 1 or count < 2:
        raise ConfigError("--last K needs one save directory, and K of at least 2")
    complete = [tag for tag in list_tags(directories[0]) if tag.complete]
    if len(complete) < count:
        some = ", ".join(tag.tag for tag in complete) or "none"
        raise MismatchError(f"{directories[0]}: {count} complete checkpoints are needed, {len(complete)} are there ({some})")
    return [join(directories[0], tag.tag) for tag in complete[-count:]]
