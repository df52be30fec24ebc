"""The log that all of unickpt writes to."""

from __future__ import annotations

import logging

logger = logging.getLogger("unickpt")


def make_visible() -> None:
    """Give our logger a handler if the user has configured none: a report that no one sees is none."""
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s] %(message)s"))
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
