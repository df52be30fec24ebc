"""The logger of the package."""

from __future__ import annotations

import logging

logger = logging.getLogger("unickpt")


def printable(text: str) -> str:
    """Escape control characters and line breaks. Used for text from files, rings and the network."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def make_visible() -> None:
    """Add a handler to the logger of the package if the program has configured none."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s"))
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
