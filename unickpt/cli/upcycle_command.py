"""``unickpt upcycle``: a mixture of experts with the outputs of a dense model."""

from __future__ import annotations

import argparse

from unickpt.base.errors import ConfigError
from unickpt.cli.edit_common import check_destination, configure_writing, opened
from unickpt.cli.grow_command import configure_model, refused_as_json, write
from unickpt.cli.output import Output
from unickpt.transform.convert.huggingface.files import configuration
from unickpt.transform.convert.pickles.lazy_tensor import OpenFiles
from unickpt.transform.grow.folders import configuration_folder, open_source
from unickpt.transform.grow.refusals import NotLosslessError
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
        table = open_source(args.source, files, opened)
        folder = configuration_folder(args.config, args.source)
        config = configuration(folder) if folder is not None else {}
        step = Upcycle(args.experts, args.top_k, args.granularity, args.seed, config)
        try:
            made, new_config = step.result(table)
        except NotLosslessError as err:
            return refused_as_json(err, args, out)
        return write(made, [step], new_config, folder, args, out)
