"""``unickpt agent``: watch the ranks of this host; training starts it by itself."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from unickpt.agent import starting
from unickpt.agent.watching import watch
from unickpt.cli.exit_codes import SOUND
from unickpt.cli.output import Output


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="where the rings of this host's ranks are")
    parser.add_argument(
        "--report-to", metavar="ADDRESS",
        help="http://... of the agent on rank 0's host (default: what DIR/agent holds); - reads it from standard input: other "
        "users of this host see command lines, and the address holds a secret",
    )  # fmt: skip


def run(args: argparse.Namespace, out: Output) -> int:
    """Watch until the ranks have ended, and print what is wrong with them."""
    del out
    given = sys.stdin.readline(starting.LONGEST_ADDRESS) if args.report_to == "-" else args.report_to or ""
    address = given.strip().rstrip("/")
    watch(
        args.directory,
        lambda line: print(line, file=sys.stderr, flush=True),
        address=lambda: address or starting.read_address(args.directory),
    )
    return SOUND
