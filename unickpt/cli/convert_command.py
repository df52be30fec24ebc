"""``unickpt convert``: what others have written, as a checkpoint of ours."""

from __future__ import annotations

import argparse
from pathlib import Path

from unickpt.cli.exit_codes import SOUND
from unickpt.cli.output import Output, human_bytes
from unickpt.cli.progress import progress_bar
from unickpt.converting import convert
from unickpt.errors import UnickptError
from unickpt.foreign.detect import open_source
from unickpt.foreign.located import Files


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "source", metavar="SRC", type=Path,
        help="a model of transformers (safetensors), a checkpoint that DeepSpeed has written, Megatron (torch_dist, torch), or "
        "torch.distributed.checkpoint (FSDP, torchtitan); or the save directory of one",
    )  # fmt: skip
    parser.add_argument("directory", metavar="DST", type=Path, help="of the checkpoint; one that was cut off is gone on with")
    parser.add_argument("--workers", type=int, default=2, help="files at a time (default: 2)")
    parser.add_argument(
        "--take", action="append", default=[], metavar="CLASS",
        help="a class in its pickles (module.Class, or module. for all of it) that may be read as what was stored of it; "
        "nothing of it is run",
    )  # fmt: skip


def run(args: argparse.Namespace, out: Output) -> int:
    """Convert."""
    try:
        with Files() as files:
            source = open_source(args.source, files, also=args.take)
            with progress_bar("convert", source.size_bytes) as advance:
                made = convert(source, args.directory, workers=max(args.workers, 1), progress=advance)
    except OSError as err:
        raise UnickptError(f"{args.source} cannot be converted into {args.directory}: {err}") from err
    for line in source.left_out:
        out.line(f"left out: {line}")
    kept = f", {made.kept} of them from before" if made.kept else ""
    files_made = f"{made.files} file{'s' * (made.files != 1)}"
    out.line(
        f"{args.directory}: {source.kind}, {made.tensors:,} tensors, {human_bytes(made.size_bytes)}, in {files_made}{kept}",
        style="bold green",
    )
    return SOUND
