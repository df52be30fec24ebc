"""Every system call that a save makes below a folder, where it can be watched, refused, cut short, delayed or be the last."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHANGING = ("open", "mkdir", "writev", "pwrite", "ftruncate", "fsync", "close", "replace", "unlink", "rmdir")
LOOKING = ("stat", "lstat", "listdir", "scandir", "preadv")
CALLS = (*CHANGING, *LOOKING)


@dataclass(frozen=True)
class Call:
    """One call: its number among those that are watched, the function of ``os``, the path below the folder, before or after."""

    number: int
    name: str
    path: str
    after: bool

    @property
    def place(self) -> str:
        """What it was about, without numbers: ``fsync data``, ``replace manifest.json``."""
        first = self.path.split("/")[1:] if "/" in self.path else [self.path]
        what = first[0].split(".")[0] if first else ""
        return f"{self.name} {what or 'folder'}"


Act = Callable[[Call], None]


@contextlib.contextmanager
def watched(folder: Path, act: Act, names: tuple[str, ...] = CALLS) -> Iterator[None]:
    """Call ``act`` before and after every one of these functions of ``os`` that is used below a folder; it may raise."""
    root = str(folder.resolve())
    real = {name: getattr(os, name) for name in names}
    readlink = os.readlink
    numbers = itertools.count()

    def below(target: Any) -> str | None:
        with contextlib.suppress(OSError, TypeError, ValueError):
            path = readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.path.abspath(os.fspath(target))
            if isinstance(path, str) and path.startswith(root):
                return path[len(root) :].lstrip("/")
        return None

    def wrapper(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            path = below(arguments[0]) if arguments else None
            if name == "replace" and path is not None:
                path = below(arguments[1])
            if path is None:
                return real[name](*arguments, **options)
            number = next(numbers)
            act(Call(number, name, path, after=False))
            result = real[name](*arguments, **options)
            act(Call(number, name, path, after=True))
            return result

        return call

    for name in names:
        setattr(os, name, wrapper(name))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)


class Refuse:
    """Raises at the n-th call of the watched kind: instead of it, or although it was done; ``for_ever`` from then on."""

    def __init__(self, number: int, error: int, *, after: bool = False, for_ever: bool = False) -> None:
        self.number, self.error, self.after, self.for_ever = number, error, after, for_ever
        self.hit: Call | None = None
        self.seen = 0  # calls of the watched kind

    def __call__(self, call: Call) -> None:
        self.seen = max(self.seen, call.number + 1)
        meant = call.number == self.number and call.after == self.after
        if meant or (self.for_ever and self.hit is not None):
            self.hit = self.hit or call
            raise OSError(self.error, os.strerror(self.error))


@contextlib.contextmanager
def short_writes(limit_bytes: int) -> Iterator[None]:
    """Every write takes at most so many bytes of its first part, as a pipe, a signal or a nearly full disk makes it."""
    writev, pwrite = os.writev, os.pwrite
    os.writev = lambda descriptor, parts: writev(descriptor, [memoryview(parts[0])[:limit_bytes]])  # type: ignore[assignment]
    os.pwrite = lambda descriptor, data, at: pwrite(descriptor, memoryview(data)[:limit_bytes], at)  # type: ignore[assignment]
    try:
        yield
    finally:
        os.writev, os.pwrite = writev, pwrite
