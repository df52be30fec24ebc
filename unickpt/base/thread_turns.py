"""Short turns of threads at the interpreter's lock, while a thread of unickpt works beside training.

A thread that wants the lock asks for it after ``sys.getswitchinterval()``, 5 ms by default. Training takes the lock after every
operation of torch. While a save merges its index in Python, each of these operations would wait for so long.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TURN_S = 2e-4

_lock = threading.Lock()
_users = 0
_before = 0.0


@contextmanager
def short_turns() -> Iterator[None]:
    """Shorten the turns of all threads of this process. The last user restores the interval, unless other code has set it."""
    global _users, _before
    with _lock:
        if not _users:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(_before, TURN_S))
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users and abs(sys.getswitchinterval() - min(_before, TURN_S)) < 1e-6:
                sys.setswitchinterval(_before)
