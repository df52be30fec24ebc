"""Arguments of ``unickpt hooks status``."""

from __future__ import annotations

import argparse

EXAMPLE = "unickpt hooks status --all"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--all", action="store_true", help="import the installed frameworks, and show every hook in a table")
    form.add_argument("--json", action="store_true", help="the table as one JSON document; imports the frameworks")
    form.add_argument("--markdown", action="store_true", help="what the hooks are, as docs/developing/hooks.md holds it")
    form.add_argument("--fallbacks", action="store_true", help="what DeepSpeed saves by itself, as the guide for it holds it")
    form.add_argument("--declared", action="store_true", help="the declarations, as unickpt/cli/doctor/hooks.json holds them")
