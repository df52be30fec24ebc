"""``unickpt convert``: convert a checkpoint of another program into a unickpt checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from unickpt.cli.edit_common import check_destination
from unickpt.cli.exit_codes import SOUND
from unickpt.cli.output import Output, human_bytes
from unickpt.cli.progress import progress_bar
from unickpt.convert.detect import open_source
from unickpt.convert.lazy_tensor import Files
from unickpt.convert.pipeline import convert
from unickpt.errors import ConfigError, UnickptError
from unickpt.storage.base import is_url


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "source", metavar="SRC",
        help="directory of a transformers model (safetensors), a DeepSpeed checkpoint (its own or a universal one, also of "
        "Megatron-DeepSpeed), a Megatron checkpoint (torch_dist or torch), torch.distributed.checkpoint (FSDP, torchtitan); or "
        "the save directory above it",
    )  # fmt: skip
    parser.add_argument(
        "directory", metavar="DST", help="output directory; an interrupted conversion into it goes on where it stopped"
    )
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="number of files at a time (default: 2)")
    parser.add_argument(
        "--take", action="append", default=[], metavar="CLASS",
        help="class whose pickled values are read: module.Class, or module. for all classes of a module; its code never "
        "runs",
    )  # fmt: skip


def run(args: argparse.Namespace, out: Output) -> int:
    """Convert."""
    if is_url(args.source):
        raise ConfigError(f"{args.source}: convert reads a local directory; download the checkpoint first")
    source_folder, directory = Path(args.source), check_destination(args.directory)
    try:
        with Files() as files:
            source = open_source(source_folder, files, also=args.take)
            with progress_bar("convert", source.size_bytes) as advance:
                made = convert(source, directory, workers=max(args.workers, 1), progress=advance)
    except OSError as err:
        raise UnickptError(f"could not convert {source_folder} into {directory}: {err}") from err
    for line in source.left_out:
        out.line(f"left out: {line}")
    kept = f", {made.kept} of them written by an earlier run" if made.kept else ""
    files_made = f"{made.files} file{'s' * (made.files != 1)}"
    out.line(
        f"{directory}: {source.kind}, {made.tensors:,} tensors, {human_bytes(made.size_bytes)}, in {files_made}{kept}",
        style="bold green",
    )
    return SOUND
