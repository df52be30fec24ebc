"""Which files of a directory are opened to read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from unickpt.checkpoint.storage.posix import PosixStorage


def opened_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that receives the relative name of each file that a ``PosixStorage`` opens, in order."""
    found: list[str] = []

    def seen(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: PosixStorage, name: str, *arguments: Any) -> Any:
            found.append(name)
            return original(self, name, *arguments)

        return method

    for way in ("reader", "read"):
        monkeypatch.setattr(PosixStorage, way, seen(getattr(PosixStorage, way)))
    return found
