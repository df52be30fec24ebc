"""``unickpt convert``: convert a checkpoint of another program into a unickpt checkpoint."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from unickpt.base.errors import ConfigError, UnickptError
from unickpt.checkpoint.load.validation import is_checkpoint
from unickpt.checkpoint.storage.base import is_url
from unickpt.cli.edit_common import check_destination, write
from unickpt.cli.exit_codes import SOUND
from unickpt.cli.output import Output
from unickpt.transform.convert.detect import open_source
from unickpt.transform.convert.pickles.lazy_tensor import OpenFiles
from unickpt.transform.convert.pipeline import Source
from unickpt.transform.convert.run_folder import RunFolder, copy_files, require_apart, run_folder


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


def run(args: argparse.Namespace, out: Output) -> int:
    """Convert."""
    if is_url(args.source):
        raise ConfigError(f"{args.source}: convert reads a local directory; download the checkpoint first")
    source, directory = Path(args.source), Path(args.directory)
    try:
        program = run_folder(source) if source.is_dir() else None
        with ExitStack() as opened:
            if program is None:
                check_destination(args.directory)
                _convert(_open(source, args, opened), directory, args, out)
            else:
                _convert_all(program, directory, args, out, opened)
    except BrokenPipeError:  # of the standard output, after the write
        raise
    except OSError as err:
        raise UnickptError(f"could not convert {source} into {directory}: {err}") from err
    return SOUND


def _convert_all(program: RunFolder, directory: Path, args: argparse.Namespace, out: Output, opened: ExitStack) -> None:
    """Convert the folder of a training program. Its checkpoints come last, so an interrupted conversion is no checkpoint."""
    check_destination(str(directory))
    require_apart(program.path, directory)
    left = [tag for tag in program.tags if not is_checkpoint(directory / tag)]
    if not left:
        check_destination(str(directory / program.tags[0]))
    sources = {tag: _open(program.path / tag, args, opened) for tag in left}  # before anything is written
    copied = copy_files(program, directory)
    for tag, source in sources.items():
        _convert(source, directory / tag, args, out)
    for line in program.left_out():
        out.line(f"left out: {line}")
    out.line(f"{directory}: a folder of {program.program} like {program.path}; {copied} of its files are copied")


def _open(folder: Path, args: argparse.Namespace, opened: ExitStack) -> Source:
    return open_source(folder, opened.enter_context(OpenFiles()), also=args.take)


def _convert(source: Source, directory: Path, args: argparse.Namespace, out: Output) -> None:
    """Convert one checkpoint. Raises OSError, UnickptError."""
    for line in source.left_out:
        out.line(f"left out: {line}")
    write("convert", source, directory, args, out, kind=f"{source.kind}, ")
