"""Pauses of Python's cyclic garbage collector while training waits.

A save or a load lists some thousand objects, and so can start a collection of all objects of the process. That takes about
0.2 s in a process with torch and DeepSpeed. The collector runs later instead, when training goes on.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the collector, unless the caller has disabled it. Of use as a decorator, too."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
