"""Where the threads of a process are, asked from outside: a signal, upon which Python's own handler writes them to a file.

That works while the interpreter's lock is held, in an endless loop of Python or C, and not while the process is stopped. A
real-time signal that nobody else uses; where somebody does, there are no stacks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import IO

from unickpt.private_files import open_regular, replacing

SIGNAL = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else None
SUFFIX = ".stacks"
DEEPEST = 6  # frames that are told
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')


def path_of(folder: Path, rank: int) -> Path:
    """Where a rank's stacks are written to."""
    return folder / f"{rank:05d}{SUFFIX}"


def listen(path: Path) -> IO[bytes] | None:
    """Write this process's stacks to a file whenever it is asked to. The file has to stay open; None if it can't be done."""
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
    """No longer."""
    if SIGNAL is not None:
        faulthandler.unregister(SIGNAL)


def ask(pid: int, path: Path, *, within_s: float = 1.0) -> str:
    """Where the main thread of a process on this host is: its innermost frames; '' if that can't be found out.

    Args:
        pid: of the process; it is left alone unless it listens.
        path: that it writes to.
        within_s: that it may take.
    """
    with contextlib.suppress(OSError):
        if SIGNAL is None or not _listens(pid, SIGNAL):
            return ""
        with open_regular(path) as file:
            about = os.fstat(file.fileno())
            if os.stat(f"/proc/{pid}").st_uid != about.st_uid:  # the number of the process is what some ring says
                return ""
            os.kill(pid, SIGNAL)
            end = time.monotonic() + within_s
            text = ""
            while time.monotonic() < end:
                time.sleep(0.05)
                file.seek(about.st_size)
                new = file.read(1 << 20).decode(errors="replace")
                if new and new == text:  # nothing more has come
                    break
                text = new
            file.seek(0)
            main = file.readline(64).decode(errors="replace").split()
        return innermost(text, main[1] if len(main) == 2 else "")
    return ""


def innermost(text: str, main: str) -> str:
    """The innermost frames of the main thread in what ``faulthandler`` has written.

    Args:
        text: all threads of one process.
        main: identity of the main thread, as it is written there.
    """
    frames: list[str] = []
    here = False
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            here = main in line
        elif here and (found := _FRAME.match(line)) and not found["file"].startswith("<frozen"):
            frames.append(f"{found['name']} ({'/'.join(Path(found['file']).parts[-2:])}:{found['line']})")
    return " < ".join(frames[:DEEPEST])


def _listens(pid: int, number: int) -> bool:
    """The process has a handler for a signal: to another one it might mean the end."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
