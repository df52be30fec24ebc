"""Find the checkpoint that a command-line argument means.

The argument is a path or a URL of a checkpoint, a save directory, or the output directory of a Trainer run. Manifests and
indexes are read, data files are not.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from unickpt.base.errors import NotACheckpointError
from unickpt.checkpoint.checkpoint_folder import iteration_name, latest_tag, tracked_iteration
from unickpt.checkpoint.format.manifest import MANIFEST_FILE
from unickpt.checkpoint.load.folders import TRAINER_STATE, is_unfinished, list_tags, trainer_folders
from unickpt.checkpoint.load.validation import is_checkpoint, newer_of_deepspeed
from unickpt.checkpoint.storage.base import Storage, is_url
from unickpt.checkpoint.storage.open import open_storage
from unickpt.cli.output import one_line

_SHOWN = 8  # names in a message
_NUMBER = re.compile(r"\d+")
TRANSFORMERS = "transformers"  # the kind of a folder with weights, which no job resumes from
_FSTAB = Path("/etc/fstab")


@dataclass(frozen=True, slots=True)
class Location:
    """Meaning of a directory or URL.

    Attributes:
        checkpoint: the checkpoint, or None for a save directory without ``latest`` and without Megatron's tracker file.
        save_directory: the save directory, or None if the directory is itself a checkpoint.
    """

    checkpoint: str | None
    save_directory: str | None


def locate(directory: str) -> Location:
    """Classify a directory.

    Raises:
        NotACheckpointError: the directory is neither a checkpoint nor a save directory. The message says what it is.
        UnsafePathError, FormatError: ``latest`` names something outside the directory, or the tracker file is damaged.
        StorageError: the directory cannot be read.
    """
    place = open_storage(directory)
    if is_checkpoint(directory):
        return Location(place.where(), None)
    latest = latest_tag(directory)
    if latest is not None and (is_checkpoint(place.where(latest)) or not foreign(directory)):
        return Location(place.where(latest), place.where())
    iteration = tracked_iteration(directory)
    if iteration is not None and is_checkpoint(place.where(iteration_name(iteration))):
        return Location(place.where(iteration_name(iteration)), place.where())
    inside = [name for name in place.folders() if is_checkpoint(place.where(name))]
    if len(inside) == 1 and place.size_bytes(TRAINER_STATE) is not None:  # checkpoint-500, which never holds two
        return Location(place.where(inside[0]), place.where())
    if inside or trainer_folders(place):
        return Location(None, place.where())
    raise NotACheckpointError(f"{place}: {_what_it_is(place, directory)}")


def locate_checkpoint(directory: str) -> str:
    """Return the checkpoint of a directory.

    Raises:
        NotACheckpointError: as for ``locate``, and if a save directory has no ``latest``.
        UnsafePathError, FormatError, StorageError: as for ``locate``.
    """
    location = locate(directory)
    if location.checkpoint is None:
        found = [tag.tag for tag in list_tags(directory) if tag.complete]
        names = ", ".join(found[-_SHOWN:]) if found else "none is complete"
        raise NotACheckpointError(
            f"{directory}: no file names the latest checkpoint; name one of the checkpoints there: {names}"
        )
    warn_of_newer(location.checkpoint)
    return location.checkpoint


def warn_of_newer(checkpoint: str) -> None:
    """Tell that DeepSpeed itself has saved into the folder of a checkpoint, which the command goes on to read."""
    newer = newer_of_deepspeed(open_storage(checkpoint))
    if newer:
        text = (
            f"{checkpoint}: DeepSpeed has saved here since: {newer} is newer than {MANIFEST_FILE}. This command reads the "
            f"older checkpoint of unickpt. 'unickpt convert {shlex.quote(checkpoint)} DIR' reads the one of DeepSpeed"
        )
        print(f"unickpt: {one_line(text, sys.stderr)}", file=sys.stderr)


def foreign_beside(directory: str) -> dict[str, str]:
    """Return the kind of each checkpoint of another program in a directory, by name. Empty for a URL.

    DeepSpeed writes its own checkpoint where unickpt cannot describe the state of a job.
    """
    if is_url(directory) or is_checkpoint(directory):
        return {}
    place = open_storage(directory)
    others = [name for name in place.folders() if not is_checkpoint(place.where(name))]
    if not others:
        return {}
    from unickpt.transform.convert.detect import kind_of  # needs torch

    kinds = {name: kind_of(Path(directory, name)) for name in others}
    return {name: kind for name, kind in kinds.items() if kind not in ("", TRANSFORMERS)}


def advice_for(directory: str, others: dict[str, str]) -> str:
    """Return the command that makes a unickpt checkpoint of the newest of the checkpoints in ``foreign_beside``."""
    newest = max(others, key=lambda name: ([int(number) for number in _NUMBER.findall(name)], name))
    return f"'unickpt convert {shlex.quote(str(Path(directory, newest)))} DIR' makes one of it"


def named(others: dict[str, str]) -> str:
    """Return the text that names checkpoints of other programs."""
    more = f" and {len(others) - _SHOWN:,} others" if len(others) > _SHOWN else ""
    return ", ".join(f"{name} ({kind})" for name, kind in list(others.items())[-_SHOWN:]) + more


def lost(directory: str, *, table: Path = _FSTAB) -> str:
    """Return why an empty or missing directory may be lost storage, so that it does not mean a first start; '' if it does.

    Args:
        directory: a path.
        table: the system's table of file systems.
    """
    path = Path(os.path.abspath(directory))
    if path.is_symlink() and not path.exists():
        return f"is a link to {os.readlink(path)}, which does not exist; is its storage mounted?"
    for each in (path, *path.parents):
        if each.is_file():
            return f"{each} is a file; name a directory"
    if not path.parent.is_dir():
        return f"the folder above, {path.parent}, does not exist; is its storage mounted? Create it before the first start"
    points = [point for point in _mount_points(table) if point == path or point in path.parents]
    unmounted = next((point for point in points if not os.path.ismount(point)), None)
    return "" if unmounted is None else f"{unmounted} is not mounted, although {table} has it"


def _mount_points(table: Path) -> list[Path]:
    """Return the directories where the system mounts storage when it starts."""
    try:
        fields = [line.split() for line in table.read_text(errors="replace").splitlines()]
    except OSError:
        return []
    named = [each for each in fields if len(each) > 3 and each[1].startswith("/") and "noauto" not in each[3].split(",")]
    return [Path(each[1].replace("\\040", " ")) for each in named if not each[0].startswith("#")]


def foreign(directory: str) -> str:
    """Return the kind of another program's checkpoint; '' if there is none, or for a URL."""
    from unickpt.transform.convert.detect import kind_of  # imports the readers of all formats, which most commands do not need

    return "" if is_url(directory) else kind_of(Path(directory))


def is_file(directory: str) -> bool:
    """Whether a path names a file. False for a URL."""
    return not is_url(directory) and Path(directory).is_file()


def _what_it_is(place: Storage, directory: str) -> str:
    kind = foreign(directory)
    if kind:
        return f"is a checkpoint of {kind}, not of unickpt; 'unickpt convert {shlex.quote(directory)} DIR' makes one of it"
    if is_file(directory):
        return "is a file; name the directory of a checkpoint"
    if not place.folders() and not place.names():
        there = not is_url(directory) and Path(directory).is_dir()
        return "the directory is empty" if there else "there is no such directory" + (", or nothing in it" * is_url(directory))
    others = foreign_beside(directory)
    if others:
        return f"has checkpoints of other programs, none of unickpt: {named(others)}; {advice_for(directory, others)}"
    if is_unfinished(place):
        return "no manifest.json: the save or the conversion that wrote it did not finish; use an earlier one, or convert again"
    return "neither a checkpoint (it has no manifest.json) nor a directory of checkpoints (no 'latest', none inside)"
