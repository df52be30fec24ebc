"""Folder of a round of ``torchrun --rdzv-backend unickpt`` on this host: what its workers tell the agent of the host.

The agent creates the folder. It holds the rings if the job is timed, and how many checkpoints the round has committed. The
agent writes there which ranks of the job have ended, so that the other ranks do not wait for them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from unickpt.base.failure_kinds import FailureKind, Remedy
from unickpt.base.private_files import read_text, replacing

# environment of the workers: torchrun's own name of the job, and what ``--rdzv-backend unickpt`` adds
RUN_ID, RINGS, RINGS_JOB = "TORCHELASTIC_RUN_ID", "UNICKPT_RINGS", "UNICKPT_RINGS_JOB"
ROUND = "UNICKPT_ROUND"  # term of the leader and number of the round, as in 1.3
STORE = "UNICKPT_STORE"  # address of the agents' store of the round
HOST = "UNICKPT_HOST"  # name of this host in the job
HOSTS = "unickpt/start/hosts"  # key in it: names of the hosts, in the order of their ranks
COMMITS, _LONGEST = "commits", 32
ENDED, _LONGEST_ENDED = "ended", 1 << 20
FAILED, _LONGEST_FAILED = "failed", 8192
STOPPING, _LONGEST_STOPPING = "stopping", 1024
WILLING, SAVED, STAY = "willing", "saved", "stay"
ACCUSED, _LONGEST_ACCUSED = "accused", 8192


@dataclass(frozen=True, slots=True)
class Failed:
    """The exception that has ended a worker.

    Attributes:
        signature: type and place. Equal for the same fault of the program.
        text: type, message and place, for people.
        excused: the worker had made a step before, or another process is the cause.
        kind: what has failed.
        remedy: what helps.
        error: class of the exception; '' if the process has noted none.
        at_ns: time on the wall clock.
    """

    signature: str
    text: str
    excused: bool
    kind: FailureKind = FailureKind.UNKNOWN
    remedy: Remedy = Remedy.RESTART
    error: str = ""
    at_ns: int = 0

    @property
    def follows(self) -> bool:
        """Whether it is the consequence of the end of another process, or was asked for."""
        return self.kind in (FailureKind.CONNECTION, FailureKind.ASKED)


@dataclass(frozen=True, slots=True)
class Accused:
    """What the witness of a job has found, and asks the agents to act on.

    Attributes:
        ranks: ranks whose numbers are wrong, as others agree; empty if nobody can say whose are.
        text: the verdict.
        at_ns: time on the wall clock.
    """

    ranks: tuple[int, ...]
    text: str
    at_ns: int


def folder_of_round() -> Path | None:
    """Return the folder that torchrun's agent on this host has created for this round; None without such an agent.

    A job that a worker starts in its turn inherits the environment, and is not meant.
    """
    given, job = os.environ.get(RINGS, ""), os.environ.get(RINGS_JOB)
    return Path(given) if given and job == os.environ.get(RUN_ID) else None


def note_saver() -> None:
    """Note that this job saves with unickpt, so that it is interrupted after a checkpoint. Never raises."""
    folder = folder_of_round()
    if folder is not None and read_commits(folder) is None:
        _replace(folder / COMMITS, "0")


def note_commit() -> None:
    """Note a committed checkpoint. One rank of the job calls this. Never raises."""
    folder = folder_of_round()
    if folder is not None:
        _replace(folder / COMMITS, str((read_commits(folder) or 0) + 1))


def read_commits(folder: Path) -> int | None:
    """Return how many checkpoints the workers on this host have committed; None if they have not said that they save."""
    text = read_text(folder / COMMITS, _LONGEST)
    return int(text) if text.isascii() and text.isdigit() else None


def note_ended(folder: Path, ranks: Collection[int]) -> None:
    """Tell the workers of this host which ranks of their round have ended. The agent calls this. Never raises."""
    _replace(folder / ENDED, " ".join(map(str, sorted(ranks))))


def read_ended(folder: Path) -> frozenset[int]:
    """Return the ranks of the round that have ended, as far as this host knows."""
    words = read_text(folder / ENDED, _LONGEST_ENDED).split()
    return frozenset(int(word) for word in words if word.isascii() and word.isdigit())


def note_stopping(folder: Path, reason: str) -> None:
    """Tell the workers of this host that their round ends for a reason that leaves no common step boundary. Never raises."""
    _replace(folder / STOPPING, reason[:_LONGEST_STOPPING])


def read_stopping(folder: Path) -> str:
    """Return why the workers must not wait for one another at the end of their round; '' if they may."""
    return read_text(folder / STOPPING, _LONGEST_STOPPING)


def note_willing(folder: Path, rank: int) -> None:
    """Note that a worker saves together with the others when it is told to end. Never raises."""
    _replace(folder / f"{WILLING}{rank}", "")


def ranks_willing(folder: Path) -> frozenset[int]:
    """Return the ranks of this host that have noted so."""
    return _ranks_noted(folder, WILLING)


def note_saved(folder: Path, rank: int) -> None:
    """Note that a worker has saved, and may be ended. Never raises."""
    _replace(folder / f"{SAVED}{rank}", "")


def ranks_saved(folder: Path) -> frozenset[int]:
    """Return the ranks of this host that have saved at the end of their round."""
    return _ranks_noted(folder, SAVED)


def note_stay(folder: Path) -> None:
    """Tell the workers of this host to stay after their save, until they get SIGTERM once more. Never raises."""
    _replace(folder / STAY, "")


def must_stay(folder: Path) -> bool:
    """Return whether a worker that has saved stays."""
    return (folder / STAY).exists()


def _ranks_noted(folder: Path, what: str) -> frozenset[int]:
    with contextlib.suppress(OSError):
        return frozenset(int(found.name[len(what) :]) for found in folder.glob(f"{what}*") if found.name[len(what) :].isdigit())
    return frozenset()


def note_failure(folder: Path, rank: int, failed: Failed) -> None:
    """Note the exception that ends a worker. Never raises."""
    entry = {**asdict(failed), "kind": failed.kind.value, "remedy": failed.remedy.value}
    _replace(folder / f"{FAILED}{rank}", json.dumps(entry))


def read_failure(folder: Path, rank: int) -> Failed | None:
    """Return the exception that has ended a worker of this host; None if it has noted none."""
    with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
        entry = json.loads(read_text(folder / f"{FAILED}{rank}", _LONGEST_FAILED))
        return Failed(
            str(entry["signature"]), str(entry["text"]), bool(entry["excused"]), FailureKind(entry["kind"]),
            Remedy(entry["remedy"]), str(entry["error"]), int(entry["at_ns"]),
        )  # fmt: skip
    return None


def note_accused(accused: Accused) -> None:
    """Ask the agents to act. The worker of the first rank calls this. Without such an agent it does nothing. Never raises."""
    folder = folder_of_round()
    if folder is not None:
        _replace(folder / ACCUSED, json.dumps(asdict(replace(accused, text=accused.text[: _LONGEST_ACCUSED // 8]))))


def read_accused(folder: Path) -> Accused | None:
    """Return what the witness asks to act on; None for nothing."""
    with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
        entry = json.loads(read_text(folder / ACCUSED, _LONGEST_ACCUSED))
        return Accused(tuple(int(rank) for rank in entry["ranks"]), str(entry["text"]), int(entry["at_ns"]))
    return None


def host_name() -> str:
    """Return the name of this host in the job: that of torchrun's agent, or of the machine."""
    return (os.environ.get(HOST) if folder_of_round() is not None else "") or socket.gethostname()


def ends_of_job(rank: int, world: int) -> Callable[[], frozenset[int]]:
    """Return a function that gives the ranks of this round that have ended, and never raises.

    Without torchrun's agent of this backend, it always gives none. Nor does it if torch numbers the ranks of the job, in its
    default process group, otherwise than torchrun.
    """
    folder = folder_of_round()
    numbered = (os.environ.get("RANK"), os.environ.get("WORLD_SIZE")) == (str(rank), str(world))
    return frozenset if folder is None or not numbered else lambda: read_ended(folder)


def remove_note(folder: Path) -> None:
    """Remove what the workers and the agent have noted. Never raises."""
    with contextlib.suppress(OSError):
        notes = [path for what in (FAILED, WILLING, SAVED) for path in folder.glob(f"{what}*")]
        for path in [folder / COMMITS, folder / ENDED, folder / ACCUSED, folder / STOPPING, folder / STAY, *notes]:
            path.unlink(missing_ok=True)


def _replace(path: Path, text: str) -> None:
    with contextlib.suppress(OSError), replacing(path) as file:
        file.write(text.encode())
