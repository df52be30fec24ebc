"""The agent of a host: looks at the rings of its ranks once a second, and tells in the log what hangs.

    python -m unickpt.timing.agent FOLDER

A process of its own, started by the first rank of the host: it sees ranks that hold the interpreter's lock, are stopped or
dead, and it outlives them. It reads files and nothing else; that it is gone or slow changes nothing for training.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from unickpt.diagnosis.examining import Examination, examine
from unickpt.errors import UnickptError
from unickpt.timing.folder import Job, read_folder
from unickpt.timing.processes import State

EVERY_S = 1.0
RECORDS = 4096  # the newest of every rank that are looked at
_WITHOUT_RANKS_S = 60.0  # that it waits for the first ring
_AGAIN_S = 60.0  # a verdict that stays is told again


def start(folder: Path) -> subprocess.Popen[bytes] | None:
    """Start it in the background, in a session of its own: what ends the ranks does not end it. None if that fails."""
    command = [sys.executable, "-m", "unickpt.timing.agent", str(folder)]
    env = {**os.environ, "UNICKPT_AUTOLOAD": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with contextlib.suppress(OSError):
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=env, start_new_session=True)
    return None


def watch(folder: Path, tell: Callable[[str], None], *, every_s: float = EVERY_S) -> None:
    """Look until all ranks have ended, and tell of every verdict once a minute."""
    begin = time.monotonic()
    told: dict[tuple[object, ...], float] = {}
    while True:
        try:
            job = read_folder(folder, last=RECORDS)
        except (UnickptError, OSError):
            if time.monotonic() - begin > _WITHOUT_RANKS_S:
                return
            time.sleep(every_s)
            continue
        _tell(examine(job, slow=False), told, tell)
        if over(job):
            return
        time.sleep(every_s)


def over(job: Job) -> bool:
    """No rank of this host is there any more."""
    return all(job.states[rank] is State.DEAD or ring.closed for rank, ring in job.ranks.items())


def _tell(found: Examination, told: dict[tuple[object, ...], float], tell: Callable[[str], None]) -> None:
    now = time.monotonic()
    for verdict, line in zip(found.verdicts, found.lines, strict=True):
        key = (verdict.syndrome, verdict.ranks, verdict.communicator, verdict.link)
        if now - told.get(key, -_AGAIN_S) >= _AGAIN_S:
            told[key] = now
            tell(line)


def main() -> None:
    def tell(line: str) -> None:
        print(f"unickpt: {line}", file=sys.stderr, flush=True)

    with contextlib.suppress(KeyboardInterrupt):
        watch(Path(sys.argv[1]), tell)


if __name__ == "__main__":
    main()
