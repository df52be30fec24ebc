"""Folder of a job in the shared memory of one host. It outlives the processes of the job.

    unickpt-memory-<user>-<token>/
        g<number>/              one generation: the files of a checkpoint, as far as this host holds them
        spare/                  files of generations that were given up, whose pages are used again

The token is a random text in the save directory. It binds generations to that directory: another job, or the same one after its
directory was removed, does not find them. The file names the directory for which it was made. So a copy of a directory
differs from a directory that was moved: a job in the copy would load and replace the generations of the other job.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from pathlib import Path

from unickpt.base.errors import FormatError, StorageError, UnickptError
from unickpt.base.logs import logger
from unickpt.base.private_files import TOKEN, make_folder
from unickpt.checkpoint.format.checksums import digest
from unickpt.checkpoint.format.file_names import DATA_FOLDER, MANIFEST_FILE, ROWS_FOLDER
from unickpt.checkpoint.memory.generations import ABOUT_FILE, Inventory, folder_of, is_file_of_generation, number_of
from unickpt.checkpoint.storage.base import absolute, is_url, read_text
from unickpt.checkpoint.storage.open import open_storage

TOKEN_FILE = ".unickpt-memory"
_SPARE = "spare"
_FOLDERS = ("", DATA_FOLDER, ROWS_FOLDER)


def may_be_in_memory(name: str) -> bool:
    """Whether a name given by a person may mean a generation, ``memory://TOKEN/gNUMBER`` or its folder."""
    return name.startswith("memory://") or folder_name("") in name


def read_token(save_dir: str) -> str:
    """Return the token of a save directory; '' if it has none, or that of the directory of which it is a copy.

    Raises:
        StorageError: the directory cannot be read.
        FormatError: the file holds something else.
    """
    place = open_storage(save_dir)
    text = read_text(place, TOKEN_FILE)
    if text is None:
        return ""
    token, _, made_for = text.partition("\n")
    if not re.fullmatch(TOKEN, token):
        raise FormatError(
            f"{place.where(TOKEN_FILE)} holds {text[:40]!r} instead of 32 hexadecimal digits. Remove the file: checkpoints in "
            "the memory of hosts are then not found, and those on disk are"
        )
    return "" if made_for and _is_copy(save_dir, token, made_for) else token


def _is_copy(save_dir: str, token: str, made_for: str) -> bool:
    """Whether the directory for which a token was made still has it, and is another one.

    A directory may have several names: links, and mounts at several paths, under each of which its files have one number and
    one time of change. A URL and a path may be two names of one bucket.
    """
    own, made_for = (absolute(each.removeprefix("file://")) for each in (save_dir, made_for))
    if made_for == own or is_url(own) is not is_url(made_for):
        return False
    with contextlib.suppress(UnickptError, OSError, ValueError):
        there = read_text(open_storage(made_for), TOKEN_FILE) or ""
        if there.partition("\n")[0] != token:
            return False
        if not is_url(own):
            one, other = (os.stat(os.path.join(each, TOKEN_FILE)) for each in (own, made_for))
            if (one.st_ino, one.st_ctime_ns) == (other.st_ino, other.st_ctime_ns):
                return False
        logger.info("unickpt: %s is a copy of %s: checkpoints in memory of that one are not looked for", own, made_for)
        return True
    return False


def make_token(save_dir: str) -> str:
    """Return the token of a save directory, and create it if there is none. Rank 0 of the job calls this."""
    token = read_token(save_dir)
    if not token:
        token = secrets.token_hex(16)
        open_storage(save_dir).write_atomic(TOKEN_FILE, f"{token}\n{absolute(save_dir)}".encode(errors="replace"))
    return token


def folder_name(token: str) -> str:
    """Return the name of the folder of a job of this user."""
    return f"{folder_prefix()}{token}"


def folder_prefix() -> str:
    """Return how the names of the folders of this user's jobs begin."""
    return f"unickpt-memory-{os.geteuid()}-"


class HostFolder:
    """The folder of a job on this host.

    Args:
        parent: directory in memory that all users share, such as ``/dev/shm``.
        token: token of the save directory.

    Attributes:
        root: path of the folder. It has mode 0700.
        url: name of the folder that is the same on all hosts.
    """

    def __init__(self, parent: str | os.PathLike[str], token: str) -> None:
        self.url = f"memory://{token}"
        self.root = Path(parent) / folder_name(token)

    def make(self) -> None:
        """Create the folder, or check an existing one.

        Raises:
            StorageError: it cannot be created, or other users can enter it.
        """
        try:
            make_folder(self.root)
            make_folder(self.root / _SPARE)
        except OSError as err:
            raise StorageError(f"{self.root}: cannot hold checkpoints in memory ({err})") from err

    def generation(self, number: int) -> Path:
        """Return the folder of a generation."""
        return self.root / folder_of(number)

    def path(self, number: int, name: str) -> Path:
        """Return the path of a file of a generation.

        Raises:
            FormatError: a generation has no file of this name.
        """
        if not is_file_of_generation(name):
            raise FormatError(f"{name[:80]!r} is no file of a generation")
        return self.generation(number) / name

    def inventory(self) -> Inventory:
        """Return what the folder holds. A missing folder holds nothing."""
        found: dict[int, dict[str, int]] = {}
        for folder in _entries(self.root):
            number = number_of(folder.name)
            if number is not None:
                found[number] = self._files(folder)
        return Inventory(found)

    def _files(self, generation: Path) -> dict[str, int]:
        files: dict[str, int] = {}
        for inside in _FOLDERS:
            for path in _entries(generation / inside):
                name = f"{inside}/{path.name}" if inside else path.name
                with contextlib.suppress(OSError):
                    if is_file_of_generation(name) and path.is_file() and not path.is_symlink():
                        files[name] = path.stat().st_size
        return files

    def set_aside(self, number: int, name: str, *, as_name: str) -> Path | None:
        """Take the pages of a file of a generation that was given up. Return the spare file; None if there is no such file."""
        spare = self.root / _SPARE / as_name
        try:
            (self.generation(number) / MANIFEST_FILE).unlink(missing_ok=True)  # first, so that it never looks complete
            os.rename(self.path(number, name), spare)
        except OSError:
            return None
        return spare

    def spare(self, name: str) -> Path:
        """Return the path of a spare file, which need not exist."""
        return self.root / _SPARE / name

    def scratch(self, kind: str, name: str, *, alone: bool) -> Path:
        """Make a folder for a use (``kind``) beside the generations. ``alone``: remove others for this use.

        Raises:
            OSError: it cannot be made.
        """
        place = self.root / kind
        place.mkdir(mode=0o700, exist_ok=True)
        for other in _entries(place) if alone else ():
            if other.name != name:
                shutil.rmtree(other, ignore_errors=True)
        (place / name).mkdir(mode=0o700, exist_ok=True)
        return place / name

    def give_up(self, number: int, *, but: frozenset[str] = frozenset()) -> None:
        """Remove a generation, the commit record first. Files named in ``but`` stay, for their owners to take."""
        folder = self.generation(number)
        with contextlib.suppress(OSError):
            (folder / MANIFEST_FILE).unlink(missing_ok=True)
        for name in self._files(folder):
            if name not in but:
                with contextlib.suppress(OSError):
                    (folder / name).unlink()
        for inside in reversed(_FOLDERS):
            with contextlib.suppress(OSError):
                (folder / inside).rmdir()

    def remove(self) -> None:
        """Remove the folder with all generations."""
        shutil.rmtree(self.root, ignore_errors=True)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def write_about(folder: Path, *, tag: str) -> None:
    """Write what the manifest of a generation does not tell: the name that the framework gave the checkpoint.

    Raises:
        StorageError: the memory is full.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / ABOUT_FILE).write_text(json.dumps({"tag": tag, "checksum": digest(tag.encode())}))
    except OSError as err:
        raise StorageError(f"{folder / ABOUT_FILE}: cannot be written ({err.strerror or err})") from err


def parse_about(data: bytes, *, where: str) -> str:
    """Return the tag of a generation.

    Raises:
        FormatError: the file is malformed, or a bit of it has changed.
    """
    try:
        about = json.loads(data)
        tag, checksum = about["tag"], about["checksum"]
    except (ValueError, KeyError, TypeError, RecursionError) as err:
        raise FormatError(f"{where}: malformed ({type(err).__name__})") from None
    if not isinstance(tag, str) or not tag:
        raise FormatError(f"{where}: the tag is {tag!r}, expected a name")
    if checksum != digest(tag.encode()):
        raise FormatError(f"{where}: the checksum does not match the tag {tag[:80]!r}; the file is damaged")
    return tag
