"""``unickpt inspect``: show the contents of a checkpoint. Reads manifest and index, never a data file."""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unickpt.base.errors import ConfigError, CorruptCheckpointError
from unickpt.base.listing import some
from unickpt.checkpoint.checkpoint_folder import TRACKER, kept_of_model, latest_tag, read_manifest, tracked_iteration
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.index import Index
from unickpt.checkpoint.format.manifest import MANIFEST_FILE, Manifest
from unickpt.checkpoint.load.folders import TagSummary, list_tags
from unickpt.checkpoint.load.validation import check_files, read_index
from unickpt.checkpoint.memory.host_folder import may_be_in_memory
from unickpt.checkpoint.storage.base import Storage
from unickpt.checkpoint.storage.open import open_storage
from unickpt.cli import inspect_rounded, summary
from unickpt.cli.exit_codes import DAMAGED, SOUND
from unickpt.cli.locate import locate, warn_of_newer
from unickpt.cli.output import Output, human_bytes
from unickpt.cli.parsers.inspect import SHOWN_PARAMETERS
from unickpt.cli.rendering import render, render_settings

JSON_SCHEMA = 1
_SHOWN_CHARACTERS = 100
_SHOWN_NAMES = 20


def run(args: argparse.Namespace, out: Output) -> int:
    """Print the summary; 0, or 1 if files of the checkpoint are missing or have the wrong size."""
    if args.state is not None and args.tensor is None:
        raise ConfigError("--state belongs to --tensor NAME")
    pattern = _pattern(args.grep)
    in_memory = _in_memory(args.directory, args.memory_folder)
    if in_memory is not None:
        return _show_view(args, out, _View.read(in_memory), pattern, tags=None)
    rounded = inspect_rounded.model_at(args.directory)
    if rounded is not None:
        if args.json:
            out.json({"schema": JSON_SCHEMA, **inspect_rounded.document(args.directory, rounded, pattern)})
        else:
            inspect_rounded.show(out, args.directory, rounded, pattern, show_all=args.all)
        return SOUND
    directory = open_storage(args.directory).where()
    location = locate(directory)
    tags = None if location.save_directory is None else list_tags(location.save_directory)
    if tags is not None and not args.json and args.tensor is None:
        _show_tags(out, directory, tags)
    if location.checkpoint is None:
        if args.json:
            out.json(_document(directory, tags, None, None))
        return SOUND
    warn_of_newer(location.checkpoint)
    return _show_view(args, out, _View.read(open_storage(location.checkpoint)), pattern, tags=tags)


def _show_view(
    args: argparse.Namespace, out: Output, view: _View, pattern: re.Pattern[str] | None, *, tags: list[TagSummary] | None
) -> int:
    """Print a checkpoint. Arguments as in ``_document``."""
    if args.tensor is not None:
        found = summary.fragmented(view.index, args.tensor, args.state, aliases=view.manifest.aliases)
        if args.json:
            out.json({"schema": JSON_SCHEMA, "directory": view.directory, "tensors": [asdict(t) for t in found]})
        else:
            _show_fragments(out, found)
    elif args.json:
        directory = view.directory if tags is None else open_storage(args.directory).where()
        out.json(_document(directory, tags, view, pattern))
    else:
        _show(out, view, pattern, show_all=args.all, show_objects=args.objects)
    return DAMAGED if view.problem else SOUND


def _in_memory(name: str, parent: Path) -> Storage | None:
    if not may_be_in_memory(name):
        return None
    from unickpt.checkpoint.memory.contact import named  # needs torch

    return named(name, parent)


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as err:
        raise ConfigError(f"--grep {text!r} is not a regular expression: {err}") from None


class _View:
    """Manifest and index of a checkpoint. ``problem`` describes missing files and files of the wrong size, or is empty."""

    def __init__(self, storage: Storage, manifest: Manifest, index: Index, problem: str) -> None:
        self.storage, self.manifest, self.index, self.problem = storage, manifest, index, problem

    @property
    def directory(self) -> str:
        """Path or URL of the checkpoint."""
        return self.storage.where()

    @classmethod
    def read(cls, storage: Storage) -> _View:
        """Read manifest and index.

        Raises:
            UnickptError: the manifest or the index cannot be used. A missing data file is only recorded in ``problem``.
        """
        problem = ""
        manifest = read_manifest(storage)
        try:
            check_files(storage, manifest)
        except CorruptCheckpointError as err:
            if storage.size_bytes(manifest.index) != manifest.file(manifest.index).size_bytes:
                raise
            problem = str(err)
        return cls(storage, manifest, read_index(storage, manifest), problem)

    @property
    def total_bytes(self) -> int:
        """Size of all files, including the manifest."""
        listed = sum(record.size_bytes for record in self.manifest.files)
        return listed + (self.storage.size_bytes(MANIFEST_FILE) or 0)


# ---------------------------------------------------------------- JSON


def _document(
    directory: str, tags: list[TagSummary] | None, view: _View | None, pattern: re.Pattern[str] | None
) -> dict[str, Any]:
    save_directory = None
    if tags is not None:
        save_directory = {"latest": latest_tag(directory), "tags": [asdict(tag) for tag in tags]}
    checkpoint = None if view is None else _checkpoint_document(view, pattern)
    return {"schema": JSON_SCHEMA, "directory": directory, "save_directory": save_directory, "checkpoint": checkpoint}


def _checkpoint_document(view: _View, pattern: re.Pattern[str] | None) -> dict[str, Any]:
    manifest = view.manifest
    return {
        "directory": view.directory,
        "problem": view.problem or None,
        "format_version": manifest.version,
        "step": manifest.step,
        "created": manifest.created,
        "generation": manifest.generation,
        "writer": asdict(manifest.writer),
        "total_bytes": view.total_bytes,
        "files": [asdict(record) for record in manifest.files],
        "model_files": kept_of_model(view.storage),
        "states": [asdict(state) for state in summary.states(view.index)],
        "parameters": [asdict(parameter) for parameter in _matching(view.index, pattern)],
        "optimizer": None if manifest.optimizer is None else asdict(manifest.optimizer),
        "objects": manifest.objects,
        "ranks_with_objects": summary.ranks_with_objects(view.index),
        "witness": None if manifest.witness is None else asdict(manifest.witness),
        "aliases": manifest.aliases,
        "excluded": manifest.excluded,
    }


def _matching(index: Index, pattern: re.Pattern[str] | None) -> tuple[summary.ParameterSummary, ...]:
    found = summary.parameters(index)
    return found if pattern is None else tuple(p for p in found if pattern.search(p.name))


# ---------------------------------------------------------------- text


def _show_tags(out: Output, directory: str, tags: list[TagSummary]) -> None:
    latest = latest_tag(directory)
    out.line(f"save directory {directory}", style="bold")
    iteration = tracked_iteration(directory) if latest is None else None
    out.line(f"latest: {latest or '(no such file)'}" if iteration is None else f"{TRACKER}: {iteration}")
    complete = [tag.tag for tag in tags if tag.complete]
    out.line(f"newest complete checkpoint: {complete[-1] if complete else 'none'}")
    rows = [
        [tag.tag, "" if tag.step is None else str(tag.step), "yes" if tag.complete else f"no: {tag.problem}"] for tag in tags
    ]
    out.table(f"checkpoints ({len(tags)})", ["tag", "step", "complete"], rows)
    out.line()


def _show(out: Output, view: _View, pattern: re.Pattern[str] | None, *, show_all: bool, show_objects: bool) -> None:
    _show_heading(out, view)
    states = [
        [s.state, ", ".join(s.dtypes), s.tensors, s.fragments, s.elements, s.stored_bytes, _derived(s.derived_from)]
        for s in summary.states(view.index)
    ]
    out.table("states", ["state", "dtype", "tensors", "fragments", "elements", "stored bytes", ""], states)
    _show_parameters(out, _matching(view.index, pattern), show_all=show_all)
    _show_optimizer(out, view.manifest)
    _show_objects(out, view, full=show_objects)
    _show_names(out, view.manifest, show_all=show_all)


def _show_heading(out: Output, view: _View) -> None:
    manifest, writer = view.manifest, view.manifest.writer
    out.line(f"checkpoint {view.directory}", style="bold")
    if view.problem:
        out.line(f"DAMAGED: {view.problem}", style="bold red")
    again = f", generation {manifest.generation} (this tag was saved again)" if manifest.generation else ""
    out.line(f"step {manifest.step}, created {manifest.created}{again}")
    out.line(
        f"written by {writer.framework} {writer.framework_version}, unickpt {writer.unickpt_version}, "
        f"torch {writer.torch_version}; names: {writer.dialect}; format version {view.manifest.version}"
    )
    out.line(f"topology: {render_settings(writer.topology)}")
    if manifest.witness is not None:
        checks = ", ".join(manifest.witness.checks) or "none"
        out.line(f"witness: passed until step {manifest.witness.passed_until}, checks: {checks}")
    out.line(f"{len(manifest.files) + 1} files, {human_bytes(view.total_bytes)}")
    kept = kept_of_model(view.storage)
    if kept:
        out.line(f"of the model, without checksums: {some(kept)}")


def _derived(derived_from: str | None) -> str:
    return "" if derived_from is None else f"derived from {derived_from}"


def _show_parameters(out: Output, found: tuple[summary.ParameterSummary, ...], *, show_all: bool) -> None:
    shown = found if show_all else found[:SHOWN_PARAMETERS]
    rows = [
        [p.name, list(p.states[0].shape), p.states[0].dtype, ", ".join(s.state for s in p.states), _count(p)] for p in shown
    ]
    out.table(f"parameters and buffers ({len(found):,})", ["name", "shape", "dtype", "states", "fragments"], rows)
    if len(shown) < len(found):
        out.line(f"and {len(found) - len(shown):,} more: --all shows them, --grep REGEX selects")


def _count(parameter: summary.ParameterSummary) -> int:
    return sum(state.fragments for state in parameter.states)


def _show_optimizer(out: Output, manifest: Manifest) -> None:
    optimizer = manifest.optimizer
    if optimizer is None:
        out.line()
        out.line("optimizer: none")
        return
    rows = [[at, len(group.parameters), render_settings(group.hyperparameters)] for at, group in enumerate(optimizer.groups)]
    out.table(f"optimizer {optimizer.name}", ["group", "parameters", "hyperparameters"], rows)
    if optimizer.scalars:
        scalars = [[render_settings(group.hyperparameters), len(group.parameters)] for group in optimizer.scalars]
        out.table("optimizer scalars", ["value", "parameters"], scalars)


def _show_objects(out: Output, view: _View, *, full: bool) -> None:
    most = None if full else _SHOWN_CHARACTERS
    rows = [[name, render(value, most=most)] for name, value in view.manifest.objects.items()]
    out.table(f"objects ({len(rows)})", ["name", "value"], rows)
    ranks = summary.ranks_with_objects(view.index)
    if ranks:
        listed = _some([str(rank) for rank in ranks], show_all=full)
        out.line(f"ranks with objects of their own (such as random generators): {listed}")


def _show_names(out: Output, manifest: Manifest, *, show_all: bool) -> None:
    out.line()
    tied = [f"{alias} = {name}" for alias, name in manifest.aliases.items()]
    out.line(f"tied: {_some(tied, show_all=show_all) or 'none'}")
    out.line(f"excluded: {_some(list(manifest.excluded), show_all=show_all) or 'none'}")


def _some(names: list[str], *, show_all: bool) -> str:
    shown = names if show_all else names[:_SHOWN_NAMES]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more else "")


def _show_fragments(out: Output, tensors: tuple[summary.FragmentedTensor, ...]) -> None:
    for tensor in tensors:
        derived = "" if tensor.derived_from is None else f", derived from {tensor.derived_from} (a fragment overrides the cast)"
        rows = [[str(Box(f.start, f.shape)), f.file, f.offset_bytes, f.size_bytes, f.checksum] for f in tensor.fragments]
        title = f"{tensor.name} ({tensor.state}) {tensor.dtype} {list(tensor.shape)}: fragments: {len(rows):,}{derived}"
        out.table(title, ["box", "file", "byte offset", "bytes", "xxh3_64"], rows)
