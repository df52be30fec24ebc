"""Python stacks of another process: a signal on which Python's fault handler writes them to a file.

This works while the interpreter's lock is held and in an endless loop of Python or C, but not while the process is stopped.
If the program uses the same real-time signal, there are no stacks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from unickpt.private_files import open_regular, replacing

SIGNAL = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else None
SUFFIX = ".stacks"
DEEPEST = 6  # frames that are kept
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d{1,9}) in (?P<name>.*)$')


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a Python stack.

    Attributes:
        function: name of the function.
        file: last two parts of the file's path.
        line: line number.
    """

    function: str
    file: str
    line: int


def path_of(folder: Path, rank: int) -> Path:
    """Return the path of a rank's stacks."""
    return folder / f"{rank:05d}{SUFFIX}"


def listen(path: Path) -> IO[bytes] | None:
    """Write this process's stacks to a file on each request. Return the file, to be kept open; None if impossible."""
    if SIGNAL is None or signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return None
    try:
        with replacing(path) as made:
            file = os.fdopen(os.dup(made.fileno()), "wb+", buffering=0)
        file.write(f"main 0x{threading.main_thread().ident or 0:016x}\n".encode())
        faulthandler.register(SIGNAL, file, all_threads=True, chain=False)
    except (OSError, RuntimeError, ValueError):
        return None
    return file


def ignore() -> None:
    """Stop writing stacks."""
    if SIGNAL is not None:
        faulthandler.unregister(SIGNAL)


def ask(pid: int, path: Path, *, within_s: float = 1.0) -> tuple[Frame, ...]:
    """Return the innermost frames of the main thread of a process on this host; empty if unknown.

    Args:
        pid: process number. A process without the handler gets no signal.
        path: file that the process writes to.
        within_s: time limit in seconds.
    """
    with contextlib.suppress(OSError):
        if SIGNAL is None or not _listens(pid, SIGNAL):
            return ()
        with open_regular(path) as file:
            about = os.fstat(file.fileno())
            if os.stat(f"/proc/{pid}").st_uid != about.st_uid:  # the process number comes from an untrusted ring
                return ()
            os.kill(pid, SIGNAL)
            end = time.monotonic() + within_s
            text = ""
            while time.monotonic() < end:
                time.sleep(0.05)
                file.seek(about.st_size)
                new = file.read(1 << 20).decode(errors="replace")
                if new and new == text:  # complete
                    break
                text = new
            file.seek(0)
            main = file.readline(64).decode(errors="replace").split()
        return innermost(text, main[1] if len(main) == 2 else "")
    return ()


def innermost(text: str, main: str) -> tuple[Frame, ...]:
    """Return the innermost frames of the main thread from the output of ``faulthandler``.

    Args:
        text: output for all threads of one process.
        main: identity of the main thread as in ``text``.
    """
    frames: list[Frame] = []
    here = False
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            here = main in line
        elif here and (found := _FRAME.match(line)) and not found["file"].startswith("<frozen"):
            frames.append(Frame(found["name"], "/".join(Path(found["file"]).parts[-2:]), int(found["line"])))
    return tuple(frames[:DEEPEST])


def _listens(pid: int, number: int) -> bool:
    """Return whether the process has a handler for a signal. Without one, the signal might end the process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
