"""Arguments of ``unickpt replay-step``."""

from __future__ import annotations

import argparse
from pathlib import Path

EXAMPLE = "unickpt replay-step runs/a --step 500 -- torchrun --nproc-per-node 8 train.py"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments. What follows ``--`` is the program that starts all ranks (``_Command.starts``)."""
    parser.usage = (
        "unickpt replay-step DIR --step N [--until M] [--times COUNT] [--out FOLDER]\n"
        "                           [--other-layout] [--json] [-- COMMAND [ARGUMENT ...]]\n"
        "       unickpt replay-step --compare FOLDER [--json]"
    )
    about = "COMMAND starts all ranks of the job. Without it, the variables are printed with which you start them."
    parser.description = "\n".join(filter(None, [parser.description, about]))
    parser.add_argument("directory", metavar="DIR", nargs="?", help="folder with the checkpoints of the job; a path or a URL")
    parser.add_argument("--step", type=int, metavar="N", help="step of the checkpoint from which the next step is computed")
    parser.add_argument("--until", type=int, metavar="M", help="last step to compute; default: N + 1")
    parser.add_argument("--times", type=int, default=2, metavar="COUNT", help="number of repetitions; default: 2")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="new folder for what the ranks record; all hosts see it")
    parser.add_argument(
        "--other-layout", action="store_true", help="the job may have another parallel layout than the one that saved"
    )
    parser.add_argument("--compare", type=Path, metavar="FOLDER", help="compare what jobs have recorded that you have started")
    parser.add_argument("--json", action="store_true", help="the result as one JSON document; the job prints to standard error")
