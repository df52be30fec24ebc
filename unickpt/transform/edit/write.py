"""A table as a source of ``unickpt.transform.convert.pipeline``, in portions of bounded size."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from unickpt import __version__
from unickpt.base.errors import MismatchError
from unickpt.checkpoint.format.boxes import Box, cut
from unickpt.checkpoint.format.dtype_names import itemsize_bytes
from unickpt.transform.convert.huggingface.model_files import ModelFiles
from unickpt.transform.convert.pipeline import Portion, Source, SourcePart
from unickpt.transform.edit.table import Step, Table, TableEntry

PORTION_BYTES = 1 << 30  # size of a data file
NOTE = "edits"  # object with the history of edits


def after(table: Table, steps: Sequence[Step]) -> Table:
    """Return a table after some steps. Raises MismatchError, LanguageError."""
    for step in steps:
        table = step.apply(table)
    return table


def source_of(table: Table, steps: Sequence[object], *, portion_bytes: int = PORTION_BYTES) -> Source:
    """Return the source of an edited checkpoint.

    Args:
        table: table after all steps.
        steps: the steps. Their ``repr`` and the identity of the table identify portions of an interrupted run.
        portion_bytes: approximate size of a data file.

    Raises:
        MismatchError: no tensor is left, or the checkpoint would be inconsistent.
    """
    _check(table)
    files = _model_files(table)
    plan = repr((__version__, torch.__version__, portion_bytes, table.identity, list(steps)))
    digest = hashlib.sha256(plan.encode()).hexdigest()
    shares = _shared(list(_parts(table)), portion_bytes)
    return Source(
        "edit",
        [Portion(f"{digest[:24]}.{at}", parts, table.inputs) for at, parts in enumerate(shares)],
        replace(table.writer, unickpt_version=__version__, torch_version=torch.__version__),
        step=table.step,
        tensors=[entry.info for entry in table.entries.values() if not entry.info.numel or entry.info.derived_from is not None],
        optimizer=table.optimizer,
        aliases=dict(table.aliases),
        excluded=table.excluded,
        encoded_objects=_noted(table),
        left_out=(*table.left_out, *(files.left_out if files is not None else ())),
        model_files=files,
    )


def _model_files(table: Table) -> ModelFiles | None:
    """Return what the checkpoint keeps of the model: without a configuration that describes other weights."""
    if table.model_files is None or table.shapes() == table.described:
        return table.model_files
    return table.model_files.without_configuration("these steps change names or shapes of weights; an export needs --config")


def _check(table: Table) -> None:
    if not table.tensors():
        raise MismatchError(f"{table.where}: no tensor is left after these steps")
    for entry in table.tensors():
        info = entry.info
        if info.derived_from is not None:
            parent = table.entries[info.name, info.derived_from].info
            if parent.shape != info.shape or parent.derived_from is not None:
                raise MismatchError(
                    f"{table.where}: {info.name} ({info.state}) of shape {list(info.shape)} would be derived from its "
                    f"{parent.state} of shape {list(parent.shape)}"
                )
    names = {entry.info.name for entry in table.tensors()}
    both = sorted(names & table.aliases.keys())
    if both:
        raise MismatchError(f"{table.where}: {both[0]} would be both a tensor and a further name of {table.aliases[both[0]]}")


def _parts(table: Table) -> Iterator[SourcePart]:
    for entry in table.entries.values():
        info = entry.info
        if info.derived_from is None:
            if info.numel:
                yield SourcePart(info, Box.whole(info.shape), entry.read)
        else:
            master: TableEntry = table.entries[info.name, info.derived_from]
            yield from (SourcePart(info, box, entry.read, unless=master.read) for box in entry.overrides if box.numel)


def _shared(parts: Sequence[SourcePart], limit: int) -> list[list[SourcePart]]:
    """Divide parts into data files of limited size, in order."""
    shares: list[list[SourcePart]] = [[]]
    size = 0
    for part in parts:
        for box in cut(part.box, max(limit // itemsize_bytes(part.tensor.dtype), 1)):
            piece = replace(part, box=box)
            if shares[-1] and size + piece.size_bytes > limit:
                shares.append([])
                size = 0
            shares[-1].append(piece)
            size += piece.size_bytes
    return [share for share in shares if share]


def _noted(table: Table) -> Mapping[str, Any]:
    """Return the objects with a note on this edit, after the notes of earlier edits."""
    note = {"source": table.where, "identity": list(table.identity), "done": list(table.done), "left_out": list(table.left_out)}
    if "$dict" in table.objects:  # some keys are not plain text
        pairs = table.objects["$dict"]
        return {"$dict": [*(pair for pair in pairs if pair[0] != NOTE), [NOTE, [*dict(pairs).get(NOTE, []), note]]]}
    before = table.objects.get(NOTE, [])
    return {**table.objects, NOTE: [*(before if isinstance(before, list) else []), note]}
