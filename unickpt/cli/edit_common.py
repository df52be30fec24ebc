"""Common parts of ``unickpt convert``, ``edit``, ``average`` and ``export``: check the sources, show the plan, write."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unickpt.base.errors import ConfigError, MismatchError, UnickptError
from unickpt.base.listing import some
from unickpt.checkpoint.checkpoint_folder import read_manifest
from unickpt.checkpoint.format.manifest import Manifest
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.validation import is_checkpoint
from unickpt.checkpoint.load.verify import verify_files
from unickpt.checkpoint.storage.base import Storage, is_url
from unickpt.checkpoint.storage.open import open_storage
from unickpt.cli.exit_codes import DAMAGED, SOUND
from unickpt.cli.locate import is_file, locate_checkpoint
from unickpt.cli.output import Output, human_bytes, progress_bar
from unickpt.transform.convert.pipeline import Converted, Source, convert
from unickpt.transform.edit.table import Table, table_of
from unickpt.transform.edit.write import source_of

JSON_SCHEMA = 1


def check_destination(directory: str) -> Path:
    """Return the output directory.

    Raises:
        ConfigError: it is a URL or a file.
        MismatchError: it holds a checkpoint already.
    """
    if is_url(directory):
        raise ConfigError(f"{directory}: the output must be a local directory; upload the checkpoint afterwards")
    if is_file(directory):
        raise ConfigError(f"{directory}: is a file; name a directory")
    if is_checkpoint(directory):
        raise MismatchError(f"{directory}: holds a checkpoint already; name another directory")
    return Path(directory)


def opened(directory: str) -> Table:
    """Open a checkpoint, or the one that ``latest`` names, as a table."""
    return table_of(Checkpoint.open(locate_checkpoint(directory)))


@dataclass(frozen=True, slots=True)
class Operated:
    """What a command has made, or why it has made nothing.

    Attributes:
        table: the result of all steps.
        problems: damage of the sources.
        made: what was written; None with damage and after a dry run.
    """

    table: Table
    problems: tuple[str, ...] = ()
    made: Converted | None = None

    @property
    def code(self) -> int:
        """The exit code."""
        return DAMAGED if self.problems else SOUND

    def as_json(self) -> dict[str, Any]:
        """Return the members of the JSON document that all these commands have."""
        tensors = [
            {"name": entry.info.name, "state": entry.info.state, "dtype": entry.info.dtype, "shape": list(entry.info.shape)}
            for entry in self.table.tensors()
        ]
        return {
            "schema": JSON_SCHEMA, "ok": not self.problems, "problems": list(self.problems), "done": self.table.done,
            "left_out": self.table.left_out, "tensors": tensors, "written": None if self.made is None else asdict(self.made),
        }  # fmt: skip


def operate(table: Table, sources: Sequence[str], steps: Sequence[object], args: argparse.Namespace, out: Output) -> Operated:
    """Show the plan, verify the sources, and write the checkpoint.

    Args:
        table: the result of all steps.
        sources: directories of the checkpoints that are read.
        steps: the steps, in their order.
        args: of the command.
        out: for lines.
    """
    directory = Path(args.destination)
    source = source_of(table, steps)
    if args.dry_run:
        rows = [
            (entry.info.name, entry.info.state, entry.info.dtype, list(entry.info.shape), entry.origin)
            for entry in table.tensors()
        ]
        out.table(str(directory), ("tensor", "state", "dtype", "shape", ""), rows)
        out.line()
    for line in table.done:
        out.line(line)
    for line in source.left_out:
        out.line(f"left out: {line}")
    if args.dry_run:
        out.line(f"{directory}: {len(table.entries):,} tensors; dry run, nothing was written", style="bold")
        return Operated(table)
    read = [] if args.no_verify else [open_storage(locate_checkpoint(each)) for each in sources]
    problems = [problem for storage in read for problem in damage(storage, read_manifest(storage), out)]
    if problems:
        return Operated(table, tuple(problems))
    try:
        return Operated(table, made=write("write", source, directory, args, out))
    except BrokenPipeError:  # of the standard output, after the write
        raise
    except OSError as err:
        raise UnickptError(f"could not write {directory} from {', '.join(sources)}: {err}") from err


def write(what: str, source: Source, directory: Path, args: argparse.Namespace, out: Output, kind: str = "") -> Converted:
    """Write a checkpoint, with ``what`` beside the progress bar, and say what was written. Raises OSError, UnickptError."""
    with progress_bar(what, source.size_bytes) as advance:
        made = convert(source, directory, workers=max(args.workers, 1), progress=advance)
    kept = f", {made.kept} of them written by an earlier run" if made.kept else ""
    size = f"{made.tensors:,} tensors, {human_bytes(made.size_bytes)}, in {counted_files(made.files)}"
    out.line(f"{directory}: {kind}{size}{kept}", style="bold green")
    if made.model_files:
        out.line(f"kept for export and grow: {some(made.model_files)}")
    return made


def counted_files(count: int) -> str:
    """Return ``1 file``, ``2 files``."""
    return f"{count} file{'s' * (count != 1)}"


def damage(storage: Storage, manifest: Manifest, out: Output) -> list[str]:
    """Check a checkpoint against its checksums, print the problems and return them."""
    with progress_bar("verify", sum(record.size_bytes for record in manifest.files)) as advance:
        problems = verify_files(storage, manifest, progress=advance).problems
    for problem in problems:
        out.line(problem, style="red")
    return list(problems)
