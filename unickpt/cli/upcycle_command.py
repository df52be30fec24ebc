"""``unickpt upcycle``: a mixture of experts with the outputs of a dense model."""

from __future__ import annotations

import argparse

from unickpt.base.errors import ConfigError
from unickpt.cli.edit_common import check_destination, configure_writing
from unickpt.cli.grow_command import configure_model, run_step
from unickpt.cli.output import Output
from unickpt.transform.convert.pickles.lazy_tensor import OpenFiles
from unickpt.transform.grow.upcycle import Upcycle


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    configure_model(parser)
    parser.add_argument("--experts", type=int, required=True, metavar="E", help="number of experts of a layer")
    parser.add_argument("--top-k", type=int, required=True, metavar="K", help="experts of a token, a multiple of --granularity")
    parser.add_argument("--granularity", type=int, default=1, metavar="G", help="divide each block into G experts (default: 1)")
    configure_writing(parser)


def run(args: argparse.Namespace, out: Output) -> int:
    """Plan the experts, then write checkpoint and configuration."""
    check_destination(args.destination)
    if min(args.experts, args.top_k, args.granularity) < 1:
        raise ConfigError("--experts, --top-k and --granularity are 1 or more")
    with OpenFiles() as files:
        return run_step(Upcycle(args.experts, args.top_k, args.granularity, args.seed), files, args, out)[0]
