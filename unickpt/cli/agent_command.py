"""``unickpt agent``: watch the ranks of this host. Training starts it automatically."""

from __future__ import annotations

import argparse
import sys

from unickpt.base.errors import ConfigError
from unickpt.cli.exit_codes import SOUND
from unickpt.cli.output import Output
from unickpt.diagnosis.agent import launch
from unickpt.diagnosis.agent.loop import watch


def run(args: argparse.Namespace, out: Output) -> int:
    """Watch until all ranks have ended, and print problems to standard error."""
    del out
    if not args.directory.is_dir():
        raise ConfigError(f"{args.directory}: no such directory; name the folder with the ring files of this host")
    given = sys.stdin.readline(launch.LONGEST_ADDRESS) if args.report_to == "-" else args.report_to or ""
    address = given.strip().rstrip("/")
    watch(
        args.directory,
        lambda line: print(line, file=sys.stderr, flush=True),
        address=lambda: address or launch.read_address(args.directory),
    )
    return SOUND
