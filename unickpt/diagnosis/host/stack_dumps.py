"""Python stacks of another process: a signal on which Python's fault handler writes that of the main thread to a file.

The signal goes to the main thread, which is interrupted while it writes its own stack. The fault handler can write the stacks
of all threads too, but then it reads frames of threads that run, and a process with busy threads ends by SIGSEGV after a few
requests.

This works while the interpreter's lock is held and in an endless loop of Python or C, but not while the process is stopped.
If the program uses the same real-time signal, there are no stacks. A process that an exception ends writes where it was raised,
and one that SIGTERM or a fatal signal ends where it was: a launcher ends all ranks as soon as one has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import re
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO

from unickpt.base.private_files import open_regular, replacing

SIGNAL = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else None
SUFFIX = ".stacks"
DEEPEST = 6  # frames that are kept
_HEADER, _DUMP = 1 << 16, 1 << 20  # bytes that are read
_CLOCK_NS = 20_000_000  # by which the time of a file may be behind the clock
# packages whose frames are not the user's own code; those of Megatron share a namespace with others
_LIBRARIES = (
    "torch", "deepspeed", "transformers", "accelerate", "lightning", "pytorch_lightning", "lightning_fabric", "numpy",
    "unickpt", "ds_unickpt", "megatron_unickpt", "megatron.core", "megatron.training", "megatron.legacy",
    "megatron.post_training",
    "megatron.rl",
)  # fmt: skip
MainFirst = Callable[[int, int], bool]
_INSTALLED = ("site-packages", "dist-packages")
_OTHER = "Signal in another thread"  # as in _fast.c: what follows is no stack of the main thread
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d{1,9}) in (?P<name>.*)$')


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a Python stack.

    Attributes:
        function: name of the function.
        file: last two parts of the file's path.
        line: line number.
        own: whether it is the innermost frame of the user's own code.
    """

    function: str
    file: str
    line: int
    own: bool = field(default=False, compare=False)


def place_of(stack: Sequence[Frame]) -> Frame | None:
    """Return the frame of the user's own code, otherwise the innermost one; None without frames."""
    return next((frame for frame in stack if frame.own), stack[0] if stack else None)


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
        main = f"main 0x{threading.main_thread().ident or 0:016x}"
        file.write(f"{main}\nlibraries {json.dumps(_library_folders())}\n".encode())
        faulthandler.register(SIGNAL, file, all_threads=False, chain=False)
    except (OSError, RuntimeError, ValueError):
        return None
    return file


def listen_to_end(file: IO[bytes], main_first: MainFirst = lambda *_: False) -> bool:
    """Write this process's stacks to a file when SIGTERM or a fatal signal ends it. What the program has set itself stays.

    SIGTERM comes to the main thread. A fatal signal may come in any thread, such as one of gloo: then the main thread writes
    its stack, if ``main_first`` can ask it to. Otherwise all threads are written, and beside busy threads of Python, SIGSEGV
    can end the process in place of the first signal (1 of 20 times with three).

    Args:
        file: of ``listen``.
        main_first: as ``recording.fast_path.main_stack_first``.

    Returns:
        Whether fatal signals are among them; ``ignore`` needs it.
    """
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            faulthandler.register(signal.SIGTERM, file, all_threads=False, chain=True)
        if not faulthandler.is_enabled():
            faulthandler.enable(file, all_threads=False)
            if SIGNAL is None or not main_first(file.fileno(), SIGNAL):
                faulthandler.enable(file, all_threads=True)
            return True
    return False


def ignore(*, fatal: bool = False) -> None:
    """Stop writing stacks, also in a fork of the process. ``fatal``: the result of ``listen_to_end``."""
    faulthandler.unregister(signal.SIGTERM)
    if fatal:
        faulthandler.disable()  # puts back what was there before both handlers
    if SIGNAL is not None:
        faulthandler.unregister(SIGNAL)


def note_exception(file: IO[bytes], trace: TracebackType | None) -> bool:
    """Write the stack of the exception that ends this process, as the fault handler would. Return whether there is one."""
    if trace is None:
        return False
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(trace)]  # extract_tb would read the source files
    lines = [f'  File "{code.co_filename}", line {line} in {code.co_name}' for code, line in reversed(frames)]
    head = f"Thread 0x{threading.main_thread().ident or 0:016x} (most recent call first):"
    with contextlib.suppress(OSError):
        file.write("\n".join([head, *lines, ""]).encode(errors="replace"))
    return True


def own_frames(frame: FrameType | None) -> tuple[Frame, ...]:
    """Return the innermost frames of a stack of this process."""
    lines = ["Thread main (most recent call first):"]
    while frame is not None:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        frame = frame.f_back
    return innermost("\n".join(lines), "main", _library_folders())


def ask_all(paths: Mapping[int, Path], *, within_s: float = 1.0) -> dict[int, tuple[Frame, ...]]:
    """Return the innermost frames of the main threads of processes on this host, by process number; empty if unknown.

    Args:
        paths: file that each process writes to, by its number. A process without the handler gets no signal.
        within_s: time limit in seconds, for all of them.
    """
    with contextlib.ExitStack() as files:
        asked = {pid: found for pid, path in paths.items() if (found := _signalled(pid, path, files)) is not None}
        texts, end = dict.fromkeys(asked, ""), time.monotonic() + within_s
        missing = set(asked)
        while missing and time.monotonic() < end:
            time.sleep(0.05)
            for pid in tuple(missing):
                file, size = asked[pid]
                file.seek(size)
                new = file.read(_DUMP).decode(errors="replace")
                if new and new == texts[pid]:  # complete
                    missing.discard(pid)
                texts[pid] = new
        return {pid: innermost(texts[pid], *_header(asked[pid][0])) if pid in asked else () for pid in paths}


def _signalled(pid: int, path: Path, files: contextlib.ExitStack) -> tuple[IO[bytes], int] | None:
    """Signal a process. Return its file, and the size before; None if it cannot be asked."""
    with contextlib.suppress(OSError):
        if SIGNAL is None or not _listens(pid, SIGNAL):
            return None
        file = files.enter_context(open_regular(path))
        about = os.fstat(file.fileno())
        if os.stat(f"/proc/{pid}").st_uid != about.st_uid:  # the process number comes from an untrusted ring
            return None
        _signal_main_thread(pid, SIGNAL)
        return file, about.st_size
    return None


_tgkill = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None)  # glibc 2.30 and newer


def _signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread of a process, whose number is that of the process.

    Raises:
        OSError: there is no such process.
    """
    if _tgkill is None:  # the kernel chooses the main thread, too, if that does not block the signal
        os.kill(pid, number)
    elif _tgkill(pid, pid, number) != 0:
        raise OSError(ctypes.get_errno(), f"process {pid} cannot be asked for its stack")


def kept(path: Path, since_ns: int) -> tuple[Frame, ...]:
    """Return the innermost frames of the newest stack in a file; empty if it is older than a time on the wall clock."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        about = os.fstat(file.fileno())
        if about.st_mtime_ns + _CLOCK_NS < since_ns:
            return ()
        main, libraries = _header(file)
        file.seek(max(about.st_size - _DUMP, 0))
        return innermost(file.read(_DUMP).decode(errors="replace"), main, libraries)
    return ()


def _header(file: IO[bytes]) -> tuple[str, tuple[str, ...]]:
    """Return the identity of the main thread, and the folders of libraries, from the head of a file."""
    file.seek(0)
    main = file.readline(64).decode(errors="replace").split()
    kind, _, text = file.readline(_HEADER).decode(errors="replace").partition(" ")
    libraries: tuple[str, ...] = ()
    with contextlib.suppress(ValueError, RecursionError, TypeError):
        libraries = tuple(str(each) for each in json.loads(text)) if kind == "libraries" else ()
    return (main[1] if len(main) == 2 else ""), libraries


def innermost(text: str, main: str, libraries: Sequence[str] = ()) -> tuple[Frame, ...]:
    """Return the innermost frames of the main thread from output of ``faulthandler``. Of several stacks, the last one counts.

    The innermost frame of the user's own code is always among them, as the last one if it is farther out.

    Args:
        text: output for the main thread, or for all threads, of one process.
        main: identity of the main thread as in ``text``.
        libraries: folders whose files are not the user's own code.
    """
    found: list[tuple[str, int, str]] = []
    here = False
    for line in text.splitlines():
        if line == _OTHER:
            break
        if line.startswith(("Thread ", "Current thread ")):
            here = bool(main) and main in line
            found = [] if here else found
        elif line.startswith("Stack "):  # of the thread that has the signal
            here, found = True, []
        elif here and (match := _FRAME.match(line)) and not match["file"].startswith("<frozen"):
            found.append((match["file"], int(match["line"]), match["name"]))
    own = _own([file for file, _, _ in found], libraries)
    frames = [Frame(name, "/".join(Path(file).parts[-2:]), line, own=at == own) for at, (file, line, name) in enumerate(found)]
    return tuple(frames[:DEEPEST] if own < DEEPEST else [*frames[: DEEPEST - 1], frames[own]])


def _own(files: Sequence[str], libraries: Sequence[str]) -> int:
    """Return the position of the first file of the user's own code; if all are installed, of the first one of no library."""
    no_library = [at for at, file in enumerate(files) if not any(_is_in(folder, file) for folder in libraries)]
    own = [at for at in no_library if not _installed(files[at])]
    return next(iter(own or no_library), -1)


def _is_in(folder: str, file: str) -> bool:
    """Return whether a file belongs to a library. Installed packages are below the folder of the standard library."""
    return file.startswith(f"{folder}/") and not _installed(file[len(folder) :])


def _installed(file: str) -> bool:
    return any(part in _INSTALLED for part in Path(file).parts)


def _library_folders() -> list[str]:
    """Return the folders of the standard library and of imported packages that are not the user's own code."""
    paths = sysconfig.get_paths()
    return sorted({*(paths[name] for name in ("stdlib", "platstdlib")), *_package_folders()})


def _package_folders() -> Iterator[str]:
    for name in _LIBRARIES:
        for folder in getattr(sys.modules.get(name), "__path__", ()):
            yield str(folder)


def _listens(pid: int, number: int) -> bool:
    """Return whether the process has a handler for a signal. Without one, the signal might end the process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
