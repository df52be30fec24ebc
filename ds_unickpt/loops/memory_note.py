"""The note in a ``checkpoint-N`` folder that stands for a checkpoint in the memory of the hosts.

``trainer_resume`` makes such folders, because Trainer reads its own files before the engine exists. The engine then loads the
generation that the note names.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from unickpt.base.errors import FormatError
from unickpt.checkpoint.storage.posix import PosixStorage

_FILE = "unickpt-memory.json"


@dataclass(frozen=True, slots=True)
class MemoryNote:
    """What the note in a folder says.

    Attributes:
        run: ``output_dir`` of the job.
        generation: number of the generation.
    """

    run: str
    generation: int

    def leave_in(self, folder: Path) -> None:
        """Write the note into a folder."""
        PosixStorage(folder).write_atomic(_FILE, json.dumps(asdict(self)).encode())


def noted_in(folder: str) -> MemoryNote | None:
    """Return what the note in a folder says; None if it has none.

    Raises:
        FormatError: the note is malformed.
    """
    path = Path(folder) / _FILE
    if not path.is_file():
        return None
    try:
        note = json.loads(path.read_bytes())
        return MemoryNote(str(note["run"]), int(note["generation"]))
    except (ValueError, KeyError, TypeError, RecursionError, OSError) as err:
        raise FormatError(f"{path}: malformed ({type(err).__name__})") from None
