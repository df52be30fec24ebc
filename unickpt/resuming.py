"""Which checkpoint of a folder a job resumes from: the one that ``latest`` names, or the newest whole one before it.

Reads manifests, never data: whether a checkpoint can be used is known once it is read, so the
caller asks again.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from unickpt.commit import LATEST_FILE
from unickpt.errors import FormatError, StorageError, UnickptError
from unickpt.loading import read_manifest
from unickpt.manifest import MANIFEST_FILE, check_path
from unickpt.storage import PosixStorage

_MAX_LATEST_BYTES = 4096
_AGAIN = 20  # times that one being saved again and again is tried again

Identity = tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class Choice:
    """What to try next.

    Attributes:
        tag: None if there is nothing, or nothing more.
        notes: what is wrong with the folder itself, for the log.
    """

    tag: str | None
    notes: tuple[str, ...] = ()


def latest_tag(folder: str | Path) -> str | None:
    """The tag that ``latest`` names, or None if there is no such file.

    Raises:
        FormatError: it holds no plain name of a directory inside.
        StorageError: it cannot be read.
    """
    path = Path(folder) / LATEST_FILE
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            data = file.read(_MAX_LATEST_BYTES + 1)
    except OSError as err:
        raise StorageError(f"{path}: cannot be read ({err.strerror or err})") from err
    try:
        tag = data.decode("utf-8").strip()
    except UnicodeDecodeError:
        tag = ""
    if not tag or len(data) > _MAX_LATEST_BYTES:
        raise FormatError(f"{path}: does not hold the name of a checkpoint")
    return check_path(tag, where=str(path))


def whole(folder: str | Path) -> list[tuple[int, str]]:
    """(step, name) of every directory in a folder that has a sound manifest, newest first."""
    found = []
    with contextlib.suppress(OSError):
        for path in Path(folder).iterdir() if Path(folder).is_dir() else []:
            with contextlib.suppress(UnickptError, OSError):
                if (path / MANIFEST_FILE).is_file():
                    found.append((read_manifest(PosixStorage(path)).step, path.name))
    return sorted(found, reverse=True)


class Candidates:
    """The checkpoints of a folder in the order in which a job tries them; ask again if one turned out to be damaged.

    First what ``latest`` names; no tag if there is no ``latest`` (the job is new). If ``latest`` cannot be
    used, or what it names could not, the newest whole one that was not tried. One that was saved again while it
    was being read comes again: its old files are gone, and its new ones have not been looked at.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._tried: list[str] = []
        self._offered: tuple[str, Identity] | None = None
        self._again = 0

    def next(self) -> Choice:
        """What to try now."""
        choice = self._next()
        if choice.tag is not None:
            self._offered = (choice.tag, identity(self._folder / choice.tag))
            if choice.tag not in self._tried:
                self._tried.append(choice.tag)
        return choice

    def _next(self) -> Choice:
        notes = []
        if self._offered is None:
            try:
                return Choice(latest_tag(self._folder))
            except UnickptError as err:
                notes.append(str(err))
        else:
            tag, before = self._offered
            if identity(self._folder / tag) not in (before, None) and self._again < _AGAIN:
                self._again += 1
                return Choice(tag, (f"{self._folder / tag} was saved again while it was being read",))
        older = [name for _, name in whole(self._folder) if name not in self._tried]
        return Choice(older[0] if older else None, tuple(notes))


def identity(directory: str | Path) -> Identity:
    """Something that changes when a checkpoint is saved again; None if there is none."""
    try:
        found = (Path(directory) / MANIFEST_FILE).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
