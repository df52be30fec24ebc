"""``unickpt verify``: read every byte of a checkpoint and report damage."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict

from unickpt.base.errors import FormatError, NewerFormatError
from unickpt.checkpoint.checkpoint_folder import read_manifest
from unickpt.checkpoint.load.verify import Verification, verify_files
from unickpt.checkpoint.storage.open import open_storage
from unickpt.cli.exit_codes import DAMAGED, SOUND
from unickpt.cli.locate import locate_checkpoint
from unickpt.cli.output import Output, human_bytes, progress_bar

JSON_SCHEMA = 1


def run(args: argparse.Namespace, out: Output) -> int:
    """Verify and print. Return 0 if the checkpoint is sound, 1 if it is damaged."""
    directory = locate_checkpoint(args.directory)
    begin = time.monotonic()
    found = _verify(directory)
    seconds = time.monotonic() - begin
    if args.json:
        head = {"schema": JSON_SCHEMA, "directory": directory, "sound": not found.problems}
        out.json({**head, **asdict(found), "seconds": round(seconds, 3)})
    else:
        for problem in found.problems:
            out.line(problem, style="red")
        _conclude(out, directory, found, seconds)
    return DAMAGED if found.problems else SOUND


def _verify(directory: str) -> Verification:
    """Verify a checkpoint. A malformed manifest is a problem of the checkpoint; a newer format is an error."""
    try:
        storage = open_storage(directory)
        manifest = read_manifest(storage)
        with progress_bar("verify", sum(record.size_bytes for record in manifest.files)) as advance:
            return verify_files(storage, manifest, progress=advance)
    except NewerFormatError:
        raise
    except FormatError as err:
        return Verification((str(err),), files=0, fragments=0, size_bytes=0)


def _conclude(out: Output, directory: str, found: Verification, seconds: float) -> None:
    if found.problems:
        problems = "1 problem" if len(found.problems) == 1 else f"{len(found.problems):,} problems"
        out.line(f"damaged: {directory}: {problems}. Resume from another checkpoint.", style="bold red")
        return
    rate = found.size_bytes / seconds / 1e9 if seconds else 0.0
    out.line(
        f"sound: {directory}: {found.files} files, {found.fragments:,} fragments, "
        f"{human_bytes(found.size_bytes)} in {seconds:.2f} s ({rate:.2f} GB/s)",
        style="bold green",
    )
