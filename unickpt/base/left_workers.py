"""Workers that a launcher has left behind on this host: who they are, and how they are ended.

torchrun's agent starts each worker in a session of its own, so workers live on when only their agent is killed. They hold the
GPUs, and they save into the checkpoint folder of the job that starts again. An agent of ``--rdzv-backend unickpt`` therefore
keeps a record of its workers on its host. When it has ended without ending them, they get SIGTERM, as torchrun would have
sent it, and SIGKILL after torchrun's grace time. Three parties do so, whoever is there: the worker itself (``launcher_watch``),
the diagnosis agent of the host, and the next agent of the job before it takes part in a round.

A process is ended by its identity, never by its name. SIGTERM is sent once, because a second one ends some programs at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from unickpt.base.private_files import SHARED_MEMORY, create, make_folder, read_text, replacing
from unickpt.base.process_identity import ProcessIdentity, boot_id, environment_of, stat_of

AGENT = "UNICKPT_AGENT"  # in the environment of the workers: identity of their agent
WORKER = "UNICKPT_WORKER"  # in the environment of a worker and of what it starts: which process is the worker
TERM_S = 30.0  # torchrun's own time between SIGTERM and SIGKILL
KILL_S = 10.0  # a process in uninterruptible sleep does not even react to SIGKILL
_LONGEST, _POLL_S = 1 << 20, 0.05
_OLD_S = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class LeftWorker:
    """A worker whose agent has ended.

    Attributes:
        process: the worker, which leads its process group.
        rank: in its round; -1 if unknown.
        agent: its agent.
        record: file with the record of its agent.
    """

    process: ProcessIdentity
    rank: int
    agent: ProcessIdentity
    record: Path


class WorkerRecord:
    """The record of an agent: a file that only this user can read. No method raises.

    ``job``: text that only agents of the same job have.
    """

    def __init__(self, job: str, folder: Path | None = None) -> None:
        self.job, self.agent = job, ProcessIdentity.of(os.getpid())
        self.path = (folder or records_folder()) / f"{digest_of(job)}-{digest_of(str(self.agent))}"
        self._workers: dict[int, tuple[int, int]] = {}  # start and rank by process number
        self._variables: list[str] = []

    def begin(self, variables: Collection[bytes]) -> None:
        """A round begins. ``variables``: of the environment of its workers; they find a worker that is not noted yet."""
        self._workers = {}
        self._variables = sorted(each.decode(errors="replace") for each in variables)
        self._write()

    def note(self, ranks: Mapping[int, int]) -> None:
        """Note the ranks of the round's workers by process number."""
        for pid in ranks.keys() - self._workers.keys():
            found = stat_of(pid)
            if found is not None:
                self._workers[pid] = (found[1], ranks[pid])
        self._write()

    def end(self) -> None:
        """Remove the record, unless a worker still lives: the next agent of the job ends it then."""
        known = [pid for pid, (start, _) in self._workers.items() if (found := stat_of(pid)) and found[1] == start]
        if not any(ProcessIdentity.of(pid) for pid in known):
            remove_record(self.path)

    def _write(self) -> None:
        workers = [[pid, start, rank] for pid, (start, rank) in self._workers.items()]
        with contextlib.suppress(OSError):
            make_folder(self.path.parent)
            with replacing(self.path) as file:
                file.write(json.dumps({"agent": str(self.agent), "variables": self._variables, "workers": workers}).encode())


def records_folder() -> Path:
    """Return the folder with the records of this user."""
    return SHARED_MEMORY / f"unickpt-{os.geteuid()}-workers"


def digest_of(text: str) -> str:
    """Return a short name for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def remove_record(path: Path) -> None:
    """Remove a record and its marks. Never raises."""
    with contextlib.suppress(OSError):
        for mark in path.parent.glob(f"{path.name}.term.*"):
            mark.unlink()
        path.unlink()


def left_in(record: Path) -> list[LeftWorker]:
    """Return the living workers of one record; none while its agent lives."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        said = json.loads(read_text(record, _LONGEST) or "{}")
        agent = ProcessIdentity.parse(str(said["agent"])) if said else None
        if agent is None or not agent.is_near or agent.lives:
            return []
        known = {int(pid): (int(start), int(rank)) for pid, start, rank in said["workers"]}
        noted = [(ProcessIdentity(pid, start, agent.boot, agent.namespace), rank) for pid, (start, rank) in known.items()]
        variables = frozenset(str(each).encode() for each in said["variables"])
        unnoted = _not_noted(variables, {rank for _, rank in noted}) if variables else {}
        return [LeftWorker(process, rank, agent, record) for process, rank in [*noted, *unnoted.values()] if process.lives]
    return []


def _not_noted(variables: frozenset[bytes], noted: Collection[int]) -> dict[int, tuple[ProcessIdentity, int]]:
    """Return workers that their agent had no time to note: of each rank the oldest process that leads a session.

    What a worker has started in a session of its own has the same environment. It is younger than the worker.
    """
    found: dict[int, tuple[ProcessIdentity, int]] = {}
    for pid in _processes():
        environment = environment_of(pid)
        rank = rank_in(environment) if variables <= environment else None
        process = ProcessIdentity.of(pid) if rank is not None and rank not in noted and _leads_session(pid) else None
        if rank is not None and process is not None and (rank not in found or process.start < found[rank][0].start):
            found[rank] = (process, rank)
    return found


def _processes() -> Iterator[int]:
    with contextlib.suppress(OSError), os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                yield int(entry.name)


def rank_in(environment: Collection[bytes]) -> int | None:
    """Return the rank that an environment gives a process."""
    with contextlib.suppress(ValueError):
        return next((int(each[5:]) for each in environment if each.startswith(b"RANK=")), None)
    return None


def _leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except OSError:
        return False


def left_behind(job: str, folder: Path | None = None) -> list[LeftWorker]:
    """Return the living workers of a job on this host whose agents have ended. Records without such workers are removed."""
    folder = folder or records_folder()
    found: list[LeftWorker] = []
    with contextlib.suppress(OSError):
        for record in sorted(folder.iterdir()):
            if "." in record.name or not record.name.startswith(f"{digest_of(job)}-"):
                _remove_if_old(record)
                continue
            left = left_in(record)
            found += left
            if not left and not _agent_lives(record):
                remove_record(record)
    return found


def _agent_lives(record: Path) -> bool:
    """Return whether the agent of a record lives, or may live: one in another namespace cannot be seen."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        agent = ProcessIdentity.parse(str(json.loads(read_text(record, _LONGEST))["agent"]))
        return agent is None or agent.lives or (not agent.is_near and agent.boot == boot_id())
    return False


def _remove_if_old(path: Path) -> None:
    """Remove an old file of another job: a record whose agent has ended, or a mark without a record."""
    record = path.with_name(path.name.partition(".")[0] or path.name)
    with contextlib.suppress(OSError):
        if path.lstat().st_mtime < time.time() - _OLD_S and not (_agent_lives(path) if record == path else record.exists()):
            path.unlink()


def end_all(found: Collection[LeftWorker], sleep: Callable[[float], None] = time.sleep) -> list[LeftWorker]:
    """End workers that were left behind: SIGTERM, and SIGKILL after ``TERM_S``. Wait until they have ended.

    Returns workers that do not end, for instance in uninterruptible sleep.
    """
    for worker in found:
        if stopped(worker.process):  # it cannot react to SIGTERM
            send(worker.process, signal.SIGKILL)
        elif first_to_end(worker.record, worker.process):
            send(worker.process, signal.SIGTERM)
    began_s = time.monotonic()
    left = list(found)
    for limit_s, last in ((TERM_S, False), (TERM_S + KILL_S, True)):
        while left and time.monotonic() - began_s < limit_s:
            sleep(_POLL_S)
            left = [worker for worker in left if worker.process.lives]
        for worker in left if not last else []:
            send(worker.process, signal.SIGKILL)
    for record in {worker.record for worker in found} - {worker.record for worker in left}:
        remove_record(record)
    return left


def stopped(process: ProcessIdentity) -> bool:
    """Return whether a process is stopped (SIGSTOP)."""
    return (stat_of(process.pid) or (" ", 0))[0] == "T"


def first_to_end(record: Path, process: ProcessIdentity) -> bool:
    """Return whether nobody has sent SIGTERM to this worker yet, and note that it is sent now."""
    try:
        create(record.with_name(f"{record.name}.term.{process.pid}")).close()
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def send(process: ProcessIdentity, number: signal.Signals) -> None:
    """Send a signal to a worker and its process group, as torchrun does."""
    with contextlib.suppress(OSError):
        if not process.lives:
            return
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid, number)
