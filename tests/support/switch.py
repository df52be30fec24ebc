"""The switch in the environment of a process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def switched(value: str = "1") -> Iterator[None]:
    before = os.environ.get("UNICKPT", "")
    os.environ["UNICKPT"] = value
    try:
        yield
    finally:
        os.environ["UNICKPT"] = before
