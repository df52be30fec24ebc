"""Folders of growth: transformers models as tables, and the configuration beside the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unickpt.base.errors import FormatError, NotACheckpointError
from unickpt.checkpoint.storage.base import is_url
from unickpt.transform.convert.detect import TRANSFORMERS, kind_of
from unickpt.transform.convert.huggingface.files import CONFIG, configuration
from unickpt.transform.convert.huggingface.model_files import configured_folder, files_of, write_configuration
from unickpt.transform.convert.huggingface.reader import huggingface
from unickpt.transform.convert.pickles.lazy_tensor import OpenFiles
from unickpt.transform.edit.table import Table, TableEntry, by_key


def is_model(directory: str) -> bool:
    """Return whether a path is a folder of transformers weights."""
    return not is_url(directory) and kind_of(Path(directory)) == TRANSFORMERS.name


def open_source(directory: str, files: OpenFiles, opened: Callable[[str], Table]) -> Table:
    """Open a checkpoint or a folder of transformers weights as a table.

    Args:
        directory: checkpoint or folder.
        files: open files, which must stay open until the table is written.
        opened: opens a checkpoint.

    Raises:
        NotACheckpointError: it is neither.
    """
    try:
        return opened(directory)
    except NotACheckpointError:
        if not is_model(directory):
            raise
        return table_of_model(Path(directory), files)


def table_of_model(folder: Path, files: OpenFiles) -> Table:
    """Return a folder of transformers weights as a table.

    Args:
        folder: folder with safetensors files.
        files: open files, which must stay open until the table is written.

    Raises:
        NotACheckpointError, FormatError: as ``huggingface``.
    """
    source = huggingface(folder, files)
    inputs = tuple(path for portion in source.portions for path in portion.inputs)
    entries = [TableEntry(part.tensor, part.read) for portion in source.portions for part in portion.parts]
    identity = tuple(f"{path.resolve()}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for path in inputs)
    found = by_key(entries, str(folder))
    return Table(str(folder), dict(sorted(found.items())), 0, source.writer, identity=identity, inputs=inputs)


def configuration_folder(named: str | None, source: str) -> Path | None:
    """Return the folder with the configuration of a source: the named one, or that of the checkpoint or model.

    Args:
        named: folder or ``config.json`` that the user named, or None.
        source: directory of the checkpoint or model.

    Raises:
        FormatError: the named folder has no configuration.
    """
    if named is not None:
        folder = Path(named).parent if Path(named).name == CONFIG else Path(named)
        if not configuration(folder).get("model_type"):
            raise FormatError(f"{folder / CONFIG}: not a configuration of transformers")
        return folder
    return None if is_url(source) else configured_folder(Path(source))


def keep_configuration(config: Mapping[str, Any], source: Path, checkpoint: Path) -> Path:
    """Let a checkpoint keep a new configuration, with the other files of the model in ``source``. Return its path.

    Raises:
        FormatError, OSError, StorageError: a file cannot be read or written.
    """
    files_of(source).without_configuration("the checkpoint has a new one").keep(checkpoint)
    return write_configuration(config, checkpoint)
