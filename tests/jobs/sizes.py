"""Sizes of the models and batches of jobs, which jobs of many ranks make larger by environment variables."""

from __future__ import annotations

import os


def size_of(what: str, usual: int) -> int:
    """Return a size: that of ``UNICKPT_TEST_WHAT``, or the usual one. All numbers of data-parallel ranks divide a batch."""
    return int(os.environ.get(f"UNICKPT_TEST_{what}", usual))
