"""The end of a process while a save is being written: it is finished, within a grace, or abandoned.

Abandoned means absent: without its manifest a checkpoint does not exist, and the one before is intact.
The same goes for uploads, of which the local checkpoint is whole in any case.

An ordinary exit and an uncaught exception run ``finish_all``. SIGTERM (preemption) would end the process
at once; where nobody else handles it, a thread of ours hears of it, waits for the save, and then
lets it have its effect. Python runs signal handlers in the main thread, which may be deep in a
collective; so the thread listens at ``signal.set_wakeup_fd`` instead, which is written to at once.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import signal
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unickpt.saving import Saver

logger = logging.getLogger("unickpt")

WRITING_S = 600.0  # what an ordinary end grants to writing itself: longer, and the storage does not work

_savers: weakref.WeakSet[Saver] = weakref.WeakSet()
_lock = threading.Lock()
_installed = False
_listening = False
_ending = ""


def guard(saver: Saver) -> None:
    """From now on, the end of this process waits for what this saver has begun."""
    global _installed, _listening
    with _lock:
        _savers.add(saver)
        if not _installed:
            _installed = True
            _at_exit()
            os.register_at_fork(after_in_child=_forget)
        if not _listening:
            _listening = True
            _listen()


def ending() -> str:
    """``SIGTERM`` once this process has received it (and it is ours to handle): no new save begins. Otherwise ''."""
    return _ending


def wait_for_end() -> None:
    """Do not return to a program that would go on as if it had saved: the signal ends this process within the grace."""
    while ending():
        time.sleep(0.05)


def _at_exit() -> None:
    """Run ``finish_all`` before Python ends its thread pools; ``atexit`` comes after that, when no name can be looked up
    any more (asyncio does it in a pool), and so no connection to an object store be made. And by ``atexit`` as well, for
    programs that run its functions by themselves and then leave."""
    atexit.register(finish_all)
    with contextlib.suppress(AttributeError, RuntimeError):  # not in this Python; the process is ending already
        threading._register_atexit(finish_all)  # type: ignore[attr-defined]


def _forget() -> None:
    """In a forked child, such as a data loader's worker: the saves and the signals are its parent's; it may begin its own."""
    global _ending, _listening, _lock
    _lock, _listening, _ending = threading.Lock(), False, ""
    _savers.clear()
    if signal.getsignal(signal.SIGTERM) is _heard:
        signal.set_wakeup_fd(-1)  # it leads to the parent's thread
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def finish_all() -> None:
    """Wait for all that this process has begun: before reading a checkpoint, or before leaving by ``os._exit``.

    The end of the process does it by itself. Waits ``WRITING_S`` for this rank's writing (and again for its sending,
    if there are uploads) and then the saver's grace for other ranks. Asynchronous saves that have failed are logged
    as errors, unless a later call has done so.
    """
    begin = time.monotonic()
    end = begin + WRITING_S
    for saver in list(_savers):
        for save in saver.pending:
            save.written.wait(max(end - time.monotonic(), 0.0))
            if saver.options.upload_to:
                save.wait(saver.options.grace_s)  # then its upload is known
    end = time.monotonic() + WRITING_S
    for saver in list(_savers):
        for upload in saver.uploads:
            upload.written.wait(max(end - time.monotonic(), 0.0))
    _finish("", begin)


def _finish(why: str, since: float) -> None:
    """Wait for all savers, each within its grace, and give up what is not over then.

    Args:
        why: the signal, or ''.
        since: when the waiting began, on the monotonic clock.
    """
    begin = time.monotonic()
    for saver in list(_savers):
        if why:
            for save in saver.pending[-1:]:
                logger.warning("unickpt: %s; finishing the save of %s first", why, save.directory)
            for upload in saver.uploads[-1:]:
                logger.warning("unickpt: %s; finishing the upload of %s first", why, upload.source)
        if saver.leave(max(saver.options.grace_s - (time.monotonic() - begin), 0.0)):
            continue
        uploads = saver.uploads
        for directory, absent in saver.abandon():
            waited_s = time.monotonic() - since
            if absent:
                logger.error(
                    "unickpt: Gave up saving %s after %.1f s. No checkpoint was written; earlier checkpoints are intact.",
                    directory, waited_s,
                )  # fmt: skip
            else:
                logger.error(
                    "unickpt: Stopped waiting for the save of %s after %.1f s. This rank has written its part; whether the "
                    "checkpoint exists depends on rank 0. Earlier checkpoints are intact.", directory, waited_s,
                )  # fmt: skip
        for upload in uploads[-1:]:
            logger.error(
                "unickpt: Gave up uploading %s after %.1f s. %s was not written; the local checkpoint is whole.",
                upload.source, time.monotonic() - since, upload.target,
            )  # fmt: skip
    for saver in list(_savers):
        saver.report()


def _listen() -> None:
    """Hear of SIGTERM, if nobody else does."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    receiving, sending = socket.socketpair()
    sending.setblocking(False)
    before = signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)
    if before != -1:  # somebody else listens, such as asyncio
        signal.set_wakeup_fd(before)
        return
    signal.signal(signal.SIGTERM, _heard)
    threading.Thread(target=_terminate, args=(receiving, sending, os.getpid()), name="unickpt-sigterm", daemon=True).start()


def _heard(*_: object) -> None:
    """Only so that the signal does not end the process by itself."""


def _terminate(receiving: socket.socket, sending: socket.socket, process: int) -> None:
    while True:
        received = receiving.recv(64)
        if not received:
            return
        if signal.SIGTERM in received and signal.getsignal(signal.SIGTERM) is _heard and os.getpid() == process:
            global _ending
            _ending = "SIGTERM"
            _finish("SIGTERM", time.monotonic())
            sending.close()
            ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)  # Python's own function works in the main thread only
            os.kill(process, signal.SIGTERM)
            return
