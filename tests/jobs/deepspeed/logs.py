"""Log lines of the package, collected for a test."""

from __future__ import annotations

import logging


class Log(logging.Handler):
    """Collects the log lines of the package."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Log:
        logging.getLogger("unickpt").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("unickpt").removeHandler(self)
