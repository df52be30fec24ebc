"""Folder of an iteration below the folder that Megatron's ``--load`` names, and the tracker file.

iter_0001000/                        the checkpoint
latest_checkpointed_iteration.txt    the iteration
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from unickpt.base.errors import MismatchError
from unickpt.checkpoint.checkpoint_folder import RELEASE, TRACKER, iteration_name


def target_of(folder: Path, step: int) -> Path:
    """Return the folder of an iteration. Raises MismatchError if it exists."""
    target = folder / (iteration_name(step) if step else RELEASE)
    if target.exists():
        raise MismatchError(f"{target}: exists already; choose another folder")
    return target


@contextlib.contextmanager
def filled(folder: Path, step: int) -> Iterator[Path]:
    """Give an empty folder, which becomes the iteration at the end; then the tracker names it. An exception removes it."""
    target = target_of(folder, step)
    fresh = target.with_name(f"{target.name}.part")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        yield fresh
        fresh.rename(target)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    tracker = folder / f"{TRACKER}.part"
    tracker.write_text(str(step) if step else RELEASE)
    tracker.replace(folder / TRACKER)
