"""Stacks of a process that has not begun to record: it listens from the import of torch on.

A rank that hangs while it loads data or weights, downloads or compiles has no ring, and no file for its stack beside it. Where
timing is asked for by the environment, or by the agent that has started the process, the file is found by process number.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from pathlib import Path
from typing import IO

from unickpt.base.private_files import SHARED_MEMORY, make_named_folder
from unickpt.diagnosis.host import stack_dumps


def path_of(pid: int) -> Path:
    """Return the path of the stacks of a process of this user."""
    return SHARED_MEMORY / f"unickpt-{os.geteuid()}-starting" / f"{pid}{stack_dumps.SUFFIX}"


class EarlyStacks:
    """The file of this process, until it records.

    Attributes:
        file: open file; None if it does not listen.
        records: whether this process records, so that its start is over.
    """

    def __init__(self) -> None:
        self.file: IO[bytes] | None = None
        self.records = False
        self._owner = 0

    def begin(self) -> None:
        """Listen, if this process is a rank. Files of processes that have ended are removed. Never raises."""
        with contextlib.suppress(Exception):
            if not os.environ.get("RANK", "").isdigit() or not SHARED_MEMORY.is_dir():
                return
            path = path_of(os.getpid())
            make_named_folder(path.parent)
            for old in path.parent.iterdir():
                if old.stem.isdigit() and not Path(f"/proc/{old.stem}").exists():
                    old.unlink(missing_ok=True)
            self.file, self._owner = stack_dumps.listen(path), os.getpid()
            atexit.register(self._remove)

    def end(self) -> None:
        """Leave the stacks to the file beside the ring, which this process listens to from now on. Never raises."""
        file, self.file = self.file, None
        if file is not None:
            atexit.unregister(self._remove)
            file.close()
            self._remove()

    def _remove(self) -> None:
        if self._owner == os.getpid():  # and not a fork of it
            with contextlib.suppress(OSError):
                path_of(self._owner).unlink(missing_ok=True)


EARLY = EarlyStacks()


def listen_early() -> None:
    """Called at the end of the import of torch."""
    EARLY.begin()
