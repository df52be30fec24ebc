"""What an agent tells of its workers while a round starts: those that cannot tell where they are themselves.

A worker that is stopped, or hangs before it has imported torch, tells nothing (``unickpt/diagnosis/start_watch.py``). If it
is the only one of its host, no neighbour sees it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from unickpt.diagnosis.host.process_state import State, state_of
from unickpt.diagnosis.start_watch import SEEN, TOLD, StartNote, key_of

FIRST_S, LOOK_S = 5.0, 2.0  # until the first look, and between two
LASTS_S = 900.0  # of a start


class StartNotes:
    """Thread of one round. Never raises.

    Args:
        store: the agents' store of the round. It may never answer: then the thread is left behind.
        host: name of this host.
        run_id: torchrun's name of the job.
        start: the round.
        is_over: returns whether the round has ended.
    """

    def __init__(self, store: Any, host: str, run_id: str, start: str, is_over: Callable[[], bool]) -> None:
        self._store, self._host, self._is_over = store, host, is_over
        self._start = (run_id, start)
        self._ranks: Mapping[int, int] = {}
        self._told: dict[int, State] = {}
        threading.Thread(target=self._run, name="unickpt-steering-start", daemon=True).start()

    def begun(self, ranks: Mapping[int, int]) -> None:
        """Take the ranks of this host by process number."""
        self._ranks = dict(ranks)

    def _run(self) -> None:
        end_s = time.monotonic() + LASTS_S
        time.sleep(FIRST_S)
        with contextlib.suppress(Exception):  # the store ends with its round
            while time.monotonic() < end_s and not self._is_over():
                self.look()
                time.sleep(LOOK_S)

    def look(self) -> None:
        """Look once."""
        for pid, rank in self._ranks.items():
            state = state_of(pid)
            cannot = state in (State.STOPPED, State.STUCK) or not self._store.check([key_of(*self._start, TOLD, rank)])
            if cannot and self._told.get(rank) is not state:
                self._told[rank] = state
                self._store.set(key_of(*self._start, SEEN, rank), StartNote(self._host, pid, state=state).text())
