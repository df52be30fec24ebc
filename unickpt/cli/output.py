"""Output of a command: styled tables and progress bars on a terminal, plain aligned text elsewhere.

Names in a checkpoint are untrusted, so characters that control a terminal or break a line are escaped.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from unickpt.base.errors import FormatError
from unickpt.base.logs import printable
from unickpt.checkpoint.storage.open import open_storage


class Output:
    """Writes lines, tables and JSON to one stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._console = Console(file=stream, markup=False, highlight=False, emoji=False, soft_wrap=True)

    @classmethod
    def for_lines(cls, out: Output, *, as_json: bool) -> Output:
        """Return where a command prints its lines: ``out``, or nowhere if it prints a JSON document instead."""
        return cls(io.StringIO()) if as_json else out

    def line(self, text: str = "", *, style: str = "") -> None:
        """One line; ``style`` is used on a terminal only."""
        shown = one_line(text, self._stream)
        if self._console.is_terminal:
            self._console.print(Text(shown, style=style))
        else:
            print(shown, file=self._stream)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A titled table; without rows only the title. Integers are aligned to the right, with thousands separated."""
        right = [all(type(row[at]) is int for row in rows) for at in range(len(columns))]
        cells = [[self._cell(value) for value in row] for row in rows]
        self.line()
        self.line(title, style="bold")
        if not rows:
            return
        if self._console.is_terminal:
            table = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
            for column, align_right in zip(table.columns, right, strict=True):
                column.justify = "right" if align_right else "left"
                column.overflow = "fold"
            for row in cells:
                table.add_row(*(Text(cell) for cell in row))
            self._console.print(table, soft_wrap=False)
            return
        lines = [list(columns), *cells]
        widths = [max(len(row[at]) for row in lines) for at in range(len(columns))]
        for row in lines:
            padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
            print("  ".join(padded).rstrip(), file=self._stream)

    def text(self, text: str) -> None:
        """Print text without escaping. Only for text that this program generated."""
        print(text, file=self._stream)

    def json(self, document: Any) -> None:
        """One JSON document, in ASCII so that it survives any encoding.

        Raises:
            FormatError: the document is nested too deeply for JSON.
        """
        try:
            text = json.dumps(document, indent=1)
        except RecursionError:
            raise FormatError("the checkpoint's objects are nested too deeply to be printed") from None
        print(text, file=self._stream)

    def _cell(self, value: object) -> str:
        return f"{value:,}" if type(value) is int else one_line(str(value), self._stream)


@contextmanager
def progress_bar(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error if it is a terminal; the function moves it by so many bytes."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total_bytes)
        yield lambda size_bytes: progress.advance(task, size_bytes)


def one_line(text: str, stream: TextIO) -> str:
    """Escape characters that are not printable or that the encoding of the stream lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return printable(text).encode(encoding, "backslashreplace").decode(encoding)


def write_json(path: Path, document: object) -> None:
    """Write a JSON file. Readers see the old file or the new one, also after a crash.

    Raises:
        StorageError: the file cannot be written.
    """
    open_storage(str(path.parent)).write_atomic(path.name, f"{json.dumps(document, indent=1)}\n".encode())


def human_ms(seconds: float) -> str:
    """Format a time, for example ``1,234.50 ms``."""
    return f"{seconds * 1e3:,.2f} ms"


def human_bytes(size_bytes: int) -> str:
    """Format a size, for example ``1.5 GiB (1,610,612,736 bytes)``."""
    exact = f"{size_bytes:,} byte" + ("" if size_bytes == 1 else "s")
    value = float(size_bytes)
    for unit in ("", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024 or unit == "PiB":
            return f"{value:.1f} {unit} ({exact})" if unit else exact
        value /= 1024
    raise AssertionError("unreachable")
