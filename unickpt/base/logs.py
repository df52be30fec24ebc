"""The logger of the package.

A program may configure logging before this package is imported, later, or never, and frameworks do it too. Whatever it does,
a line appears once, and says ``unickpt`` once: a message begins with it, and many formats begin with the name of the logger.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

logger = logging.getLogger("unickpt")

_BEGIN = f"{logger.name}: "
_NAME_FIELDS = ("%(name)", "{name", "$name", "${name")


def printable(text: str) -> str:
    """Escape control characters and line breaks. Used for text from files, rings and the network."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def make_visible() -> None:
    """Let lines from ``INFO`` on appear also in a program that has configured no logging."""
    if not any(isinstance(handler, _OwnHandler) for handler in logger.handlers) and not any(_handlers()):
        logger.addHandler(_OwnHandler())
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


class _OwnHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Prints lines on standard error as long as the program has no handler of its own for them."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("[%(asctime)s] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not any(_handlers()):
            super().emit(record)


def _handlers() -> Iterator[logging.Handler]:
    """Yield the handlers of the program that get the lines of this logger."""
    at: logging.Logger | None = logger
    while at is not None:
        yield from (each for each in at.handlers if not isinstance(each, (_OwnHandler, logging.NullHandler)))
        at = at.parent if at.propagate else None


def _shows_name(handler: logging.Handler) -> bool:
    """Whether the format of a handler has the name of the logger."""
    form = getattr(handler.formatter, "_fmt", None) or ""
    return any(field in form for field in _NAME_FIELDS)


def _once(record: logging.LogRecord) -> bool:
    """Leave out the name at the beginning of a message if every handler shows that of the logger. A filter of the logger."""
    found = list(_handlers())
    if found and all(map(_shows_name, found)) and isinstance(record.msg, str):
        record.msg = record.msg.removeprefix(_BEGIN)
    return True


logger.addFilter(_once)
