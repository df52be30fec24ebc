"""``unickpt plan``: plans for the next run of a job. Each kind of plan is a subcommand with a module of its own."""

from __future__ import annotations

import argparse
from importlib import import_module

from unickpt.cli.output import Output

# name -> module with ``configure(parser)`` and ``run(args, out)``, and one line of help
PLANS = {
    "bits": ("unickpt.cli.plan_bits", "choose the bits of each weight under a limit of memory"),
    "parallel": ("unickpt.cli.plan_parallel", "choose tensor, pipeline and data parallelism and the size of a microbatch"),
    "pipeline": ("unickpt.cli.plan_pipeline", "cut the layers into pipeline stages of even time"),
    "precision": ("unickpt.cli.plan_precision", "choose the layers of slow ranks that compute in bf16"),
    "ranks": ("unickpt.cli.plan_ranks", "order hosts so that heavy groups avoid slow links and places"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    plans = parser.add_subparsers(metavar="PLAN", dest="plan", required=True)
    for name, (module, help_text) in PLANS.items():
        found = import_module(module)
        subparser = plans.add_parser(name, help=help_text, description=f"{help_text[:1].upper()}{help_text[1:]}.")
        found.configure(subparser)
        subparser.set_defaults(run_plan=found.run)


def run(args: argparse.Namespace, out: Output) -> int:
    """Run the subcommand."""
    code: int = args.run_plan(args, out)
    return code
