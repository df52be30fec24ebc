"""Arguments of ``unickpt plan precision``."""

from __future__ import annotations

import argparse
from pathlib import Path

from unickpt.cli.parsers.common import numbers, written_as

EXAMPLE = "unickpt plan precision rings/host0 --ranks 2,3 --speedup 1.8 --out plan.json"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "folders", metavar="DIR", type=Path, nargs="+",
        help="folders with the ring files of a job, one per host, in which timing.layers_every has left times of layers",
    )  # fmt: skip
    slow = parser.add_mutually_exclusive_group(required=True)
    slow.add_argument("--ranks", type=_ranks, metavar="R,R,...", help="the slow ranks")
    slow.add_argument("--device", metavar="NAME", help="kind of device of the slow ranks, as in the files of layers")
    low = parser.add_mutually_exclusive_group(required=True)
    low.add_argument("--speedup", type=_factor, metavar="F", help="a layer in bf16 takes its time divided by F")
    low.add_argument(
        "--low", type=Path, nargs="+", metavar="DIR", help="folders of a run of the same layers in bf16 on the slow devices"
    )
    errors = parser.add_mutually_exclusive_group()
    errors.add_argument(
        "--checkpoint", metavar="DIR", help="checkpoint of the job, by whose weights and second moments layers are compared"
    )
    errors.add_argument("--errors", type=Path, metavar="FILE", help="JSON object with an error for each layer, instead")
    parser.add_argument(
        "--within", type=_percent, default=1.0, metavar="PERCENT",
        help="how much longer than with all layers in bf16 a step may be (default: 1)",
    )  # fmt: skip
    parser.add_argument("--steps", type=_steps, metavar="A:B", help="steps of the window (default: the newest 20)")
    parser.add_argument("--out", type=Path, metavar="PLAN.json", help='write the plan for the option "precision"')
    parser.add_argument("--json", action="store_true", help="the plan as one JSON document")


_ranks = written_as(
    r"\d{1,9}(,\d{1,9})*", "is not a list of ranks, such as 2,3", lambda text: tuple(sorted(set(numbers(text))))
)
_factor = written_as(r"\d+(\.\d+)?", "is not a number above 1", lambda text: float(text) if float(text) > 1 else None)
_percent = written_as(r"\d+(\.\d+)?", "is not a number from 0", float)
_steps = written_as(r"\d+:\d+", "is not A:B, such as 100:119", numbers)
