"""Time for the workers of a host to save before torchrun ends them: torchrun itself gives 30 s."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

from unickpt.base.process_identity import children_of, environment_of
from unickpt.base.round_folder import note_stay, ranks_saved, ranks_willing
from unickpt.steering.host.workers import is_worker

SHARE = 0.8  # of the time after which the other hosts do not wait for this one


class Patience:
    """The wait for workers that save together at the end of their round.

    They get SIGTERM at the begin. Each stays when it has saved, until torchrun ends it: torchrun takes a worker that ends by
    itself for a failed one.

    Args:
        folder: of the round.
        willing: ranks of this host that save together.
        limit_s: seconds after which torchrun ends them in any case.
    """

    def __init__(self, folder: Path, willing: Collection[int], limit_s: float) -> None:
        self._folder, self._willing, self._end_s = folder, frozenset(willing), time.monotonic() + limit_s

    @classmethod
    def begin(cls, folder: Path, arrive_s: float) -> Patience | None:
        """Ask the workers of this host to save and to stay; None if none of them saves together with the others."""
        willing = ranks_willing(folder)
        if not willing:
            return None
        note_stay(folder)
        for pid in children_of(os.getpid()):
            if is_worker(environment_of(pid)):
                os.kill(pid, signal.SIGTERM)
        return cls(folder, willing, SHARE * arrive_s)

    def lasts(self) -> bool:
        """Return whether a worker has not saved yet, and there is time."""
        return time.monotonic() < self._end_s and not self._willing <= ranks_saved(self._folder)
