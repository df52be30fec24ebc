"""Folders of training programs: DeepSpeed's checkpoint, and beside it the program's own files.

Trainer, Accelerate and Lightning resume from such a folder, not from the engine's checkpoint alone. A conversion of the folder
therefore writes one of the same form: the same names, the program's files byte for byte, and a unickpt checkpoint in place of
DeepSpeed's.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from unickpt.base.errors import FormatError
from unickpt.checkpoint.format.layout import LATEST_FILE
from unickpt.checkpoint.load.folders import TRAINER_STATE
from unickpt.checkpoint.storage.posix import PosixStorage
from unickpt.transform.convert.deepspeed.files import is_deepspeed
from unickpt.transform.convert.pickles.regular_files import copy_regular

TRAINER, ACCELERATE, LIGHTNING = "Trainer", "Accelerate", "Lightning"
_MODELS = re.compile(r"pytorch_model(_\d+)?")  # accelerate: MODEL_NAME; one checkpoint per model
_LIGHTNING_TAG = "checkpoint"  # lightning: the tag of DeepSpeedStrategy.save_checkpoint
_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")  # DeepSpeed copies them into the folder; they read its own files only
_NEW = "converted"  # folder for converted checkpoints in messages


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A folder that a training program resumes from.

    Attributes:
        path: the folder.
        program: ``TRAINER``, ``ACCELERATE`` or ``LIGHTNING``.
        tags: names of the DeepSpeed checkpoints in it.
        latest: content of the file ``latest``.
    """

    path: Path
    program: str
    tags: tuple[str, ...]
    latest: str

    def files(self) -> Iterator[str]:
        """Yield the relative names of the program's files. Lightning has none: it stores its state in DeepSpeed's files."""
        if self.program == LIGHTNING:
            return
        for entry in sorted(self.path.iterdir()):
            if entry.is_file() and entry.name not in (LATEST_FILE, *_SCRIPTS):
                yield entry.name
            elif entry.is_dir() and entry.name not in self.tags and not _of_engine(entry):
                inside = (found for found in sorted(entry.rglob("*")) if found.is_file())
                yield from (str(found.relative_to(self.path)) for found in inside)

    def left_out(self) -> list[str]:
        """Return what a conversion of the folder does not contain, each with the reason."""
        others = [entry.name for entry in sorted(self.path.iterdir()) if entry.name not in self.tags and _of_engine(entry)]
        scripts = [name for name in _SCRIPTS if (self.path / name).is_file()]
        return [
            *(f"{name}: 'latest' does not name it" for name in others),
            *(f"{name}: it cannot read the new checkpoint; use 'unickpt export'" for name in scripts),
        ]


def run_folder(folder: Path) -> RunFolder | None:
    """Return the folder of a training program; None for a checkpoint, a save directory or anything else.

    Raises:
        OSError: the folder cannot be read.
    """
    latest = _latest(folder)
    if latest and (folder / TRAINER_STATE).is_file() and is_deepspeed(folder / latest):
        return RunFolder(folder, TRAINER, (latest,), latest)
    models = [entry.name for entry in sorted(folder.glob("pytorch_model*")) if _MODELS.fullmatch(entry.name)]
    if models and all(is_deepspeed(folder / name) for name in models):
        return RunFolder(folder, ACCELERATE, tuple(models), latest or models[0])
    if latest == _LIGHTNING_TAG and is_deepspeed(folder / latest):
        return RunFolder(folder, LIGHTNING, (latest,), latest)
    return None


def copy_files(found: RunFolder, directory: Path) -> int:
    """Copy the program's files and write ``latest``. Return the number of copied files.

    Call it before the checkpoints are written: their manifests come last, so an interrupted conversion is no checkpoint.

    Raises:
        FormatError, OSError, StorageError: a file cannot be read or written.
    """
    storage, number = PosixStorage(directory), 0
    for name in found.files():
        source = found.path / name
        copy_regular(source, storage, name)
        shutil.copystat(source, directory / name)
        number += 1
    storage.write_atomic(LATEST_FILE, found.latest.encode())
    return number


@dataclass(frozen=True, slots=True)
class Suggested:
    """A conversion that lets a job load a checkpoint under any layout.

    Attributes:
        source, directory: arguments of ``unickpt convert``.
        program: the training program; '' for a checkpoint of the engine alone.
        done: whether ``directory`` has the result already.
    """

    source: Path
    directory: Path
    program: str
    done: bool


def suggested(load_dir: Path, tag: str, *, is_done: Callable[[Path], bool]) -> Suggested:
    """Return the conversion for a folder that DeepSpeed cannot load.

    The result is on the same file system and keeps its names. Programs do not count it among their checkpoints: Trainer's and
    Accelerate's rotation look at the names directly in a folder.

    Args:
        load_dir, tag: as for ``DeepSpeedEngine.load_checkpoint``.
        is_done: whether a folder is a unickpt checkpoint.
    """
    program = run_folder(load_dir)
    if program is None or tag not in program.tags:
        made = load_dir / _NEW / tag
        return Suggested(load_dir / tag, made, "", is_done(made))
    above = load_dir.absolute().parent
    # Accelerate expects a number in every name in its folder "checkpoints"
    made = (above.parent if above.name == "checkpoints" else above) / _NEW / load_dir.name
    return Suggested(load_dir, made, program.program, all(is_done(made / name) for name in program.tags))


def require_apart(source: Path, directory: Path) -> None:
    """Raise FormatError if one of two folders is in the other: the copy would include itself."""
    here, there = source.resolve(), directory.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise FormatError(f"{directory}: must be apart from {source}, whose files are copied into it; name another directory")


def _of_engine(folder: Path) -> bool:
    """Whether a folder holds DeepSpeed's files, whichever program saved it."""
    return folder.is_dir() and (is_deepspeed(folder) or folder.name.startswith("global_step"))


def _latest(folder: Path) -> str:
    """Return the folder name in ``latest``; '' if there is none."""
    path = folder / LATEST_FILE
    text = path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""
    return text if text and "/" not in text and text not in (".", "..") else ""
