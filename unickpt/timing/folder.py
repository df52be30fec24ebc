"""The rings of a job's ranks on this host, read at one moment, with what became of their processes."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unickpt.errors import CoordinationError, FormatError, NotACheckpointError
from unickpt.private_files import make_folder, own_folders
from unickpt.timing.processes import State, state_of
from unickpt.timing.ring import SUFFIX, Identity, RingReader, Snapshot

SHARED_MEMORY = Path("/dev/shm")
_JOB_CHARACTERS = 64  # of a job's name, in the name of its folder
_TOKEN = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Job:
    """What is known of a job at one moment.

    Attributes:
        ranks: rank -> its ring.
        states: rank -> its process.
        unreadable: what cannot be read, and why.
        now_ns: of the wall clock.
        offsets_ns: rank -> what its monotonic clock is behind the wall clock. The same for all ranks of a host that were
            started since it was: one that sets its wall clock moves all of them together, and no call looks older for it.
    """

    ranks: Mapping[int, Snapshot]
    states: Mapping[int, State]
    unreadable: tuple[str, ...]
    now_ns: int
    offsets_ns: Mapping[int, int]


def read_folder(folder: Path, *, last: int | None = None) -> Job:
    """All rings in a folder.

    Args:
        folder: of one job.
        last: records of each, the newest; all that are there if not given.

    Raises:
        NotACheckpointError: there is no ring in it.
    """
    paths = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
    if not paths:
        raise NotACheckpointError(
            f"{folder}: no rings of records ({SUFFIX}) are there; is timing switched on, and on this host?"
        )
    ranks: dict[int, Snapshot] = {}
    unreadable = []
    for path in paths:
        try:
            snapshot = RingReader(path).snapshot(last=last)
        except (OSError, FormatError) as err:
            unreadable.append(f"{path}: {err}")
        else:
            ranks[snapshot.identity.rank] = snapshot
    if ranks:  # a job of the same name before this one may have had more ranks
        world = max(ranks.values(), key=lambda snapshot: snapshot.identity.wall_ns).identity.world
        ranks = {rank: snapshot for rank, snapshot in ranks.items() if rank < world}
    states = {rank: _state(snapshot.identity) for rank, snapshot in ranks.items()}
    return Job(ranks, states, tuple(unreadable), time.time_ns(), _offsets_ns(ranks))


def _offsets_ns(ranks: Mapping[int, Snapshot]) -> dict[int, int]:
    """Of a host that is this one as it is now, else as it was when the first of its ranks began."""
    now = time.time_ns() - time.monotonic_ns()
    of_host: dict[tuple[str, str], int] = {}
    found = {}
    for rank, snapshot in ranks.items():
        who = snapshot.identity
        then = now if who.is_here else who.wall_ns - who.monotonic_ns
        found[rank] = of_host.setdefault((who.host, who.boot), then)
    return found


def shared_folder(parent: Path, job: str, store: Any) -> Path:
    """The folder of a job below a directory of all users: created with mode 0700, under a name that no other user can guess.

    The random part of the name is agreed on in the job's store, so that all ranks find the same folder.

    Args:
        parent: ``SHARED_MEMORY``.
        job: its name, for a person who looks for the folder.
        store: of the job, as torch has it.

    Raises:
        CoordinationError: the store holds something else.
        OSError: the folder cannot be created, or what is there belongs to another user.
    """
    if store is None:
        raise CoordinationError("the process group has no store to agree on a folder with: set the option timing.folder")
    key = f"unickpt/rings/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    token = store.compare_set(key, "", secrets.token_hex(16)).decode(errors="replace")
    if not _TOKEN.fullmatch(token):
        raise CoordinationError(f"the job's store holds {token[:80]!r} at {key}, not the name of a folder")
    folder = parent / f"{_own_prefix()}{job[:_JOB_CHARACTERS]}-{token}"
    make_folder(folder)
    return folder


def own_jobs(parent: Path) -> list[Path]:
    """Folders of this user's jobs that hold rings, below a directory of all users; the one that was changed last comes last."""
    found = [folder for folder in own_folders(parent, _own_prefix()) if any(folder.glob(f"*{SUFFIX}"))]
    return sorted(found, key=lambda folder: folder.lstat().st_mtime)


def remove_old(parent: Path, *, older_than_s: float) -> None:
    """Remove this user's job folders in which nothing was changed for so long and no process lives. Never raises."""
    with contextlib.suppress(OSError):
        for folder in own_folders(parent, _own_prefix()):
            with contextlib.suppress(OSError):
                files = [path.lstat() for path in folder.iterdir()]
                newest = max(about.st_mtime for about in [folder.lstat(), *files])
                if newest < time.time() - older_than_s and not _has_living(folder):
                    shutil.rmtree(folder, ignore_errors=True)


def _own_prefix() -> str:
    return f"unickpt-{os.geteuid()}-"


def _has_living(folder: Path) -> bool:
    """Times of files alone do not tell: what is written through a mapping need not change them."""
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError, FormatError):
            if _state(RingReader(path).identity) not in (State.DEAD, State.UNKNOWN):
                return True
    return False


def _state(who: Identity) -> State:
    if not who.is_here:  # after a restart of this host, its processes are gone; of other hosts nothing can be asked
        return State.DEAD if who.host == socket.gethostname() else State.UNKNOWN
    return state_of(who.pid, started_before_ns=who.monotonic_ns)
