"""Arguments of ``unickpt plan bits``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from unickpt.base.errors import ConfigError
from unickpt.cli.parsers.common import written_as
from unickpt.cli.parsers.export import DTYPES
from unickpt.transform.quantise.scheme import CHOICES, INDICATORS, Scheme

EXAMPLE = "unickpt plan bits runs/a --memory 24 --out plan.json"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("directory", metavar="DIR", help="a checkpoint, a save directory, or checkpoint-500 of a Trainer run")
    parser.add_argument("--memory", type=_gigabytes, metavar="GB", help="memory of one device for weights and cache, in GB")
    parser.add_argument(
        "--device", type=_device, action="append", default=[], metavar="NAME=GB",
        help="device of the next stage of a pipeline, and its memory; once for each stage",
    )  # fmt: skip
    parser.add_argument("--reorder", action="store_true", help="put unlike devices into the best order")
    parser.add_argument(
        "--choices", type=_choices, default=_choices(",".join(CHOICES)), metavar="BITS,BITS,...",
        help="schemes to choose from, as for 'export --bits', such as 4,4/32,8,16 (default: 4,8,16)",
    )  # fmt: skip
    parser.add_argument(
        "--indicator",
        choices=("auto", *INDICATORS),
        default="auto",
        help="predicted error of a weight. second-moment: the optimizer's squared gradients times the squared change. "
        "weight-error: the squared change. variance: LLM-PQ's. auto (default): the first if the checkpoint has it, otherwise "
        "the second",
    )
    parser.add_argument("--inputs", type=Path, metavar="FILE", help="statistics of unickpt.InputStatistics, for the last two")
    parser.add_argument(
        "--errors", type=Path, metavar="FILE", help="errors of unickpt.measure_rounding, instead of an indicator"
    )
    parser.add_argument(
        "--tokens", type=_count, default=0, metavar="N", help="tokens whose keys and values are in memory at once (default: 0)"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FOLDER", help="folder with the config.json of the model, as for 'export'"
    )
    parser.add_argument("--dialect", default="", metavar="FAMILY", help="family of the model, as for 'export'")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="dtype of what is not rounded, as for 'export --to vllm'")
    parser.add_argument("--out", type=Path, metavar="PLAN.json", help="write the plan for 'export --to vllm --bits PLAN.json'")
    parser.add_argument("--json", action="store_true", help="the plan as one JSON document")


_gigabytes = written_as(
    r"\d+(\.\d+)?", "is not a number of GB above 0", lambda text: round(float(text) * 1e9) if float(text) > 0 else None
)
_count = written_as(r"\d{1,12}", "is not a number", int)


def _device(text: str) -> tuple[str, int]:
    name, _, memory = text.rpartition("=")
    if not re.fullmatch(r"[\w.-]+", name):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=GB, such as a100=80")
    return name, _gigabytes(memory)


def _choices(text: str) -> list[Scheme]:
    try:
        return [Scheme.parse(part) for part in text.split(",")]
    except ConfigError as err:
        raise argparse.ArgumentTypeError(str(err)) from None
