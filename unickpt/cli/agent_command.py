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
    parser.add_argument("--report-to", metavar="ADDRESS", help="http://... of the agent on rank 0's host (default: DIR/agent)")


def run(args: argparse.Namespace, out: Output) -> int:
    """Watch until the ranks have ended, and print what is wrong with them."""
    del out
    if args.report_to:
        starting.write_address(args.directory, args.report_to.rstrip("/"))
    watch(args.directory, lambda line: print(line, file=sys.stderr, flush=True))
    return SOUND
