"""``unickpt agent``: watch the ranks of this host. Training starts it automatically."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from unickpt.base.errors import ConfigError
from unickpt.cli.exit_codes import SOUND
from unickpt.cli.output import Output
from unickpt.diagnosis.agent import launch
from unickpt.diagnosis.agent.loop import watch


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="folder with the ring files of the ranks on this host")
    parser.add_argument(
        "--report-to",
        metavar="ADDRESS",
        help="http://... of the agent on rank 0's host (default: what DIR/agent holds); - reads it from standard input: other "
        "users of this host see command lines, and the address holds a secret",
    )


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
