"""Files of a checkpoint that are not plain files in its directory. See attacks.py."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hostile.attacks import DATA, INDEX, Attack, Reasons, cases, reason, refused
from unickpt.base.errors import NotACheckpointError, UnsafePathError
from unickpt.checkpoint.load.checkpoint import Checkpoint


def _outside(directory: Path, name: str) -> None:
    """Move a file out of the checkpoint, and replace it by a symbolic link."""
    away = directory.parent / "away"
    shutil.move(directory / name, away)
    (directory / name).symlink_to(away)


def _instead(name: str, make: Callable[[Path], None]) -> Attack:
    def attack(directory: Path) -> None:
        path = directory / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        make(path)

    return attack


FILE_ATTACKS: dict[str, Attack] = {
    "data file linked from outside": lambda d: _outside(d, DATA),
    "index linked from outside": lambda d: _outside(d, INDEX),
    "data folder linked from outside": lambda d: _outside(d, "data"),
    "link to itself": _instead(DATA, lambda path: path.symlink_to(path.name)),
    "folder that is a link to itself": _instead("data", lambda path: path.symlink_to(path.name)),
    "named pipe": _instead(DATA, lambda path: os.mkfifo(path)),
    "index a named pipe": _instead(INDEX, lambda path: os.mkfifo(path)),
    "device": _instead(DATA, lambda path: path.symlink_to("/dev/zero")),
    "folder": _instead(DATA, lambda path: path.mkdir()),
}


FILE_REASONS: Reasons = {
    "leads outside": [
        "data file linked from outside",
        "index linked from outside",
        "data folder linked from outside",
        "device",
    ],
    "cannot be resolved": ["link to itself", "folder that is a link to itself"],
    "is missing": ["named pipe", "index a named pipe", "folder"],
}


@pytest.mark.parametrize("name", cases(FILE_ATTACKS))
def test_a_file_that_is_not_a_plain_one_inside_is_refused(victim: Path, name: str) -> None:
    FILE_ATTACKS[name](victim)
    assert reason(FILE_REASONS, name) in refused(victim)[0]


NO_PLAIN_FILES: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "loop": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("name", cases(NO_PLAIN_FILES))
def test_a_manifest_that_is_not_a_plain_file_is_no_checkpoint(victim: Path, name: str) -> None:
    _instead("manifest.json", NO_PLAIN_FILES[name])(victim)
    with pytest.raises((NotACheckpointError, UnsafePathError)):
        Checkpoint.open(victim)
    assert refused(victim)
