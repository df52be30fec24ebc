"""``unickpt upcycle``: a mixture of experts with the outputs of a dense model."""

from __future__ import annotations

import argparse

from unickpt.base.errors import ConfigError
from unickpt.cli.edit_common import check_destination
from unickpt.cli.grow_command import run_step
from unickpt.cli.output import Output
from unickpt.transform.convert.pickles.lazy_tensor import OpenFiles
from unickpt.transform.grow.upcycle import Upcycle


def run(args: argparse.Namespace, out: Output) -> int:
    """Plan the experts, then write checkpoint and configuration."""
    check_destination(args.destination)
    if min(args.experts, args.top_k, args.granularity) < 1:
        raise ConfigError("--experts, --top-k and --granularity are 1 or more")
    with OpenFiles() as files:
        return run_step(Upcycle(args.experts, args.top_k, args.granularity, args.seed), files, args, out)[0]
