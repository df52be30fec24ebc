"""What unickpt logs in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collect the lines that unickpt logs on this rank."""
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Collector()
    logging.getLogger("unickpt").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("unickpt").removeHandler(handler)
