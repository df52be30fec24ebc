"""A rank of a training that is told to end, and stops with the others at one step boundary.

The main thread calls ``due`` at each boundary, which costs a lock while nobody has told the job to end. A thread listens to
SIGTERM of this process and, twice a second, to what the other ranks have told. It never waits for the main thread, which may
be in a collective.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from unickpt.base.logs import logger, printable
from unickpt.base.round_folder import must_stay, note_saved, note_willing
from unickpt.checkpoint.coordination.ends import Ends
from unickpt.checkpoint.save import shutdown
from unickpt.checkpoint.stopping.agreement import Agreement, Decision, Look

EXIT_CODE = 128 + int(signal.SIGTERM)  # as a shell shows the end by SIGTERM
LISTEN_S, AGREE_S = 0.5, 0.02  # intervals of looks at the store: while nobody is told to end, and afterwards
SHARE_S = 0.0002  # of an interval for each rank: one store serves all of them
LAUNCHER_S, STAY_S = 5.0, 60.0  # that a rank which has saved waits for SIGTERM: under steering, and if its agent asks for it


@dataclass(frozen=True, slots=True)
class Job:
    """The job of this rank.

    Attributes:
        rank, world: of the job.
        store: connection to the job's key-value store that nothing else uses; None for a single process.
        prefix: of the keys, the same on all ranks.
        ended: returns the ranks that have ended, as far as the launcher knows.
        hopeless: returns why the ranks cannot stop together; '' if they can.
        folder: of the round on this host under steering, where each rank is ended by SIGTERM; None otherwise.
    """

    rank: int = 0
    world: int = 1
    store: Any = None
    prefix: str = "unickpt/stopping"
    ended: Callable[[], frozenset[int]] = frozenset
    hopeless: Callable[[], str] = str
    folder: Path | None = None


class StopTogether:
    """This rank's part.

    Args:
        job: returns the job; None before the process groups exist.
        grace_s: seconds from the notice to the boundary, after which this rank ends without a save.
        end: ends this process without a save.
    """

    def __init__(self, job: Callable[[], Job | None], grace_s: float, end: Callable[[], None] = shutdown.end_by_signal) -> None:
        self._job, self._grace_s, self._end = job, grace_s, end
        self.signalled = threading.Event()
        self._lock = threading.Lock()
        self._passed = 0  # boundaries
        self._ahead: int | None = None  # see ``Look``
        self._look: Look | None = None  # set when this rank knows that the job is to end
        self._decision: Decision | None = None
        self._reached = threading.Event()
        self._leaves = False
        self._signals = 0
        self._agreement: Agreement | None = None
        self._ended: Callable[[], frozenset[int]] = frozenset
        self._known: Job | None = None
        self._pause_s = AGREE_S
        self._process = os.getpid()
        threading.Thread(target=self._run, name="unickpt-stopping", daemon=True).start()

    def signal(self) -> None:
        """Take a SIGTERM of this process."""
        self._signals += 1
        self.signalled.set()

    # ------------------------------------------------------------ the main thread

    def due(self, step: int) -> bool:
        """Return whether all ranks save now, and end. Every rank calls it at each step boundary."""
        with self._lock:
            self._passed += 1
            boundary, self._ahead = self._passed, step - self._passed
            if self._look is None:
                return False
        while (decision := self._decision) is None or not decision.boundary:
            time.sleep(AGREE_S)  # if there is no common boundary, the thread ends this process
        if boundary < decision.boundary:
            return False
        self._reached.set()
        return True

    def leave(self) -> NoReturn:
        """End this process when the saves of all ranks have ended.

        Raises:
            SystemExit: always, with ``EXIT_CODE``.
        """
        shutdown.finish_all()
        self.meet()
        raise SystemExit(EXIT_CODE)

    def leave_at_exit(self) -> None:
        """End this process as ``leave`` does when it exits by itself."""
        if not self._leaves:
            self._leaves = True
            atexit.register(self._leave_by_signal)

    def _leave_by_signal(self) -> None:
        shutdown.finish_all()
        self.meet()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        shutdown.die()

    def meet(self) -> None:
        """Wait for the other ranks, and for the launcher: it takes the first rank that ends for a failure."""
        end_s = time.monotonic() + self._grace_s
        with contextlib.suppress(Exception):  # rank 0 has served the store, and has ended
            if self._agreement is not None:
                self._agreement.arrive()
                while not self._agreement.all_arrived() and not self._ended() and time.monotonic() < end_s:
                    time.sleep(self._pause_s)
        job = self._known
        if job is None or job.folder is None:
            return
        note_saved(job.folder, job.rank)
        end_s = time.monotonic() + STAY_S
        if self.signalled.wait(LAUNCHER_S):
            while self._signals < 2 and must_stay(job.folder) and time.monotonic() < end_s:
                time.sleep(self._pause_s)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            why = self._await_notice()
            if self._process == os.getpid():
                self._stop(why, time.monotonic() + self._grace_s)
        except Exception as err:  # the store has ended with rank 0
            self._give_up(f"the ranks cannot agree any more ({type(err).__name__})")

    def _await_notice(self) -> str:
        """Wait until the job is told to end, and return why."""
        told = ""
        with contextlib.suppress(Exception):  # rank 0 has ended with the store, so nobody tells anything there any more
            while not told and not self.signalled.wait(max(LISTEN_S, self._pause_s)):
                told = self._agreement.told() if self._connected() and self._agreement is not None else ""
            return told
        self.signalled.wait()
        return ""

    def _connected(self) -> bool:
        if self._known is None:
            self._known = job = self._job()
            if job is not None and job.folder is not None:
                note_willing(job.folder, job.rank)
            if job is not None and job.store is not None:
                self._pause_s = max(AGREE_S, SHARE_S * job.world)
                ends = Ends(job.store, rank=job.rank, prefix=f"{job.prefix}/ends")
                self._ended = lambda: job.ended() | ends()
                self._agreement = Agreement(job.store, rank=job.rank, world=job.world, prefix=job.prefix)
        return self._known is not None

    def _stop(self, told: str, until_s: float) -> None:
        while not self._connected():
            if time.monotonic() > until_s:
                return self._give_up("this rank has not met the others yet")
            time.sleep(AGREE_S)
        job, agreement = self._known, self._agreement
        assert job is not None
        why = told or f"rank {job.rank} on {socket.gethostname()} has received SIGTERM"
        if agreement is not None:
            agreement.tell(why)
        with self._lock:
            self._look = look = Look(self._passed + 1, self._ahead)
        decision = Decision(look.boundary)
        if agreement is not None:
            agreement.look_from(look)
            decision = self._decided(agreement, job, until_s)
        if not decision.boundary:
            return self._give_up(decision.reason)
        if job.rank == 0:
            logger.info("unickpt: %s: all ranks save at the same step boundary, and end with exit code %d", why, EXIT_CODE)
        self._decision = decision
        while not self._reached.wait(5 * self._pause_s):
            reason = self._obstacle(job)
            if reason or time.monotonic() > until_s:
                return self._give_up(reason or f"the step boundary is not reached within {self._grace_s:g} s")
        return None

    def _decided(self, agreement: Agreement, job: Job, until_s: float) -> Decision:
        while True:
            decision = agreement.decision()
            if decision is not None:
                return decision
            reason = self._obstacle(job)
            if not reason and time.monotonic() > until_s:
                missing = ", ".join(map(str, agreement.missing()))
                reason = f"ranks {missing} did not answer within {self._grace_s:g} s" if missing else "rank 0 does not answer"
            if reason:
                return agreement.give_up(reason)
            time.sleep(self._pause_s)

    def _obstacle(self, job: Job) -> str:
        """Return why the other ranks do not come to the boundary; '' as far as this rank knows, they do."""
        ended = sorted(self._ended())
        return f"rank {ended[0]} has ended" if ended else job.hopeless()

    def _give_up(self, reason: str) -> None:
        logger.warning(
            "unickpt: no common checkpoint at the end: %s. This rank ends now, and the next start resumes from the newest "
            "complete checkpoint",
            printable(reason),
        )
        self._end()
