"""Arguments of ``unickpt hooks``."""

from __future__ import annotations

import argparse

from unickpt.cli.parsers.common import add_command

EXAMPLE = "unickpt hooks status"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    add_command(actions, "status", "say whether unickpt acts, and in which frameworks", "unickpt.cli.parsers.hooks_status")
