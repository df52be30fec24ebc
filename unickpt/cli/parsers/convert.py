"""Arguments of ``unickpt convert``."""

from __future__ import annotations

import argparse

from unickpt.cli.parsers.common import add_json

EXAMPLE = "unickpt convert runs/stock/checkpoint-500 runs/a/checkpoint-500"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "source",
        metavar="SRC",
        help="directory of a transformers model (safetensors), a DeepSpeed checkpoint (its own or a universal one, also of "
        "Megatron-DeepSpeed), a Megatron checkpoint (torch_dist or torch), torch.distributed.checkpoint (FSDP, torchtitan); or "
        "the save directory above it; or the folder from which Trainer, Accelerate or Lightning resumes under DeepSpeed",
    )
    parser.add_argument(
        "directory",
        metavar="DST",
        help="output directory; an interrupted conversion into it goes on where it stopped. For a folder of Trainer, "
        "Accelerate or Lightning it becomes such a folder, with the program's own files",
    )
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="number of files at a time (default: 2)")
    parser.add_argument(
        "--take",
        action="append",
        default=[],
        metavar="CLASS",
        help="class whose pickled values are read: module.Class, or module. for all classes of a module; its code never runs",
    )
    add_json(parser)
