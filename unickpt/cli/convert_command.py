"""``unickpt convert``: what others have written, as a checkpoint of ours."""

from __future__ import annotations

import argparse
from pathlib import Path

from unickpt.cli.exit_codes import SOUND
from unickpt.cli.output import Output, human_bytes
from unickpt.cli.progress import progress_bar
from unickpt.errors import UnickptError
from unickpt.importing import convert_huggingface, huggingface_files


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "source", metavar="SRC", type=Path, help="folder of a model of transformers: safetensors and config.json"
    )
    parser.add_argument("directory", metavar="DST", type=Path, help="of the checkpoint; one that was cut off is gone on with")
    parser.add_argument("--workers", type=int, default=2, help="files at a time (default: 2)")


def run(args: argparse.Namespace, out: Output) -> int:
    """Convert."""
    try:
        total = sum(file.path.stat().st_size for file in huggingface_files(args.source))
        with progress_bar("convert", total) as advance:
            made = convert_huggingface(args.source, args.directory, workers=max(args.workers, 1), progress=advance)
    except OSError as err:
        raise UnickptError(f"{args.source} cannot be converted into {args.directory}: {err}") from err
    kept = f", {made.kept} of them from before" if made.kept else ""
    files = f"{made.files} file{'s' * (made.files != 1)}"
    out.line(
        f"{args.directory}: {made.tensors:,} tensors, {human_bytes(made.size_bytes)}, in {files}{kept}", style="bold green"
    )
    return SOUND
