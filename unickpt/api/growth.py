"""Grow models, and make experts of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unickpt.base.errors import CorruptCheckpointError
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.verify import verify_checkpoint
from unickpt.transform.convert.huggingface.files import configuration
from unickpt.transform.convert.pickles.lazy_tensor import OpenFiles
from unickpt.transform.convert.pipeline import convert
from unickpt.transform.edit.table import Table, table_of
from unickpt.transform.edit.write import source_of
from unickpt.transform.grow.folders import configuration_folder, is_model, keep_configuration, open_source
from unickpt.transform.grow.step import Grow
from unickpt.transform.grow.upcycle import Upcycle

Folder = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class GrownModel:
    """A model that was made of a smaller or a dense one.

    Attributes:
        directory: checkpoint that was written.
        config: its configuration, as in ``config.json``; empty if that of the source is unknown.
        size_bytes: size of all tensors.
        notes: what was done, one sentence each.
    """

    directory: Path
    config: dict[str, Any]
    size_bytes: int
    notes: tuple[str, ...]


def grow_checkpoint(
    source: Folder,
    directory: Folder,
    changes: Mapping[str, int],
    *,
    place: Sequence[int] | None = None,
    config: Folder | None = None,
    seed: int = 0,
    verify: bool = True,
) -> GrownModel:
    """Make a larger model with the same outputs, with its optimizer states.

    Example:
        Double the number of layers of a model of twelve::

            unickpt.grow_checkpoint("out/step1000", "large/step1000", {"num_hidden_layers": 24})

    Args:
        source: checkpoint directory, or a folder of transformers weights.
        directory: output directory. It gets a checkpoint, and ``config.json`` and the tokenizer in its folder ``model``.
        changes: new sizes by keys of ``config.json``.
        place: number in the new model of every old layer; None: at equal distances.
        config: folder with the ``config.json`` of the source; None: what
            ``source`` keeps of its model.
        seed: seed of free elements.
        verify: check all checksums of the source first, which reads all of it.

    Returns:
        Directory, configuration, size in bytes, and notes.

    Raises:
        NotLosslessError: the growth would change the outputs. It is a MismatchError with all reasons in ``refusals``.
        LanguageError: the model family is unknown.
        MismatchError: ``directory`` holds a checkpoint already.
        CorruptCheckpointError: the source is damaged. Nothing is written.
        OSError, StorageError: a file cannot be read or written.
    """
    step = Grow(dict(changes), None if place is None else tuple(place), seed, _config(source, config))
    return _made(source, directory, step, config, verify)


def upcycle_checkpoint(
    source: Folder, directory: Folder, *, experts: int, top_k: int, granularity: int = 1, config: Folder | None = None,
    seed: int = 0, verify: bool = True,
) -> GrownModel:  # fmt: skip
    """Make a mixture of experts with the outputs of a dense model, without an optimizer.

    Example:
        Make eight experts of each block, two for each token::

            unickpt.upcycle_checkpoint("out/step1000", "experts/step0", experts=8, top_k=2)

    Args:
        source: checkpoint directory, or a folder of transformers weights.
        directory: output directory. It gets a checkpoint, and ``config.json`` and the tokenizer in its folder ``model``.
        experts: number of experts of a layer.
        top_k: experts of a token, a multiple of ``granularity``.
        granularity: number of experts that each block is divided into.
        config: folder with the ``config.json`` of the source; None: what
            ``source`` keeps of its model.
        seed: seed of the router.
        verify: check all checksums of the source first, which reads all of it.

    Returns:
        Directory, configuration, size in bytes, and notes.

    Raises:
        NotLosslessError: the outputs would change. It is a MismatchError with all reasons in ``refusals``.
        MismatchError, CorruptCheckpointError, OSError, StorageError: as for ``grow_checkpoint``.
    """
    return _made(source, directory, Upcycle(experts, top_k, granularity, seed, _config(source, config)), config, verify)


def _config(source: Folder, named: Folder | None) -> dict[str, Any]:
    folder = configuration_folder(None if named is None else os.fspath(named), os.fspath(source))
    return configuration(folder) if folder is not None else {}


def _made(source: Folder, directory: Folder, step: Grow | Upcycle, named: Folder | None, verify: bool) -> GrownModel:
    def opened(checkpoint: str) -> Table:
        return table_of(Checkpoint.open(checkpoint))

    with OpenFiles() as files:
        table, config = step.result(open_source(os.fspath(source), files, opened))
        table = replace(table, model_files=None)  # it gets a new configuration
        if verify and not is_model(os.fspath(source)):
            problems = verify_checkpoint(source).problems
            if problems:
                raise CorruptCheckpointError("; ".join(problems))
        made = convert(source_of(table, [step]), Path(directory))
    folder = configuration_folder(None if named is None else os.fspath(named), os.fspath(source))
    if folder is not None:
        keep_configuration(config, folder, Path(directory))
    return GrownModel(Path(directory), config, made.size_bytes, table.done)
