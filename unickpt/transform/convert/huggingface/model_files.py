"""Files of a transformers model besides its weights: configuration, tokenizer, chat templates.

A checkpoint that is made of a model keeps them in the folder ``model`` beside its manifest, and what is made of that checkpoint
keeps them, too. They belong to no save: the manifest does not list them, and ``unickpt verify`` does not check them.
"""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unickpt.base.errors import FormatError, MismatchError, UnsafePathError
from unickpt.checkpoint.format.file_names import MODEL_FILES, MODEL_FOLDER, MODEL_TEMPLATES
from unickpt.checkpoint.storage.posix import PosixStorage
from unickpt.transform.convert.huggingface.files import CONFIG, WEIGHTS, configuration
from unickpt.transform.convert.pickles.regular_files import check_inside, copy_regular

CODE = "*.py"
_OF_LIBRARIES = "huggingface"  # where SkyRL and verl put configuration and tokenizer


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Files of a model that a checkpoint keeps.

    Attributes:
        folder: where they are.
        names: relative paths of those that can be copied.
        settings: values of ``config.json`` to change.
        left_out: files that are not kept, each with the reason.
    """

    folder: Path
    names: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def without_configuration(self, reason: str) -> ModelFiles:
        """Return the other files, because the configuration does not describe the checkpoint."""
        if CONFIG not in self.names:
            return self
        names = tuple(name for name in self.names if name != CONFIG)
        return replace(self, names=names, settings={}, left_out=(*self.left_out, f"{CONFIG} of the model: {reason}"))

    def keep(self, directory: Path) -> tuple[str, ...]:
        """Copy the files beside a checkpoint that is being written. Returns their names there.

        Raises:
            MismatchError: the folder for them has a model.
            FormatError, OSError, StorageError: a file cannot be read or written.
        """
        place = directory / MODEL_FOLDER
        if place.is_dir() and any(path.name.endswith(WEIGHTS) for path in place.iterdir()):
            raise MismatchError(f"{place}: contains a model; name another directory for the checkpoint")
        storage = PosixStorage(directory)
        for name in self.names:
            copy_regular(self.folder / name, storage, f"{MODEL_FOLDER}/{name}")
        if self.settings and CONFIG in self.names:
            write_configuration({**configuration(self.folder), **self.settings}, directory)
        return tuple(f"{MODEL_FOLDER}/{name}" for name in self.names)


def write_configuration(config: Mapping[str, Any], directory: Path) -> Path:
    """Write a configuration beside a checkpoint, and return its path. Raises OSError, StorageError."""
    name = f"{MODEL_FOLDER}/{CONFIG}"
    PosixStorage(directory).write_atomic(name, (json.dumps(config, indent=2) + "\n").encode())
    return directory / name


def configured_folder(checkpoint: Path) -> Path | None:
    """Return the folder with the configuration of a checkpoint.

    It is what the checkpoint keeps, itself, the one above as in a Trainer run, or ``huggingface`` in one of these.
    """
    above = checkpoint.parent
    places = (checkpoint / MODEL_FOLDER, checkpoint, above, checkpoint / _OF_LIBRARIES, above / _OF_LIBRARIES)
    return next((folder for folder in places if configuration(folder).get("model_type")), None)


def kept_by(checkpoint: Path) -> ModelFiles | None:
    """Return the files of the model of a checkpoint, or None if there are none."""
    kept = checkpoint / MODEL_FOLDER
    folder = configured_folder(checkpoint) or (kept if kept.is_dir() else None)
    return None if folder is None else files_of(folder)


def files_of(folder: Path) -> ModelFiles:
    """Return the files of a model in a folder. One that leads out of it is left out."""
    names, left = [], []
    for name in _names_in(folder):
        try:
            check_inside(folder, folder / name)
            names.append(name)
        except (FormatError, UnsafePathError) as err:
            left.append(str(err))
    return ModelFiles(folder, tuple(names), left_out=tuple(left))


def _names_in(folder: Path, patterns: tuple[str, ...] = MODEL_FILES) -> Iterator[str]:
    present = sorted(path.name for path in folder.iterdir() if path.is_file() and not path.name.endswith(WEIGHTS))
    yield from (name for name in present if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))
    yield from (f"{MODEL_TEMPLATES}/{path.name}" for path in sorted((folder / MODEL_TEMPLATES).glob("*.jinja")))


def copy_model_files(source: Path | None, folder: Path, with_code: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Copy configuration and tokenizer. Return the names of the files copied, and of those not copied.

    Args:
        source: folder of a model, or None to copy nothing.
        folder: output directory.
        with_code: also copy Python files.

    Raises:
        UnsafePathError: a file is a symbolic link that leaves ``source``.
        OSError: a file cannot be copied.
    """
    if source is None or source.resolve() == folder.resolve():
        return (), ()
    chosen = tuple(_names_in(source, (*MODEL_FILES, *((CODE,) if with_code else ()))))
    for name in chosen:
        check_inside(source, source / name)  # a downloaded folder could link to a private file: it would be published
    for name in chosen:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(source / name, folder / name)
    others = (path.name for path in source.iterdir() if path.is_file() and not path.name.endswith(WEIGHTS))
    return chosen, tuple(sorted(name for name in others if name not in chosen))
