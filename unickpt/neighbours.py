"""The ranks of one host in one load: who they are, their shared memory, and how far each of them is.

Ranks can share memory if they see the same ``/dev/shm``: the same kernel and the same mount of it.
Containers on one machine with a ``/dev/shm`` each are hosts of their own.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import shutil
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType

import numpy as np

from unickpt.coordination import Message, Rendezvous
from unickpt.errors import NeighbourFailedError
from unickpt.fragments import Ints
from unickpt.load.failure import Failure
from unickpt.private_files import create, make_folder, own_folders

logger = logging.getLogger("unickpt")

FOLDER = Path("/dev/shm")
_PREFIX = "unickpt-load-"
_STALE_S = 3600.0
_PAUSES_S = (0.0002, 0.005)
OPENED, READY, CONSUMED, FAILED = range(4)
_FIELDS = 4
_RANK_BYTES = 16 << 20  # of shared memory for each rank: touching new pages costs more than copying
_LEAST_RANK_BYTES = 256 << 10


class Neighbours:
    """Shared memory of the ranks of a host, for one load. A context manager.

    Attributes:
        ranks: of the job, ascending; ``me`` is this process's position among them.
        rows: of every one of them, the rows of the index that it wants, sorted.
        memory: the shared bytes.
    """

    def __init__(self, folder: Path, ranks: list[int], rank: int, *, timeout_s: float) -> None:
        self.ranks, self.me, self._timeout_s = ranks, ranks.index(rank), timeout_s
        self.rows: list[Ints] = [np.fromfile(folder / f"rows.{at}", np.int64) for at in range(len(ranks))]
        with open(folder / "segment", "r+b") as segment:
            self._map = mmap.mmap(segment.fileno(), 0)
        self._progress = os.open(folder / "progress", os.O_RDWR | os.O_CLOEXEC)
        self.memory = memoryview(self._map)
        self.tell(OPENED, 1)
        if self.me == 0:
            self.wait(OPENED, 1)
            shutil.rmtree(folder, ignore_errors=True)  # it lives as long as somebody has it open, and no longer

    def tell(self, field: int, value: int) -> None:
        """Say how far this rank is. A system call, so that what was stored in the memory before is seen before."""
        os.pwrite(self._progress, np.int64(value).tobytes(), 8 * (self.me * _FIELDS + field))

    def fail(self) -> None:
        """Let nobody wait for this rank any longer."""
        self.tell(FAILED, 1)

    def wait(self, field: int, value: int) -> None:
        """Until all neighbours are that far.

        Raises:
            NeighbourFailedError: one of them failed, or has not come so far in time; names it.
        """
        begin, pause = time.monotonic(), _PAUSES_S[0]
        while True:
            table = np.frombuffer(os.pread(self._progress, 8 * _FIELDS * len(self.ranks), 0), np.int64).reshape(-1, _FIELDS)
            for rank, failed in zip(self.ranks, table[:, FAILED].tolist(), strict=True):
                if failed:
                    raise NeighbourFailedError(f"rank {rank} of this host failed while it read for the others")
            late = [rank for rank, at in zip(self.ranks, table[:, field].tolist(), strict=True) if at < value]
            if not late:
                return
            if time.monotonic() - begin > self._timeout_s:
                raise NeighbourFailedError(
                    f"rank {self.ranks[self.me]} waited {self._timeout_s:.0f} s for rank {', '.join(map(str, late))} of this "
                    "host, which reads for it"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _PAUSES_S[1])

    def __enter__(self) -> Neighbours:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.fail()
        with contextlib.suppress(BufferError):  # a view in the traceback of an error keeps it for a while
            self.memory.release()
            self._map.close()
        os.close(self._progress)


def meet(
    rendezvous: Rendezvous,
    rows: Ints | None,
    failure: Failure | None,
    *,
    identity: str = "",
    wanted_bytes: int,
    share: bool = True,
) -> tuple[tuple[Failure, ...], Callable[[], Neighbours] | None]:
    """All ranks agree that each has its plan, and those of one host prepare their shared memory. Every rank calls it.

    Args:
        rendezvous: of the whole job.
        rows: rows of the index that this rank wants, int64, sorted; None if it failed.
        failure: why it cannot go on, if it cannot.
        identity: of what this rank opened; another one than the first rank's is a failure, since it may have been
            saved again in between.
        wanted_bytes: of those rows: the shared memory need not be larger.
        share: False on any rank: nobody shares with it.

    Returns:
        All failures, the same on every rank, and what opens the shared memory, if this rank shares any and none failed.
    """
    host = _host() if share and rendezvous.world > 1 else ""
    told = None if failure is None else failure.to_message()
    messages = rendezvous.gather("planned", {"failure": told, "host": host, "identity": identity})
    verdicts = None if messages is None else _verdicts(messages)
    verdict = rendezvous.scatter("planned-verdict", verdicts, notice=False)
    failures = tuple(map(Failure.from_message, verdict["failures"]))
    if failures or not verdict["shared"]:
        return failures, None
    ranks: list[int] = verdict["ranks"]
    folder = FOLDER / f"{_PREFIX}{verdict['token']}-{min(ranks, default=0)}"
    problem = _prepare(folder, ranks, rendezvous.rank, rows, wanted_bytes) if ranks else None
    problems = rendezvous.agree("neighbours", problem)
    if problems:
        shutil.rmtree(folder, ignore_errors=True)
        if rendezvous.rank == 0:
            rank, reason = min(problems.items())
            logger.warning("unickpt: every rank reads all that it needs itself: rank %d cannot share memory (%s)", rank, reason)
        return (), None
    return (), partial(Neighbours, folder, ranks, rendezvous.rank, timeout_s=rendezvous.timeout_s) if ranks else None


def _verdicts(messages: list[Message]) -> list[Message]:
    """For each rank: all failures, whether any ranks share, and if it is one of them, with whom."""
    failures, hosts = _failures(messages), _hosts([m["host"] for m in messages])
    own: dict[int, list[int]] = {rank: ranks for ranks in hosts for rank in ranks}
    common = {"failures": failures, "shared": bool(hosts), "token": uuid.uuid4().hex}
    return [{**common, "ranks": own.get(rank, [])} for rank in range(len(messages))]


def _failures(messages: list[Message]) -> list[Message]:
    found: list[Message] = [m["failure"] for m in messages if m["failure"] is not None]
    return found or [
        Failure(
            "damaged", rank, "", "",
            "the checkpoint that it opened is not the one that rank 0 opened "
            f"(index {message['identity']}, there {messages[0]['identity']}): it was saved again meanwhile, or the "
            "storage is not shared. Load again",
        ).to_message()
        for rank, message in enumerate(messages)
        if message["identity"] != messages[0]["identity"]
    ]  # fmt: skip


def _host() -> str:
    """The same for processes that can share memory, and for no others. Empty where there is none to share."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{FOLDER.stat().st_dev}/{os.getuid()}"
    except OSError:
        return ""


def _hosts(keys: list[str]) -> list[list[int]]:
    """Ranks by host, of hosts with several."""
    found: dict[str, list[int]] = {}
    for rank, key in enumerate(keys):
        if key:
            found.setdefault(key, []).append(rank)
    return [ranks for ranks in found.values() if len(ranks) > 1]


def _prepare(folder: Path, ranks: list[int], rank: int, rows: Ints | None, wanted_bytes: int) -> str | None:
    """This rank's files in the host's folder; the first rank of the host makes the memory. Returns what went wrong."""
    try:
        make_folder(folder)
        at = ranks.index(rank)
        with create(folder / f"rows.{at}") as file:
            np.asarray(rows if rows is not None else [], np.int64).tofile(file)
        if at == 0:
            _remove_stale()
            with create(folder / "progress") as progress:
                progress.write(bytes(8 * _FIELDS * len(ranks)))
            size = len(ranks) * max(min(_RANK_BYTES, wanted_bytes), _LEAST_RANK_BYTES)
            with create(folder / "segment") as segment:
                os.posix_fallocate(segment.fileno(), 0, size)  # a hole in a full /dev/shm would be a SIGBUS
    except OSError as err:
        return f"{folder}: {err}"
    return None


def _remove_stale() -> None:
    """What loads left behind that were killed in the moment between making it and opening it."""
    for path in own_folders(FOLDER, _PREFIX):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _STALE_S:
                shutil.rmtree(path, ignore_errors=True)
