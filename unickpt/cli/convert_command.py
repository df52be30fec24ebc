"""``unickpt convert``: convert a checkpoint of another program into a unickpt checkpoint."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

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

JSON_SCHEMA = 1


def run(args: argparse.Namespace, out: Output) -> int:
    """Convert."""
    if is_url(args.source):
        raise ConfigError(f"{args.source}: convert reads a local directory; download the checkpoint first")
    source, directory = Path(args.source), Path(args.directory)
    try:
        program = run_folder(source) if source.is_dir() else None
        with ExitStack() as opened:
            lines = Output.for_lines(out, as_json=args.json)
            if program is None:
                check_destination(args.directory)
                made = [_convert(_open(source, args, opened), directory, args, lines)]
            else:
                made = _convert_all(program, directory, args, lines, opened)
    except BrokenPipeError:  # of the standard output, after the write
        raise
    except OSError as err:
        raise UnickptError(f"could not convert {source} into {directory}: {err}") from err
    if args.json:
        left = [] if program is None else program.left_out()
        out.json({"schema": JSON_SCHEMA, "program": program and program.program, "left_out": left, "checkpoints": made})
    return SOUND


def _convert_all(
    program: RunFolder, directory: Path, args: argparse.Namespace, out: Output, opened: ExitStack
) -> list[dict[str, Any]]:
    """Convert the folder of a training program, and return the checkpoints as members of the JSON document.

    They come last, so an interrupted conversion is no checkpoint.
    """
    check_destination(str(directory))
    require_apart(program.path, directory)
    left = [tag for tag in program.tags if not is_checkpoint(directory / tag)]
    if not left:
        check_destination(str(directory / program.tags[0]))
    sources = {tag: _open(program.path / tag, args, opened) for tag in left}  # before anything is written
    copied = copy_files(program, directory)
    made = [_convert(source, directory / tag, args, out) for tag, source in sources.items()]
    for line in program.left_out():
        out.line(f"left out: {line}")
    out.line(f"{directory}: a folder of {program.program} like {program.path}; {copied} of its files are copied")
    return made


def _open(folder: Path, args: argparse.Namespace, opened: ExitStack) -> Source:
    return open_source(folder, opened.enter_context(OpenFiles()), also=args.take)


def _convert(source: Source, directory: Path, args: argparse.Namespace, out: Output) -> dict[str, Any]:
    """Convert one checkpoint, and return it as a member of the JSON document. Raises OSError, UnickptError."""
    for line in source.left_out:
        out.line(f"left out: {line}")
    made = write("convert", source, directory, args, out, kind=f"{source.kind}, ")
    return {"directory": str(directory), "kind": source.kind, "step": source.step, "left_out": source.left_out, **asdict(made)}
