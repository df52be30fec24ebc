"""Shared memory and progress of the ranks of one host in one load.

Ranks can share memory if they see the same ``/dev/shm``: the same kernel and the same mount. Containers with separate
``/dev/shm`` mounts count as separate hosts, even on one machine.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np

from unickpt.base.arrays import Ints
from unickpt.base.errors import HostPeerFailedError, StorageError
from unickpt.base.logs import logger
from unickpt.base.private_files import SHARED_MEMORY, check_folder, create, make_folder, no_room, own_folders
from unickpt.base.process_identity import boot_id
from unickpt.checkpoint.coordination.failure import Failure, FailureKind
from unickpt.checkpoint.coordination.message_exchange import Message, MessageExchange

T = TypeVar("T")

_PREFIX = "unickpt-load-"
_STALE_S = 3600.0
_YIELDS = 20  # before the first pause: a peer is mostly less than one copy behind
_PAUSES_S = (0.00005, 0.005)
OPENED, READY, CONSUMED, FAILED = range(4)
_FIELDS = 4
_ROWS, _SEGMENT, _PROGRESS = "rows", "segment", "progress"
_RANK_BYTES = 8 << 20  # shared memory per rank; touching new pages costs more than copying
_LEAST_RANK_BYTES = 256 << 10


class HostPeers:
    """Shared memory of the ranks of a host during one load. A context manager.

    Attributes:
        ranks: job ranks on this host, ascending.
        me: position of this process in ``ranks``.
        rows: for each rank of the host, the sorted index rows that it reads, int64.
        memory: the shared memory that each rank of the host fills, of equal sizes.
        cached: the page cache holds most of what each rank of the host reads.
        rounds: rounds of the shared memory that have begun, the same on all ranks of the host between two uses of it.
    """

    def __init__(self, folders: dict[int, Path], rank: int, *, timeout_s: float, cached: bool = False) -> None:
        """``folders``: what each rank of the host has prepared, by job rank, ascending.

        Raises:
            StorageError: this rank cannot open a file, or a folder is not its user's.
            HostPeerFailedError: a rank did not open them in time.
        """
        self.ranks, self._timeout_s, self.cached = list(folders), timeout_s, cached
        self.me = self.ranks.index(rank)
        self.rows: list[Ints] = []
        self.memory: list[memoryview] = []
        self._maps: list[mmap.mmap] = []
        self._views: list[memoryview] = []
        self._progress = -1
        self.rounds = 0
        try:
            self._progress = os.open(folders[self.ranks[0]] / _PROGRESS, os.O_RDWR | os.O_CLOEXEC)
            self._open(folders)
            self.publish(OPENED, 1)
            if self.me == 0:
                self.wait(OPENED, 1, also_failed=True)  # a rank that already failed opens no more files
        except BaseException as err:
            with contextlib.suppress(OSError):
                self.publish(OPENED, 1)
                self.fail()
            self._close()
            if isinstance(err, OSError):
                where = folders[self.ranks[0]].parent
                raise StorageError(
                    f"{where}: rank {rank} cannot open the memory that the ranks of this host share ({err})"
                ) from err
            raise
        finally:
            for folder in folders.values() if self.me == 0 else ():
                _remove(folder)  # the files exist until the last process closes them

    def _open(self, folders: dict[int, Path]) -> None:
        for folder in folders.values():
            check_folder(folder)
            self.rows.append(np.fromfile(folder / _ROWS, np.int64))
            with open(folder / _SEGMENT, "r+b") as segment:
                self._maps.append(mmap.mmap(segment.fileno(), 0))
        least_bytes = min(map(len, self._maps))
        self._views = [memoryview(each) for each in self._maps]
        self.memory = [view[:least_bytes] for view in self._views]

    def _close(self) -> None:
        for part in [*self.memory, *self._views]:
            with contextlib.suppress(BufferError):  # a traceback may still hold a view of the memory
                part.release()
        for mapped in self._maps:
            with contextlib.suppress(BufferError):
                mapped.close()
        if self._progress >= 0:
            os.close(self._progress)

    def publish(self, field: int, value: int) -> None:
        """Publish the progress of this rank. The system call makes earlier stores to the shared memory visible first."""
        os.pwrite(self._progress, np.int64(value).tobytes(), 8 * (self.me * _FIELDS + field))

    def fail(self) -> None:
        """Publish that this rank failed, so that no rank waits for it."""
        self.publish(FAILED, 1)

    def wait(self, field: int, value: int, *, also_failed: bool = False) -> None:
        """Wait until all ranks of the host have published ``value`` or more in a field.

        Args:
            field: column of the table of progress.
            value: value to wait for.
            also_failed: do not raise for a rank that failed.

        Raises:
            HostPeerFailedError: a rank failed, or did not get there in time; the message names it.
        """
        begin, pause, yields = time.monotonic(), _PAUSES_S[0], _YIELDS
        while True:
            table = np.frombuffer(os.pread(self._progress, 8 * _FIELDS * len(self.ranks), 0), np.int64).reshape(-1, _FIELDS)
            for rank, failed in zip(self.ranks, table[:, FAILED].tolist(), strict=True):
                if failed and not also_failed:
                    raise HostPeerFailedError(f"rank {rank} of this host failed while it read data that other ranks need")
            late = [rank for rank, at in zip(self.ranks, table[:, field].tolist(), strict=True) if at < value]
            if not late:
                return
            if time.monotonic() - begin > self._timeout_s:
                raise HostPeerFailedError(
                    f"rank {self.ranks[self.me]} waited {self._timeout_s:.0f} s for data that rank "
                    f"{', '.join(map(str, late))} of this host reads"
                )
            if yields:
                yields -= 1
                os.sched_yield()
                continue
            time.sleep(pause)
            pause = min(pause * 1.5, _PAUSES_S[1])

    def __enter__(self) -> HostPeers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.fail()
        self._close()


class HostMemory:
    """The shared memory of a host during several steps of one load. A context manager.

    Args:
        opener: opens the memory, at its first use; None if this rank shares no memory.
    """

    def __init__(self, opener: Callable[[], HostPeers] | None) -> None:
        self._opener = opener
        self._peers: HostPeers | None = None

    def use(self, part: Callable[[HostPeers | None], T]) -> T:
        """Return the result of a part, given the ranks that share memory with this one, or None.

        If the part raises, the other ranks of the host stop waiting for this one.
        """
        if self._peers is None and self._opener is not None:
            self._peers = self._opener()
        try:
            return part(self._peers)
        except BaseException:
            if self._peers is not None:
                self._peers.fail()
            raise

    def __enter__(self) -> HostMemory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._peers is not None:
            self._peers.__exit__(kind, error, trace)


def prepare_peers(
    exchange: MessageExchange,
    rows: Ints | None,
    failure: Failure | None,
    *,
    identity: str = "",
    wanted_bytes: int,
    cached: bool = False,
    share: bool = True,
) -> tuple[tuple[Failure, ...], Callable[[], HostPeers] | None]:
    """Agree that every rank has its read plan, and prepare the shared memory of each host. Every rank calls this.

    Args:
        exchange: message exchange of the whole job.
        rows: sorted index rows that this rank reads, int64; None if it failed.
        failure: why this rank cannot continue, or None.
        identity: identity of the opened checkpoint. A rank whose identity differs from rank 0's fails, because the
            checkpoint may have been saved again in between.
        wanted_bytes: total size of the rows, an upper limit of the memory that this rank shares.
        cached: the page cache holds most of the rows.
        share: False: this rank does not share memory.

    Returns:
        All failures, the same on every rank, and a function that opens the shared memory. The function is None if this
        rank does not share memory or if any rank failed.
    """
    token = str(exchange.broadcast("peers", {"token": uuid.uuid4().hex} if exchange.rank == 0 else None)["token"])
    host, folder, problem = _host() if share and failure is None and exchange.world > 1 else "", None, None
    try:
        if host:
            folder = _folder(token, exchange.rank)
            problem = _prepare(folder, exchange.world, rows, wanted_bytes)
        encoded = None if failure is None else failure.to_json()
        message = {"failure": encoded, "host": "" if problem else host, "identity": identity}
        messages = exchange.gather("planned", {**message, "problem": problem, "cached": cached})
        if messages is not None:
            _warn(messages)
        verdict = exchange.scatter("planned-verdict", None if messages is None else _verdicts(messages), notice=False)
    except BaseException:
        _remove(folder)
        raise
    failures = tuple(map(Failure.from_json, verdict["failures"]))
    if failures or not verdict["ranks"]:
        _remove(folder)
        return failures, None
    folders = {rank: _folder(token, rank) for first, count in verdict["ranks"] for rank in range(first, first + count)}
    return (), partial(HostPeers, folders, exchange.rank, timeout_s=exchange.timeout_s, cached=verdict["cached"])


def _folder(token: str, rank: int) -> Path:
    """Return the folder of a rank. All ranks know its name, so no message lists the folders of a host for each of its ranks."""
    return SHARED_MEMORY / f"{_PREFIX}{token}-{rank}"


def _warn(messages: list[Message]) -> None:
    """Warn of ranks that cannot share memory."""
    problems = {rank: message["problem"] for rank, message in enumerate(messages) if message["problem"] is not None}
    if problems:
        rank, reason = min(problems.items())
        more = f" The same holds for {len(problems) - 1} other ranks." if len(problems) > 1 else ""
        logger.warning("unickpt: rank %d cannot share memory: %s. It reads all of its data itself.%s", rank, reason, more)


def _verdicts(messages: list[Message]) -> list[Message]:
    """Return a verdict for each rank: all failures, runs of ranks that it shares memory with (first, count), and ``cached``."""
    failures, own = _failures(messages), dict[int, Message]()
    for ranks in grouped([m["host"] for m in messages]):
        if len(ranks) == 1 or not messages[ranks[0]]["host"]:
            continue
        cached = all(messages[rank]["cached"] for rank in ranks)
        runs = _runs(ranks)
        own |= {rank: {"ranks": runs, "cached": cached} for rank in ranks}
    return [{"failures": failures, **own.get(rank, {"ranks": [], "cached": False})} for rank in range(len(messages))]


def _runs(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending ranks as runs (first, count)."""
    found: list[tuple[int, int]] = []
    for rank in ranks:
        first, count = found[-1] if found else (rank, 0)
        if first + count == rank:
            found[-1:] = [(first, count + 1)]
        else:
            found.append((rank, 1))
    return found


def _failures(messages: list[Message]) -> list[Message]:
    found: list[Message] = [m["failure"] for m in messages if m["failure"] is not None]
    return found or [
        Failure(
            FailureKind.DAMAGED,
            rank,
            text="opened another checkpoint than rank 0 "
            f"(index {message['identity']}, on rank 0 {messages[0]['identity']}). Either it was saved again in between, or the "
            "storage is not shared. Load again",
        ).to_json()
        for rank, message in enumerate(messages)
        if message["identity"] != messages[0]["identity"]
    ]


def _host() -> str:
    """Return a key that is equal exactly for processes that can share memory, or '' if there is no shared memory."""
    try:
        return f"{boot_id()}/{SHARED_MEMORY.stat().st_dev}/{os.getuid()}" if boot_id() else ""
    except OSError:
        return ""


def grouped(keys: Sequence[str]) -> list[list[int]]:
    """Return the ranks with equal keys, in the order of the first rank of each key."""
    found: dict[str, list[int]] = {}
    for rank, key in enumerate(keys):
        found.setdefault(key, []).append(rank)
    return list(found.values())


def _prepare(folder: Path, world: int, rows: Ints | None, wanted_bytes: int) -> str | None:
    """Create the folder of this rank, and allocate its memory. Returns the error, or None."""
    try:
        make_folder(folder)
        _remove_stale(folder.lstat().st_mtime)
    except OSError as err:
        return f"{folder}: {err}"
    try:
        with create(folder / _ROWS) as file:
            np.asarray(rows if rows is not None else [], np.int64).tofile(file)
        with create(folder / _PROGRESS) as progress:  # that of the first rank of the host is used
            os.posix_fallocate(progress.fileno(), 0, 8 * _FIELDS * world)
        with create(folder / _SEGMENT) as segment:
            size = max(min(_RANK_BYTES, wanted_bytes), _LEAST_RANK_BYTES)
            os.posix_fallocate(segment.fileno(), 0, size)  # writing to a hole raises SIGBUS if /dev/shm is full
    except OSError as err:
        _remove(folder)
        return no_room(folder / _SEGMENT, max(min(_RANK_BYTES, wanted_bytes), _LEAST_RANK_BYTES), err)
    except Exception as err:  # the other ranks wait for this one's message
        _remove(folder)
        return f"{folder}: {err}"
    return None


def _remove(folder: Path | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_stale(now_s: float) -> None:
    """Remove the folders of loads that were killed before they opened their files. ``now_s``: by the clock of the files."""
    for path in own_folders(SHARED_MEMORY, _PREFIX):
        with contextlib.suppress(OSError):
            if now_s - path.lstat().st_mtime > _STALE_S:
                shutil.rmtree(path, ignore_errors=True)
