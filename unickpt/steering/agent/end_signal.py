"""An agent that is told to end says so at once, while torchrun still gives its workers time to save."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable

SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})  # that torchrun handles


class EndSignal:
    """Calls a function once, in a thread, with the name of the first signal that asks this process to end.

    torchrun handles these signals in its main thread, which then waits for the workers. Python writes the number of each
    handled signal to a file descriptor at once (``signal.set_wakeup_fd``). Without it, for instance in another thread, nothing
    is called.
    """

    def __init__(self, told: Callable[[str], None]) -> None:
        self._told = told
        self._receiving, self._sending = socket.socketpair()
        self._sending.setblocking(False)
        self._listens = False
        with contextlib.suppress(ValueError):  # not the main thread
            before = signal.set_wakeup_fd(self._sending.fileno(), warn_on_full_buffer=False)
            if before != -1:  # other code uses it
                signal.set_wakeup_fd(before)
                return
            self._listens = True
            threading.Thread(target=self._run, name="unickpt-steering-signals", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(ValueError, OSError):
            if self._listens:
                signal.set_wakeup_fd(-1)
            self._sending.close()

    def _run(self) -> None:
        while received := self._receiving.recv(64):
            for number in received:
                if number in SIGNALS:
                    with contextlib.suppress(Exception):
                        self._told(signal.Signals(number).name)
                    return
