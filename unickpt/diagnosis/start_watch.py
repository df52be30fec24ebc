"""What others wait for before a job records: a rank that loads, compiles, is stopped, or whose host has not come.

From the import of torch on, a thread of each rank looks once a second where its main thread is, until the rank records. It
tells the others by the store of the launcher, so nothing of torch is wrapped, and no collective is added: at once if it is
elsewhere or in another state than it has told, and more and more seldom if not. When ranks have waited in
``init_process_group``, or in an early collective, for ten seconds, one of them says who has not come there, and where it is. It
says so up to two seconds later if a rank may be stopped, and has said that it tells of itself no sooner.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from unickpt.base.process_identity import boot_id
from unickpt.base.round_folder import HOSTS, RUN_ID, STORE
from unickpt.diagnosis.host.early_stacks import EARLY
from unickpt.diagnosis.host.process_state import State, state_of
from unickpt.diagnosis.host.stack_dumps import Frame, own_frames

LOOK_S, TOLD_S = 1.0, 3.0  # each look; a rank tells of itself
KNOWN_S, SEEN_S, SAID_S = 3.0, 6.0, 10.0  # of a wait: a rank asks for others; tells of its neighbours; says who is missing
REST_S = 5.0  # longest interval at which a rank tells of itself that nothing has changed, and asks for others that it waits for
CERTAIN_S = 12.0  # after which it is said who is missing, even if it is not known whether that rank is stopped
AGAIN_S = 120.0  # after which a wait that lasts is told again
TURN_S = 0.7  # a rank asks all others so much later than the rank before it, as that costs the store a request for each
CONNECT_S, SILENT_S = 2.0, 3.0
LATER_CALLS, LONGEST_S = 200, 3600.0  # a job that has done so many collectives, or runs for so long, has started
C10D, WRAPPER = os.path.join("torch", "distributed", "distributed_c10d.py"), "wrapper"
TOLD, SEEN, SAID = "told", "seen", "said"
MOST, LONGEST = 4096, 16384  # ranks that are asked about; bytes of a note


@dataclass(frozen=True, slots=True)
class StartNote:
    """What a rank tells of itself.

    Attributes:
        host, pid: where it runs.
        first: first rank of its host; -1 if unknown.
        waits: call of torch that it waits in, with the number of the call; '' if it is elsewhere.
        since_ns: since when, on the wall clock of its host.
        looks: counts its looks: a process that is stopped tells nothing new.
        state: of its main thread.
        stack: innermost frames of the main thread.
        every_s: seconds until it tells again, if nothing changes.
    """

    host: str
    pid: int
    first: int = -1
    waits: str = ""
    since_ns: int = 0
    looks: int = 0
    state: State = State.UNKNOWN
    stack: tuple[Frame, ...] = ()
    every_s: float = LOOK_S

    def text(self) -> bytes:
        """The note for the store."""
        return json.dumps({**asdict(self), "state": self.state.value}).encode()

    @staticmethod
    def of(text: bytes) -> StartNote | None:
        """Return the note of another rank; None if it is none."""
        if len(text) > LONGEST:
            return None
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            raw = json.loads(text)
            stack = tuple(
                Frame(str(each["function"]), str(each["file"]), int(each["line"]), bool(each["own"])) for each in raw["stack"]
            )
            return StartNote(
                str(raw["host"]), int(raw["pid"]), int(raw["first"]), str(raw["waits"]), int(raw["since_ns"]),
                int(raw["looks"]), State(raw["state"]), stack, min(float(raw.get("every_s", LOOK_S)), REST_S),
            )  # fmt: skip
        return None


def key_of(run_id: str, start: str, kind: str, rank: int) -> str:
    """Return the key of a note in the store.

    Args:
        run_id: torchrun's name of the job.
        start: distinguishes the starts of the workers.
        kind: ``TOLD``: by the rank itself; ``SEEN``: by a neighbour, or the agent of its host; ``SAID``: in which call ranks
            were last said to wait.
        rank: that the note is about.
    """
    return f"unickpt/start/{run_id}/{start}/{kind}/{rank}"


def call_of(frame: Any) -> tuple[str, int]:
    """Return the outermost call of ``torch.distributed`` in a stack, and a number that identifies it; ('', 0) for none."""
    found = "", 0
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(C10D) and code.co_name != WRAPPER and not code.co_name.startswith("_"):
            found = code.co_name, id(frame)
        frame = frame.f_back
    return found


def calls_so_far() -> int:
    """Return how many collectives of the whole job this rank has begun; -1 before there is a process group."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        return int(c10d._get_default_group()._get_sequence_number_for_group()) if c10d and c10d.is_initialized() else -1
    except Exception:  # of a backend that does not count
        return 0


class Pace:
    """When to tell: at once if there is something new, then after one look, and each time after twice as long."""

    def __init__(self) -> None:
        self._told: object = None
        self._next_s, self._every_s = 0.0, LOOK_S

    def due(self, what: object, now_s: float) -> float:
        """Return after how many seconds to tell again, if it is to be told now; 0 if not.

        Args:
            what: what there is to tell.
            now_s: time on a monotonic clock.
        """
        new = what != self._told
        if not new and now_s < self._next_s:
            return 0.0
        self._every_s = LOOK_S if new else min(2 * self._every_s, REST_S)
        self._told, self._next_s = what, now_s + self._every_s
        return self._every_s


@dataclass(frozen=True, slots=True)
class News:
    """What this rank has heard of another one.

    Attributes:
        looks: newest ``StartNote.looks``.
        since_s: when that was new.
        again: whether the other one has told something since this rank asks.
    """

    looks: int
    since_s: float
    again: bool


class StartWatch:
    """Thread of one rank. No method raises.

    Args:
        rank: this rank.
        world: number of ranks.
        first: first rank on this host; -1 if unknown.
        count: ranks on this host.
    """

    def __init__(self, rank: int, world: int, first: int, count: int) -> None:
        self._rank, self._world, self._first, self._count = rank, world, first, count
        self._stopped, self._owner = threading.Event(), os.getpid()
        self._thread: threading.Thread | None = None
        self._main = threading.main_thread().ident or 0
        self._begun_s = time.monotonic()
        self._note = StartNote(socket.gethostname(), os.getpid(), first)
        self._call: tuple[str, int] = ("", 0)
        self._since_s = 0.0
        self._store: Any = None
        self._news: dict[int, News] = {}
        self._tells, self._asked_s = Pace(), 0.0
        self._said_s = 0.0
        self._start = (os.environ.get(RUN_ID, ""), _start_of_workers())

    def begin(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="unickpt-start", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    def end(self) -> None:
        """End the thread, before the interpreter does: it must not end inside of a call of a store."""
        self._stopped.set()
        if self._thread is not None and self._owner == os.getpid():  # and not a fork of it
            self._thread.join(CONNECT_S)

    def _run(self) -> None:
        while not self._is_over() and not self._stopped.wait(LOOK_S):
            with contextlib.suppress(Exception):
                self._look()

    def _is_over(self) -> bool:
        late = time.monotonic() - self._begun_s > LONGEST_S or calls_so_far() > LATER_CALLS
        return late or EARLY.records or not threading.main_thread().is_alive()

    def _look(self) -> None:
        now_s = time.monotonic()
        frame = sys._current_frames().get(self._main)
        name, identity = call_of(frame)
        call = (f"{name} #{calls}" if name and (calls := calls_so_far()) > 0 else name), identity
        if call != self._call:
            self._call, self._since_s = call, now_s
            self._note = replace(self._note, waits=call[0], since_ns=time.time_ns())
        if now_s - self._begun_s < TOLD_S:
            return
        self._note = replace(self._note, state=state_of(os.getpid()), stack=own_frames(frame))
        del frame
        what = self._connected(), self._note.waits, self._note.state, self._note.stack
        every_s = self._tells.due(what, now_s)
        if every_s:
            self._note = replace(self._note, looks=self._note.looks + 1, every_s=every_s)
            if self._store is not None:
                self._store.set(self._key(TOLD, self._rank), self._note.text())
        waits_s = now_s - self._since_s if call[0] else 0.0
        rests = waits_s > CERTAIN_S + REST_S and now_s - self._asked_s < REST_S
        if waits_s >= KNOWN_S and not rests:
            self._asked_s = now_s
            self._speak(waits_s)

    def _connected(self) -> bool:
        """Connect to the store of the launcher, or of rank 0, if it is open."""
        if self._store is None:
            address = os.environ.get(STORE) or f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
            host, _, port = address.rpartition(":")
            host = host.strip("[]")
            try:
                socket.create_connection((host, int(port)), CONNECT_S).close()  # a client of a store would wait and warn
            except (OSError, ValueError):
                return False
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            self._store = TCPStore(host, int(port), None, False, timedelta(seconds=CONNECT_S), wait_for_workers=False)
        return True

    # ------------------------------------------------------------ what is missing

    def _speak(self, waits_s: float) -> None:
        """Tell of neighbours that cannot tell of themselves, and say who is missing, if no other rank does."""
        now_s = time.monotonic()
        asks = self._asks(waits_s)
        notes = {**self._notes(TOLD, self._everyone() if asks else self._host_ranks()), self._rank: self._note}
        silent = self._silent(notes, now_s)
        waiters = {rank for rank, one in notes.items() if one.waits == self._note.waits and rank not in silent}
        here = min(rank for rank in waiters if notes[rank].first == self._first)
        looks = here == self._rank and waits_s >= SEEN_S
        seen = self._neighbours({rank for rank in notes if rank not in silent}) if looks else {}
        if self._store is None:  # neighbours wait, too
            waiters |= {rank for rank, one in seen.items() if any(each.function == self._note.waits for each in one.stack)}
        for rank, one in seen.items() if self._store is not None else ():
            self._store.set(self._key(SEEN, rank), one.text())
        told_lately = self._said_s and now_s - self._said_s < AGAIN_S
        if not asks or waits_s < SAID_S or told_lately or min(waiters) != self._rank:
            return
        uncertain = any(not self._news[rank].again for rank in notes.keys() - waiters - silent)
        if uncertain and waits_s < CERTAIN_S:
            return
        seen = {**self._notes(SEEN, self._everyone()), **seen}
        missing = {rank: one for rank, one in notes.items() if rank not in waiters}
        for rank in silent & missing.keys():
            missing[rank] = replace(missing[rank], state=State.UNKNOWN)
        for rank, one in seen.items():
            if rank not in waiters and (rank not in notes or rank in silent):
                stack = one.stack or (missing[rank].stack if rank in missing else ())
                missing[rank] = replace(one, stack=stack)
        self._said_s = now_s
        if self._store is not None:
            self._store.set(self._key(SAID, 0), self._note.waits.encode())
        self._say(sorted(waiters), missing)

    def _silent(self, notes: Mapping[int, StartNote], now_s: float) -> set[int]:
        """Return the ranks that have not told what they had to tell by now."""
        for rank, one in notes.items():
            before = self._news.get(rank)
            if before is None or before.looks != one.looks:
                self._news[rank] = News(one.looks, now_s, before is not None)
        others = notes.keys() - {self._rank}
        return {rank for rank in others if now_s - self._news[rank].since_s > notes[rank].every_s + SILENT_S}

    def _asks(self, waits_s: float) -> bool:
        """Return whether it is the turn of this rank to ask all others, unless another one has said who is missing."""
        if self._said_s:
            return time.monotonic() - self._said_s > AGAIN_S - (SAID_S - KNOWN_S)
        if waits_s < KNOWN_S + TURN_S * self._rank:
            return False
        key = self._key(SAID, 0)
        said = self._store is not None and self._store.check([key]) and self._store.get(key) == self._note.waits.encode()
        return not said

    def _everyone(self) -> range:
        return range(min(self._world, MOST))

    def _host_ranks(self) -> range:
        return range(self._first, self._first + self._count) if self._first >= 0 else range(0)

    def _say(self, waiters: list[int], missing: Mapping[int, StartNote]) -> None:
        """Say who is missing. What makes sentences is imported only now."""
        from unickpt.base.logs import logger, printable
        from unickpt.diagnosis.recording.launched import AbsentRank
        from unickpt.diagnosis.reports.start_text import waiting_text

        hosts = self._hosts()
        unknown = {rank: hosts.get(rank, "") for rank in range(self._world) if rank not in waiters and rank not in missing}
        if not unknown and not missing:
            return
        text, then = waiting_text(
            self._note.waits, self._note.since_ns, waiters,
            {rank: AbsentRank(one.pid, hosts.get(rank, one.host), one.state, one.stack) for rank, one in missing.items()},
            {rank: one.waits for rank, one in missing.items() if one.waits}, unknown, self._unreached(),
        )  # fmt: skip
        logger.warning("unickpt: %s", printable(text))
        logger.warning("unickpt: next: %s", printable(then))

    def _key(self, kind: str, rank: int) -> str:
        return key_of(*self._start, kind, rank)

    def _notes(self, kind: str, ranks: range) -> dict[int, StartNote]:
        """Return what ranks have told of themselves (``TOLD``), or others of them (``SEEN``)."""
        found = {}
        for rank in ranks if self._store is not None else ():
            key = self._key(kind, rank)
            if self._store.check([key]) and (one := StartNote.of(self._store.get(key))) is not None:
                found[rank] = one
        return found

    def _neighbours(self, present: Collection[int]) -> dict[int, StartNote]:
        """Return the ranks of this host that have not told where they are, as seen from outside."""
        from unickpt.diagnosis.recording.launched import LaunchNote, absent_ranks
        from unickpt.diagnosis.snapshot.stacks import with_early_stacks

        if self._first < 0 or self._count < 2:
            return {}
        note = LaunchNote(self._first, self._count, socket.gethostname(), boot_id(), os.getppid(), time.time_ns())
        absent = with_early_stacks(absent_ranks([note], present))
        return {
            rank: StartNote(one.host, one.pid, self._first, state=one.state, stack=one.stack)
            for rank, one in absent.items()
            if rank != self._rank
        }

    def _hosts(self) -> dict[int, str]:
        """Return the host of each rank, as far as the agents of the launcher have told."""
        if self._store is None or self._count < 1 or not self._store.check([HOSTS]):
            return {}
        names = json.loads(self._store.get(HOSTS))
        return {rank: str(names[rank // self._count]) for rank in range(self._world) if rank // self._count < len(names)}

    def _unreached(self) -> str:
        """Return the address of the store of rank 0, if that is not open."""
        return "" if self._store is not None else f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _start_of_workers() -> str:
    from unickpt.diagnosis.recording.ring_folder import start_of_workers

    return start_of_workers()


def begin() -> None:
    """Called at the end of the import of torch: watch, if this process is a rank of a job of several."""
    variables = os.environ
    with contextlib.suppress(Exception):
        rank, world = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        worker = variables.get("UNICKPT_WORKER", "").rpartition("/")[2].partition(".")[0]
        if world < 2 or (worker and worker != str(os.getpid())):
            return
        local, count = (
            int(variables.get("LOCAL_RANK", -1)),
            int(variables.get("LOCAL_WORLD_SIZE") or variables.get("LOCAL_SIZE") or 0),
        )
        StartWatch(rank, world, rank - local if local >= 0 else -1, count).begin()
