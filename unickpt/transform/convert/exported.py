"""What a writer of another program's format returns, and the folder that it fills.

Writers read block by block and check no checksums, because a fragment would be read again for each of its blocks. Commands
verify the checkpoint before.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Exported:
    """An exported checkpoint.

    Attributes:
        folder: its folder.
        tensors: number of tensors, without further names. Of a universal checkpoint of DeepSpeed: of trained parameters.
        size_bytes: size of the written tensors.
        files: names of the files with tensors. Empty if each tensor has a file of its own.
        notes: state that is missing or differs from the checkpoint or the request, one sentence each.
    """

    folder: Path
    tensors: int
    size_bytes: int
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@contextlib.contextmanager
def filled(target: Path, pointer: Path, text: str) -> Iterator[Path]:
    """Give an empty folder, which becomes ``target`` at the end. Then ``pointer`` gets ``text``. An exception removes it."""
    fresh = target.with_name(f"{target.name}.part")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        yield fresh
        fresh.rename(target)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    part = pointer.with_name(f"{pointer.name}.part")
    part.write_text(text)
    part.replace(pointer)
