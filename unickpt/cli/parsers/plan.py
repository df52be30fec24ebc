"""Arguments of ``unickpt plan``."""

from __future__ import annotations

import argparse

from unickpt.cli.parsers.common import add_command

EXAMPLE = "unickpt plan parallel rings/host0 --devices 48 --global-batch 192"
# plans, each with one line of help; ``unickpt.cli.plan_...`` has ``run(args, out)``, the module of that name here its arguments
PLANS = {
    "bits": "choose the bits of each weight under a limit of memory",
    "parallel": "choose tensor, pipeline and data parallelism and the size of a microbatch",
    "pipeline": "cut the layers into pipeline stages of even time",
    "precision": "choose the layers of slow ranks that compute in bf16",
    "ranks": "order hosts so that heavy groups avoid slow links and places",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    plans = parser.add_subparsers(metavar="PLAN", dest="plan", required=True)
    for name, help_text in PLANS.items():
        add_command(plans, name, help_text, f"unickpt.cli.parsers.plan_{name}")
