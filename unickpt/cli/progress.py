"""Progress bars."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn


class Advance:
    """Callback that moves a progress bar; does nothing without one."""

    def __init__(self, progress: Progress | None, what: str, total_bytes: int) -> None:
        self._progress = progress
        self._task = None if progress is None else progress.add_task(what, total=total_bytes)

    def __call__(self, size_bytes: int) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, size_bytes)


@contextmanager
def progress_bar(what: str, total_bytes: int) -> Iterator[Advance]:
    """Show a progress bar on standard error if it is a terminal. Standard output keeps the results only."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield Advance(None, what, total_bytes)
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield Advance(progress, what, total_bytes)
