"""Arguments of ``unickpt grow``."""

from __future__ import annotations

import argparse

from unickpt.cli.parsers.common import add_writing

EXAMPLE = "unickpt grow runs/small runs/large --set hidden_size=1024 num_hidden_layers=24"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    configure_model(parser)
    parser.add_argument(
        "--set", dest="changes", metavar="SIZE=N", nargs="+", action="extend", required=True,
        help="new sizes by keys of config.json: hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, "
        "intermediate_size, moe_intermediate_size",
    )  # fmt: skip
    parser.add_argument(
        "--place", metavar="N,N,...", help="number in the new model of every old layer (default: at equal distances)"
    )
    parser.add_argument(
        "--zero-second-moments", action="store_true", help="fill second moments with zeros instead of their mean, to compare"
    )
    parser.add_argument(
        "--schedule", type=int, default=0, metavar="STEPS",
        help="write schedule.json: a learning-rate schedule for a model that would take this number of steps from scratch",
    )  # fmt: skip
    add_writing(parser)


def configure_model(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that ``grow`` and ``upcycle`` have in common."""
    parser.add_argument(
        "source", metavar="SRC", help="a checkpoint, a save directory (follows 'latest'), or a folder of transformers weights"
    )
    parser.add_argument("destination", metavar="DST", help="output directory; gets a checkpoint and the new config.json")
    parser.add_argument(
        "--config", metavar="FOLDER", help="folder with the config.json of SRC (default: what SRC keeps of its model)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of free elements (default: 0)")
    parser.add_argument("--json", action="store_true", help="the result as one JSON document")
