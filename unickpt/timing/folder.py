"""The rings of a job's ranks on this host, read at one moment, with what became of their processes."""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unickpt.errors import FormatError, NotACheckpointError
from unickpt.timing.processes import State, state_of
from unickpt.timing.ring import SUFFIX, RingReader, Snapshot


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
    states = {rank: _state(snapshot) for rank, snapshot in ranks.items()}
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


def remove_old(parent: Path, *, older_than_s: float) -> None:
    """Remove folders of jobs whose rings were last written to so long ago, with all files in them. Never raises."""
    with contextlib.suppress(OSError):
        for folder in parent.iterdir():
            rings = list(folder.glob(f"*{SUFFIX}"))
            with contextlib.suppress(OSError):
                if rings and max(ring.stat().st_mtime for ring in rings) < time.time() - older_than_s:
                    shutil.rmtree(folder, ignore_errors=True)


def _state(snapshot: Snapshot) -> State:
    who = snapshot.identity
    if not who.is_here:  # after a restart of this host, its processes are gone; of other hosts nothing can be asked
        return State.DEAD if who.host == socket.gethostname() else State.UNKNOWN
    return state_of(who.pid, started_before_ns=who.monotonic_ns)
