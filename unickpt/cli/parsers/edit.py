"""Arguments of ``unickpt edit``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from unickpt.cli.parsers.common import add_json, add_writing

EXAMPLE = "unickpt edit runs/a runs/b --no-optimizer --pad-vocabulary-to 128"


class _Append(argparse.Action):
    """Append a step, in the order of the command line."""

    def __call__(self, _parser: object, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        namespace.steps = [*namespace.steps, (str(option_string), values)]


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("source", metavar="SRC", help="a checkpoint, or a save directory (follows 'latest'); a path or a URL")
    parser.add_argument("destination", metavar="DST", help="output directory; an interrupted edit into it goes on")
    parser.set_defaults(steps=[])
    steps = parser.add_argument_group("steps, applied in the order of the command line")
    for option, metavar, help_text in (
        ("--drop", "PATTERN", "leave out the selected tensors: NAME or NAME:STATE; * is any text, {layer} a number"),
        ("--keep", "PATTERN", "leave out all others; several in a row keep what any of them selects"),
        ("--cast", "PATTERN=DTYPE", "cast to another dtype, such as '*:exp_avg=bfloat16'"),
        ("--rename", "OLD=NEW", "rename, such as 'model.layers.{i + 4}.*=model.layers.{i}.*'; several in a row apply at once"),
        ("--rules", "FILE", "split, fuse, transpose or stack by the rules in the file of a dialect"),
        ("--vocabulary", "ROWS", "resize the vocabulary to this number of rows"),
        ("--pad-vocabulary-to", "MULTIPLE", "add rows up to the next multiple"),
        ("--grow", "SIZE=N,...", "make a larger model with the same outputs, as 'unickpt grow' does"),
        ("--upcycle", "E,K[,G]", "make a mixture of experts with the same outputs, as 'unickpt upcycle' does"),
        ("--bits", "BITS|PLAN", "round weights to 4, 8, 4/32, 8/channel or by PLAN.json, as 'unickpt export --to vllm' does"),
        ("--residuals", "RANKS", "residuals of compressed gradients for this number of ranks; 0: none"),
    ):
        steps.add_argument(option, metavar=metavar, action=_Append, help=help_text)
    steps.add_argument("--no-optimizer", nargs=0, action=_Append, help="keep weights and buffers only")
    steps.add_argument("--merge-lora", nargs=0, action=_Append, help="add adapters of peft to their weights")
    rows = parser.add_argument_group("options of --vocabulary and --pad-vocabulary-to")
    rows.add_argument(
        "--new-rows", choices=("mean", "zeros"), default="mean", help="new rows: mean of the old ones (default), or zeros"
    )
    rows.add_argument(
        "--vocabulary-tensors", metavar="PATTERN", help="tensors with a row for each entry (default: by the dialect)"
    )
    rows.add_argument(
        "--vocabulary-dim", type=int, default=0, metavar="N", help="dimension of the rows in these tensors (default: 0)"
    )
    lora = parser.add_argument_group("options of --merge-lora")
    lora.add_argument(
        "--lora-config", type=Path, metavar="PATH", help="adapter_config.json, or the folder that peft saved the adapter in"
    )
    lora.add_argument("--lora-alpha", type=float, metavar="N", help="instead of --lora-config: scaling is N / rank")
    lora.add_argument("--lora-rslora", action="store_true", help="with --lora-alpha: scaling is N / sqrt(rank)")
    lora.add_argument("--lora-adapter", default="", metavar="NAME", help="name of the adapter, if there are several")
    lora.add_argument("--lora-base", metavar="DIR", help="checkpoint of the model, if SRC was saved without its weights")
    lora.add_argument(
        "--lora-keep-dtype",
        action="store_true",
        help="round the product to the dtype of the adapters, as peft with autocast_adapter_dtype=False (default: float32)",
    )
    parser.add_argument(
        "--model-config",
        metavar="FOLDER",
        help="with --grow and --upcycle: folder with the config.json of SRC (default: what SRC keeps of its model)",
    )
    add_writing(parser)
    add_json(parser)
