"""End of a process with pending saves: each is finished within a grace period, or abandoned.

An abandoned save leaves no checkpoint, because it has no manifest, and earlier checkpoints are intact. The same
holds for uploads; their local checkpoint is complete in any case.

A normal exit and an uncaught exception run ``finish_all``. SIGTERM (preemption) ends a process at once by default.
If no other code handles it, a thread of this module receives it, waits for the save, and then raises it again with
its default effect. Python runs signal handlers in the main thread, which may be blocked in a collective. The thread
therefore reads ``signal.set_wakeup_fd``, which Python writes to immediately. A training whose ranks stop together
(``unickpt.checkpoint.stopping``) takes the signal over.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from unickpt.base.logs import logger
from unickpt.checkpoint.save.requests import PendingSave, SaveOptions
from unickpt.checkpoint.save.upload import PendingUpload

WRITING_S = 600.0  # limit for the writing of this rank at a normal exit; a longer write means that the storage hangs


class AbandonedSave(NamedTuple):
    """A save that was abandoned at the end of the process.

    Attributes:
        directory: directory of the checkpoint.
        absent: the checkpoint certainly does not exist.
    """

    directory: str
    absent: bool


class GuardedSaver(Protocol):
    """Interface of a saver to the shutdown code."""

    @property
    def options(self) -> SaveOptions: ...

    @property
    def pending(self) -> Sequence[PendingSave]: ...

    @property
    def uploads(self) -> Sequence[PendingUpload]: ...

    def closing(self, *, signalled: bool) -> None:
        """Begin what is left to do before the process ends. ``signalled``: SIGTERM ends it."""

    def leave(self, timeout_s: float) -> bool:
        """Wait until no thread of the saver runs. Return whether all have ended."""

    def abandon(self) -> list[AbandonedSave]:
        """Abandon the pending saves."""

    def report(self) -> None:
        """Log the saves that failed in the background."""


_savers: weakref.WeakKeyDictionary[GuardedSaver, None] = weakref.WeakKeyDictionary()  # in the order of all ranks: as made
_lock = threading.Lock()
_installed = False
_listening = False
_woken: socket.socket | None = None  # what wakes the thread that reads this process's signals; None: there is no thread
_CALLED = 0  # told by the handler; Python itself tells the number of a signal, which is positive
_ending = ""
_taker: Callable[[], None] | None = None  # called at SIGTERM in place of the end of the process


def guard(saver: GuardedSaver) -> None:
    """Make the end of this process wait for the pending saves of a saver."""
    with _lock:
        _savers[saver] = None
        _install()
    listen()


def listen() -> None:
    """Handle SIGTERM from now on. Python sets handlers in the main thread only: elsewhere this does nothing.

    Other code may have had the signal meanwhile, and have left it to the system: asyncio does, at the end of a loop.
    """
    global _listening
    if threading.current_thread() is not threading.main_thread():
        return
    if _listening and signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    with _lock:
        _listening = True
        _listen()


def _install() -> None:
    global _installed
    if not _installed:
        _installed = True
        _at_exit()
        os.register_at_fork(after_in_child=_reset_in_child)


def ending_signal() -> str:
    """Return ``SIGTERM`` if this module has received it, after which no new save begins; otherwise ''."""
    return _ending


def take_over(taker: Callable[[], None]) -> bool:
    """Call a function at each SIGTERM in place of the end of this process, also where other code has handled the signal.

    It is called in another thread, or, if other code reads the signals of this process, in the main thread between two
    instructions, where it must not take a lock that the main thread may hold.

    Returns:
        False outside of the main thread, where Python sets no handler.
    """
    global _taker, _listening
    if threading.current_thread() is not threading.main_thread():
        return False
    with _lock:
        _install()
        _taker, _listening = taker, True
        if _woken is not None or _wake():
            signal.signal(signal.SIGTERM, _tell_thread)
        else:
            signal.signal(signal.SIGTERM, _tell_taker)
    return True


def end_by_signal() -> None:
    """End this process as SIGTERM does: pending saves are finished within their grace, and no new save begins."""
    global _ending
    _ending = "SIGTERM"
    _finish("SIGTERM", time.monotonic())
    die()


def wait_for_end() -> None:
    """Block until SIGTERM ends this process, if it was received; otherwise return.

    The caller would continue as if it had saved.
    """
    while ending_signal():
        time.sleep(0.05)


def _at_exit() -> None:
    """Register ``finish_all`` for the end of the process, twice.

    ``threading._register_atexit`` runs it before Python ends its thread pools. ``atexit`` runs later, when asyncio
    cannot resolve host names any more (it does so in a pool), so no connection to an object store is possible.
    ``atexit`` serves programs that call its functions themselves and then leave.
    """
    atexit.register(finish_all)
    with contextlib.suppress(AttributeError, RuntimeError):  # missing in this Python, or the process is already ending
        threading._register_atexit(finish_all)  # type: ignore[attr-defined]


def _reset_in_child() -> None:
    """Reset the state in a forked child, such as a worker of a data loader: saves and signals belong to the parent."""
    global _ending, _listening, _lock, _taker, _woken
    woken = _woken
    _lock, _listening, _ending, _taker, _woken = threading.Lock(), False, "", None, None
    _savers.clear()
    if woken is not None:  # the descriptor belongs to the thread of the parent
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, woken.fileno()):
            signal.set_wakeup_fd(before)
    if signal.getsignal(signal.SIGTERM) in (_tell_thread, _tell_taker):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def finish_all(*, ending: bool = True) -> None:
    """Wait for all pending saves and uploads of this process.

    Call it on every rank before ``os._exit``, or with ``ending=False`` before a program reads a checkpoint. A normal exit calls
    it. It waits up to ten minutes for the writes of this rank, again as long for its uploads, and then ``grace_seconds``
    for the other ranks. Failed asynchronous saves that were not reported yet are logged as errors.

    Example:
        ```python
        unickpt.finish_all()
        os._exit(0)
        ```

    Args:
        ending: the process ends. The newest checkpoint in the memory of the hosts is written to disk first.

    Returns:
        None, when nothing is pending. What is unfinished after these times is given up, with an error in the log.

    Raises:
        No exception of its own.
    """
    begin = time.monotonic()
    end = begin + WRITING_S
    for saver in list(_savers):
        if ending:
            saver.closing(signalled=False)
        for save in saver.pending:
            save.written.wait(max(end - time.monotonic(), 0.0))
            if saver.options.upload_to:
                save.wait(saver.options.grace_s)  # the end of a save starts its upload
    end = time.monotonic() + WRITING_S
    for saver in list(_savers):
        for upload in saver.uploads:
            upload.written.wait(max(end - time.monotonic(), 0.0))
    _finish("", begin)


def _finish(why: str, since: float) -> None:
    """Wait for all savers within their grace periods, and abandon what is unfinished then.

    ``why``: name of the signal, or ''. ``since``: start of the wait on the monotonic clock, in seconds.
    """
    begin = time.monotonic()
    for saver in list(_savers):
        if why:
            saver.closing(signalled=True)
            for save in saver.pending[-1:]:
                logger.warning("unickpt: received %s; finishing the save of %s first", why, save.directory)
            for upload in saver.uploads[-1:]:
                logger.warning("unickpt: received %s; finishing the upload of %s first", why, upload.source)
        if saver.leave(max(saver.options.grace_s - (time.monotonic() - begin), 0.0)):
            continue
        uploads = saver.uploads
        for directory, absent in saver.abandon():
            waited_s = time.monotonic() - since
            if absent:
                logger.error(
                    "unickpt: Gave up saving %s after %.1f s. No checkpoint was written; earlier checkpoints are intact.",
                    directory,
                    waited_s,
                )
            else:
                logger.error(
                    "unickpt: Stopped waiting for the save of %s after %.1f s. This rank has written its part; whether the "
                    "checkpoint exists depends on rank 0. Earlier checkpoints are intact.",
                    directory,
                    waited_s,
                )
        for upload in uploads[-1:]:
            logger.error(
                "unickpt: Gave up uploading %s after %.1f s. %s was not written; the local checkpoint is complete.",
                upload.source,
                time.monotonic() - since,
                upload.target,
            )
    for saver in list(_savers):
        saver.report()


def _listen() -> None:
    """Start the thread that handles SIGTERM, unless other code handles the signal."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and (_woken is not None or _wake()):
        signal.signal(signal.SIGTERM, _tell_thread)


def _wake() -> bool:
    """Start the thread that reads the signals of this process. Return False if other code reads them, such as asyncio."""
    global _woken
    receiving, sending = socket.socketpair()
    sending.setblocking(False)
    before = signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        return False
    threading.Thread(target=_terminate, args=(receiving, sending, os.getpid()), name="unickpt-sigterm", daemon=True).start()
    _woken = sending
    return True


def _tell_thread(*_: object) -> None:
    """Handle SIGTERM: the thread ends the process. In a forked child, whose own handler calls this one, there is no thread."""
    if _woken is None:
        die()
        return
    with contextlib.suppress(OSError):  # full, or the process is ending
        _woken.send(bytes([_CALLED]))


def _tell_taker(*_: object) -> None:
    """Handle SIGTERM where other code reads the signals of this process."""
    if _taker is None:  # a forked child, whose own handler calls this one
        die()
    else:
        _taker()


def _terminate(receiving: socket.socket, sending: socket.socket, process: int) -> None:
    heard = False  # SIGTERM, of which the handler will tell once more
    while True:
        received = receiving.recv(64)
        if not received:
            return
        for told in received if os.getpid() == process else b"":
            by_python = told == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is _tell_thread
            unheard = told == _CALLED and not heard
            heard = by_python or (heard and told != _CALLED)
            if not by_python and not unheard:
                continue
            if _taker is None:
                end_by_signal()
                sending.close()
                return
            _taker()


def die() -> None:
    """End this process by SIGTERM with its default effect. ``signal.signal`` works only in the main thread."""
    ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)
    os.kill(os.getpid(), signal.SIGTERM)
