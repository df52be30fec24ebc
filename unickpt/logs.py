"""The log that all of unickpt writes to."""

from __future__ import annotations

import logging

logger = logging.getLogger("unickpt")


def printable(text: str) -> str:
    """One line that is safe to print: what could steer a terminal or begin a line of its own is escaped.

    For all text that comes from a file, a ring or the network.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def make_visible() -> None:
    """Give our logger a handler if the user has configured none: a report that no one sees is none."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s"))
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
