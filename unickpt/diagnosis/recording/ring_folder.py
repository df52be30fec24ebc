"""Folder with the rings of a job's ranks on this host: creation, reading, and cleanup."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from unickpt.base.errors import CoordinationError, FormatError, NotACheckpointError
from unickpt.base.logs import printable
from unickpt.base.private_files import TOKEN, file_name, make_folder, own_folders, read_text, replacing
from unickpt.base.prometheus import NOT_ANSWERED, Scrape, scrape_from
from unickpt.base.round_folder import FAILED, ROUND, Failed, read_failure
from unickpt.diagnosis.host.process_state import State, state_of
from unickpt.diagnosis.recording.launched import AbsentRank, LaunchNote, absent_ranks, read_launches
from unickpt.diagnosis.recording.ring import SUFFIX, Identity, RingContents, RingReader

_LONGEST_COMMAND = 80  # characters
_JOB_CHARACTERS = 64  # of a job's name, in the name of its folder
NOTE, _NOTE_BYTES = "session", 65_536  # in the folder of a round: what its workers want of the agent


@dataclass(frozen=True, slots=True)
class HostRings:
    """Contents of the rings in one folder at one time.

    Attributes:
        ranks: contents of the ring of each rank.
        states: process state of each rank.
        unreadable: files that cannot be read, with the reason.
        now_ns: time of reading, on the wall clock.
        offsets_ns: wall clock minus monotonic clock of each rank. It is the same for all ranks of a host within one boot, so
            that setting the wall clock moves all of them together and no call looks older.
        absent: ranks that were started on a host of the folder and have no ring.
        failures: exceptions that have ended ranks.
    """

    ranks: Mapping[int, RingContents]
    states: Mapping[int, State]
    unreadable: tuple[str, ...]
    now_ns: int
    offsets_ns: Mapping[int, int]
    absent: Mapping[int, AbsentRank] = field(default_factory=dict)
    failures: Mapping[int, Failed] = field(default_factory=dict)


def start_of_workers() -> str:
    """Return a text that differs between starts of the workers, and is the same on all hosts.

    torchrun's restart count differs between hosts when some of them have joined later. With ``--rdzv-backend unickpt`` the
    environment has the number of the round.
    """
    return os.environ.get(ROUND) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def read_folder(folder: Path, *, last: int | None = None, readers: dict[Path, RingReader] | None = None) -> HostRings:
    """Read all rings in the folder of a job.

    Args:
        folder: the folder.
        last: how many of the newest records of each; default: all.
        readers: open readers, which are kept up to date, for a caller that reads again.

    Raises:
        NotACheckpointError: there is no ring in the folder.
    """
    paths = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
    if not paths:
        raise NotACheckpointError(
            f"{folder}: no rings of records ({SUFFIX}) are there; is timing switched on, and on this host?"
        )
    ranks: dict[int, RingContents] = {}
    unreadable = []
    for path in paths:
        try:
            ring = _reader(path, {} if readers is None else readers).read(last=last)
        except (OSError, FormatError) as err:
            unreadable.append(f"{path}: {err}")
        else:
            ranks[ring.identity.rank] = ring
    if ranks:  # a job of the same name before this one may have had more ranks
        world = max(ranks.values(), key=lambda ring: ring.identity.wall_ns).identity.world
        ranks = {rank: ring for rank, ring in ranks.items() if rank < world}
    launches = read_launches(folder)
    ranks = {rank: ring for rank, ring in ranks.items() if not _of_earlier_start(ring.identity, launches)}
    states = {rank: _state(ring.identity) for rank, ring in ranks.items()}
    absent = absent_ranks(launches, ranks) if ranks else {}
    noted = {rank: read_failure(folder, rank) for rank in ranks} if any(folder.glob(f"{FAILED}*")) else {}
    # a note that is older than the ring is of an earlier start
    failures = {rank: one for rank, one in noted.items() if one is not None and one.at_ns >= ranks[rank].identity.wall_ns}
    return HostRings(ranks, states, tuple(unreadable), time.time_ns(), _offsets_ns(ranks), absent, failures)


def _reader(path: Path, readers: dict[Path, RingReader]) -> RingReader:
    known = readers.pop(path, None)
    readers[path] = found = known if known is not None and known.is_current() else RingReader(path)
    return found


def _of_earlier_start(who: Identity, launches: Sequence[LaunchNote]) -> bool:
    """Return whether a ring is older than the newest start of its rank in this folder."""
    return any(
        who.host == note.host and note.first <= who.rank < note.first + note.count and who.wall_ns < note.wall_ns
        for note in launches
    )


def _offsets_ns(ranks: Mapping[int, RingContents]) -> dict[int, int]:
    """Return the offsets: of this host as of now, of other hosts as of the start of their first rank."""
    now = time.time_ns() - time.monotonic_ns()
    of_host: dict[tuple[str, str], int] = {}
    found = {}
    for rank, ring in ranks.items():
        who = ring.identity
        then = now if who.is_here else who.wall_ns - who.monotonic_ns
        found[rank] = of_host.setdefault((who.host, who.boot), then)
    return found


def shared_folder(parent: Path, job: str, store: Any) -> Path:
    """Create the folder of a job below a directory of all users, with mode 0700 and a name that other users cannot guess.

    The ranks agree on the random part of the name through the job's store.

    Raises:
        CoordinationError: the store holds an invalid name.
        OSError: the folder cannot be created, or belongs to another user.
    """
    if store is None:
        raise CoordinationError("the process group has no store to agree on a folder with: set the option timing.folder")
    key = f"unickpt/rings/{start_of_workers()}"
    token = store.compare_set(key, "", secrets.token_hex(16)).decode(errors="replace")
    if not re.fullmatch(TOKEN, token):
        raise CoordinationError(f"the job's store holds {token[:80]!r} at {key}, not the name of a folder")
    folder = parent / f"{_own_prefix()}{job[:_JOB_CHARACTERS]}-{token}"
    make_folder(folder)
    return folder


def fresh_folder(parent: Path, job: str) -> Path:
    """Create a folder like that of ``shared_folder``, for one round of one host, without a store.

    Raises:
        OSError: the folder cannot be created.
    """
    name = file_name(job)[:_JOB_CHARACTERS] or "job"
    folder = parent / f"{_own_prefix()}{name}-{secrets.token_hex(16)}"
    make_folder(folder)
    return folder


@dataclass(frozen=True, slots=True)
class SessionNote:
    """What the workers of a round want of the agent on their host.

    Attributes:
        folder: folder of the rings.
        watch: whether the agent looks at them.
        metrics: where it answers Prometheus.
    """

    folder: str
    watch: bool = True
    metrics: Scrape = NOT_ANSWERED


def write_note(folder: Path, note: SessionNote) -> None:
    """Write the note of the workers into the folder of their round."""
    with replacing(folder / NOTE) as file:
        file.write(json.dumps(asdict(note)).encode())


def read_note(folder: Path) -> SessionNote | None:
    """Return the note of the workers; None if there is none yet."""
    try:
        found = json.loads(read_text(folder / NOTE, _NOTE_BYTES))
        return SessionNote(str(found["folder"]), bool(found["watch"]), scrape_from(found["metrics"]))
    except (ValueError, KeyError, TypeError):
        return None


def own_jobs(parent: Path) -> list[Path]:
    """Return the folders of this user's jobs that hold rings, the last changed one last."""
    found = [folder for folder in own_folders(parent, _own_prefix()) if any(folder.glob(f"*{SUFFIX}"))]
    return sorted(found, key=lambda folder: folder.lstat().st_mtime)


def remove_old(parent: Path, *, older_than_s: float) -> None:
    """Remove this user's job folders without living processes and unchanged for ``older_than_s`` seconds. Never raises."""
    with contextlib.suppress(OSError):
        for folder in own_folders(parent, _own_prefix()):
            with contextlib.suppress(OSError):
                files = [path.lstat() for path in folder.iterdir()]
                newest = max(about.st_mtime for about in [folder.lstat(), *files])
                if newest < time.time() - older_than_s and not has_living(folder):
                    shutil.rmtree(folder, ignore_errors=True)


def _own_prefix() -> str:
    return f"unickpt-{os.geteuid()}-"


def has_living(folder: Path) -> bool:
    """Return whether a process of the folder lives. Writes through a mapping need not change the times of files."""
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError, FormatError):
            if _state(RingReader(path).identity) not in (State.DEAD, State.UNKNOWN):
                return True
    return False


def described(folder: Path) -> str:
    """Return which job a folder is of, for a person: its lowest rank here, its command, and when it began; '' if unknown."""
    found: list[Identity] = []
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError, FormatError):
            found.append(RingReader(path).identity)
    if not found:
        return ""
    who = min(found, key=lambda each: each.rank)
    began = time.strftime("%H:%M:%S", time.localtime(who.wall_ns / 1e9))
    command = "has ended"
    if _state(who) not in (State.DEAD, State.UNKNOWN):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{who.pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            command = printable(" ".join(words[1:]).strip())[:_LONGEST_COMMAND] or "runs"
    return f"{who.world} ranks, began {began}, rank {who.rank} is process {who.pid}: {command}"


def _state(who: Identity) -> State:
    if not who.is_here:  # processes of an earlier boot are gone; those of other hosts are unknown
        return State.DEAD if who.host == socket.gethostname() else State.UNKNOWN
    return state_of(who.pid, started_before_ns=who.monotonic_ns)
